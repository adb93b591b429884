"""Detectors pruned to a share of their MACs: mean average precision by L2, repaired and fine-tuned, and speed.

A detector is trained on drawn shapes until it knows them, from random weights: ultralytics' by its own trainer,
torchvision's by prunekit's. Each budget is then met four ways: `l2` removes the channels of least norm; `repaired` is
`prune_yolo` or `prune` with training images without their labels, and no training; `finetuned` trains that for a tenth
of the epochs, by prunekit's trainer, from labels and from what the dense model's heads say; `torch-pruning` is that
package's group L2 norm with one ratio for all layers, found by bisection, and `torch-pruning finetuned` the same after
as many epochs. `max_drop`, for every one of `--drops`, is the smallest model, repaired, that loses at most so much
(`asked`) on `--held-out` shapes which nothing else sees. Figures: `map` and `map50` in percent of the test images,
which nothing else has seen, with the 95 % bootstrap interval of `map`; `of_dense` is `map` as a share of the dense
model's; `macs` the share that is left; `speedup` that of ONNX Runtime at batch 1 on one thread over the dense model,
the two taking turns: median of the ratios with the 95 % interval.

With `--data` a data set in ultralytics' form takes the place of the shapes, and with `--weights` a checkpoint that of
the training: `--models yolo11n --weights yolo11n.pt --data coco.yaml --size 640 --epochs 100`.

    python benchmarks/detection.py --folder DIR [--models yolov8n ...] [--macs 0.5 0.35] [--drops 0.01 0.03]
        [--held-out 1600] [--size 160] [--epochs 40] [--train 320] [--test 200] [--images 240] [--data FILE]
        [--weights FILE] [--threads 1] [--untimed] [--json] [--keep]

What is finished is kept in DIR and not done again. With `--untimed` nothing is timed, for a machine that is busy; the
same command without it later times what that run has kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_AUTOINSTALL", "false")
os.environ.setdefault("YOLO_VERBOSE", "false")

import torch
from common import RESULTS, as_items, as_markdown, collected, keep, onnx_speedup, show
from safetensors.torch import load_model, save_model
from torch import nn
from torchvision.models import get_model

import prunekit as pk
from prunekit.data.drawn_shapes import CLASSES, DrawnShapes
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.measure.accuracy import evaluate
from prunekit.measure.model_size import count_macs, count_parameters
from prunekit.tasks.detection import DETECTION
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks, with_teacher
from prunekit.training.loop import fit

CPU = torch.device("cpu")
YOLOS = ("yolov8n", "yolo11n", "yolo26n")
TORCHVISION = ("ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn")
VALIDATION = 48
FEW_PROPOSALS = {"box_batch_size_per_image": 64, "rpn_post_nms_top_n_train": 200, "rpn_post_nms_top_n_test": 100}
"""Of Faster R-CNN, so that its box head takes seconds a batch and no minute."""
BATCH = 16
TENTH = 10
"""The part of the epochs that a pruned model is fine-tuned for."""
LIMIT_S = 60
"""Seconds that torch-pruning may take."""
TIMED = "repaired", "torch-pruning"
COLUMNS = (
    "model", "asked", "method", "macs", "params", "map", "low", "high", "of_dense", "map50", "speedup",
    "speedup_low", "speedup_high", "failed",
)  # fmt: skip


def draw(folder: Path, size: int, train: int, test: int, first: int = 0) -> Path:
    """Writes drawn shapes, from number `first` on, in ultralytics' form, and returns their `data.yaml`."""
    path = folder / "data.yaml"
    if path.exists():
        return path
    shapes = DrawnShapes(first + train + VALIDATION + test, size)
    for index in range(first, len(shapes)):
        number = index - first
        part = "train" if number < train else "val" if number < train + VALIDATION else "test"
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        image, objects = shapes.read(index)
        image.save(folder / "images" / part / f"{index:05}.png")
        rows = []
        for (left, top, right, bottom), label in zip(objects.boxes.tolist(), objects.labels.tolist(), strict=True):
            sides = (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
            rows.append(" ".join([str(label), *(f"{value / size:.6f}" for value in sides)]))
        (folder / "labels" / part / f"{index:05}.txt").write_text("\n".join(rows))
    parts = "".join(f"{part}: images/{part}\n" for part in ("train", "val", "test"))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
    path.write_text(f"path: {folder.absolute()}\n{parts}names:\n{names}")
    return path


class Detector:
    """A kind of detector: how it is made, trained, pruned and read."""

    longer = 1.0
    augment = pk.AugmentSettings(crop="resized", flip=0.5, color_jitter=pk.ColorJitterSettings(0.2, 0.3, 0.3, hue=0.05))

    def __init__(self, name: str, options: argparse.Namespace, data: Path) -> None:
        self.name, self.options, self.data = name, options, data
        self.folder = options.folder / name
        settings = pk.DataSettings("yolo", root=data, image_size=options.size, batch=BATCH, augment=self.augment)
        self.splits: Splits = load_splits(settings)
        inputs, _ = next(iter(batches(self.splits.train, 1, shuffle_seed=None)))
        self.example = inputs

    def calibration(self) -> torch.Tensor:
        """Training images, without labels."""
        return next(iter(batches(self.splits.train, self.options.images, shuffle_seed=0)))[0]

    def judging(self) -> dict[str, Any]:
        """Task and samples that judge a drop: shapes that nothing else sees, or the validation images."""
        held_out, options = self.splits.validation, self.options
        if options.data is None:
            first = options.train + VALIDATION + options.test
            data = draw(options.folder / "held out", options.size, BATCH, options.held_out, first)
            held_out = load_splits(pk.DataSettings("yolo", root=data, image_size=options.size, batch=BATCH)).test
        return {"evaluate": "detection", "held_out": batches(held_out, BATCH, shuffle_seed=None)}

    def tuned(self, pruned: nn.Module, dense: nn.Module) -> nn.Module:
        """A pruned model after a tenth of the epochs, beside the dense one."""
        student, epochs = deepcopy(pruned), max(1, round(self.longer * self.options.epochs / TENTH))
        settings = pk.TrainSettings(epochs=epochs, optimizer="adamw", lr="auto", weight_decay=1e-4, distill="auto")
        settings = with_teacher(settings, DETECTION, dense)
        parts = build_callbacks(settings, CallbackInputs(self.splits, BATCH, dense))
        fit(student, self.splits, settings, device=CPU, seed=0, batch=BATCH, callbacks=parts)
        return student.eval()

    def score(self, model: nn.Module) -> dict[str, float]:
        """Its figures on the test images."""
        test = batches(self.splits.test, BATCH, shuffle_seed=None)
        return dict(evaluate(deepcopy(model), test, DETECTION, CPU).figures())


class Yolo(Detector):
    """One of ultralytics', by its own trainer."""

    def arguments(self, epochs: int, where: str, **more: Any) -> dict[str, Any]:
        return {
            "data": str(self.data), "imgsz": self.options.size, "epochs": epochs, "batch": BATCH, "workers": 0,
            "device": "cpu", "amp": False, "plots": False, "seed": 0, "optimizer": "AdamW", "verbose": False,
            "project": str(self.folder), "name": where, "exist_ok": True, "close_mosaic": epochs // 4, **more,
        }  # fmt: skip

    def dense(self) -> Any:
        """The trained model, as ultralytics' object."""
        from ultralytics import YOLO

        best = self.folder / "dense" / "weights" / "best.pt"
        if self.options.weights is not None:
            return YOLO(self.options.weights)
        if not (self.folder / "dense.done").exists():
            YOLO(f"{self.name}.yaml").train(**self.arguments(self.options.epochs, "dense", lr0=2e-3))
            (self.folder / "dense.done").touch()
        return YOLO(best)

    def module(self, made: Any) -> nn.Module:
        return made.model.float().eval()

    def ranked(self, dense: Any, macs: float) -> Any:
        from prunekit.integrations.ultralytics import prune_yolo

        return prune_yolo(dense, macs=macs, imgsz=self.options.size, scope="uniform")

    def repaired(self, dense: Any, **budget: Any) -> Any:
        from prunekit.integrations.ultralytics import prune_yolo

        return prune_yolo(dense, self.calibration(), imgsz=self.options.size, **budget)

    def stored(self, key: str, made: Any) -> None:
        """Keeps a pruned model for its timing."""
        made.save(self.folder / f"{key}.pt")

    def restored(self, key: str, dense: Any, way: Callable[[], Any]) -> Any:
        from prunekit.integrations.ultralytics import load_yolo

        return load_yolo(self.folder / f"{key}.pt")

    def finetuned(self, pruned: Any, dense: Any) -> Any:
        tuned = deepcopy(pruned)
        tuned.model = self.tuned(self.module(pruned), self.module(dense))
        return tuned

    def by_torch_pruning(self, dense: Any, macs: float) -> Any:
        from prunekit.integrations.ultralytics import load_yolo

        small = torch_pruned(deepcopy(self.module(dense)), self.example, macs, heads=[self.module(dense).model[-1]])
        file = self.folder / "torch-pruning.pt"
        dense = deepcopy(dense)
        dense.model = small
        dense.save(file)
        return load_yolo(file)


class Torchvision(Detector):
    """One of torchvision's, by prunekit's trainer, at the size of the images."""

    longer = 1.5
    """Of random weights it needs more epochs than ultralytics' do."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        classes, few = len(self.splits.classes) + 1, FEW_PROPOSALS if self.name.startswith("faster") else {}
        model = get_model(self.name, weights=None, weights_backbone=None, num_classes=classes, **few)
        size = self.options.size
        model.transform.min_size, model.transform.max_size = (size,), size
        if model.transform.fixed_size is not None:
            model.transform.fixed_size = (size, size)
        return model

    def train(self, model: nn.Module, epochs: int, lr: float) -> nn.Module:
        settings = pk.TrainSettings(epochs=epochs, optimizer="adamw", lr=lr, weight_decay=1e-4)
        fit(model, self.splits, settings, device=CPU, seed=0, batch=BATCH)
        return model.eval()

    def dense(self) -> nn.Module:
        model, path = self.build(), self.folder / "dense.safetensors"
        if path.exists():
            load_model(model, path)
            return model.eval()
        self.train(model, round(self.longer * self.options.epochs), 1e-3)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_model(model, str(path))
        return model

    def module(self, made: nn.Module) -> nn.Module:
        return made

    def ranked(self, dense: nn.Module, macs: float) -> nn.Module:
        return pk.prune(dense, self.example, macs=macs).model

    def repaired(self, dense: nn.Module, **budget: Any) -> nn.Module:
        return pk.prune(dense, calibration=self.calibration(), **budget).model

    def stored(self, key: str, made: nn.Module) -> None:
        """Keeps the weights of a pruned model for its timing."""
        save_model(made, str(self.folder / f"{key}.safetensors"))

    def restored(self, key: str, dense: nn.Module, way: Callable[[], nn.Module]) -> nn.Module:
        model = way()  # its structure is in no file
        load_model(model, self.folder / f"{key}.safetensors")
        return model.eval()

    def finetuned(self, pruned: nn.Module, dense: nn.Module) -> nn.Module:
        return self.tuned(pruned, dense)

    def by_torch_pruning(self, dense: nn.Module, macs: float) -> nn.Module:
        return torch_pruned(deepcopy(dense), self.example, macs, heads=[])


def torch_pruned(model: nn.Module, example: torch.Tensor, macs: float, heads: list[nn.Module]) -> nn.Module:
    """The model with the channels that torch-pruning removes at the ratio that leaves this share of the MACs."""
    import torch_pruning

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {LIMIT_S} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    whole, low, high, found = count_macs(model, (example,)), 0.0, 0.95, None
    for _ in range(7):
        ratio = (low + high) / 2
        small = deepcopy(model).train(False)
        for parameter in small.parameters():
            parameter.requires_grad_(True)
        importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
        last = [part for head in heads for part in head.modules() if isinstance(part, nn.Conv2d)]
        ignored = {id(part) for part in last}
        pruner = torch_pruning.pruner.MagnitudePruner(
            small, example, importance, pruning_ratio=ratio,
            ignored_layers=[
                own for own, other in zip(small.modules(), model.modules(), strict=True) if id(other) in ignored
            ],
        )  # fmt: skip
        pruner.step()
        small(example)
        left = count_macs(small, (example,)) / whole
        if left > macs:
            low = ratio
        else:
            high, found = ratio, small
    signal.alarm(0)
    if found is None:
        raise RuntimeError(f"no ratio up to 0.95 leaves {macs:.0%} of the MACs")
    return found


def rows_of(detector: Yolo | Torchvision) -> Iterator[dict[str, Any]]:
    """The rows of a detector; those that a run before this one made are read."""
    start = time.perf_counter()
    dense = detector.dense()
    made = partial(figures, detector, dense)
    yield cached(detector, "dense", lambda: made("dense", 1.0, lambda: dense, start))
    for drop in detector.options.drops:

        def within(drop: float = drop) -> Any:
            return detector.repaired(dense, max_drop=drop, **detector.judging())

        yield cached(detector, f"max_drop {drop}", partial(made, "max_drop", drop, within, time.perf_counter()))
    for macs in detector.options.macs:
        row: dict[str, Any] = {}
        for method, way in Pruned(detector, dense, macs).ways().items():
            key = f"{method} {macs}"
            if method == "torch-pruning finetuned" and "failed" in row:
                continue
            row = cached(detector, key, partial(made, method, macs, way, time.perf_counter(), stored=key))
            if method in TIMED and "map" in row and not detector.options.untimed:
                row |= cached(detector, f"{key}, timed", partial(timed, detector, dense, key, way))
            yield row


class Pruned:
    """A detector at one budget; what one method made, another may go on from."""

    def __init__(self, detector: Yolo | Torchvision, dense: Any, macs: float) -> None:
        self._detector, self._dense, self._macs = detector, dense, macs

    @cached_property
    def repaired(self) -> Any:
        return self._detector.repaired(self._dense, macs=self._macs)

    @cached_property
    def torch_pruning(self) -> Any:
        return self._detector.by_torch_pruning(self._dense, self._macs)

    def ways(self) -> dict[str, Callable[[], Any]]:
        """Each method, as a function that returns the pruned detector."""
        tune, macs = self._detector.finetuned, self._macs
        return {
            "l2": lambda: self._detector.ranked(self._dense, macs),
            "repaired": lambda: self.repaired,
            "finetuned": lambda: tune(self.repaired, self._dense),
            "torch-pruning": lambda: self.torch_pruning,
            "torch-pruning finetuned": lambda: tune(self.torch_pruning, self._dense),
        }


def figures(
    detector: Yolo | Torchvision, dense: Any, method: str, asked: float, make: Callable[[], Any], start: float,
    *, stored: str = "",
) -> dict[str, Any]:  # fmt: skip
    """A row; of a way that fails, why."""
    found: dict[str, Any] = {"model": detector.name, "asked": asked, "method": method}
    try:
        made = make()
        seconds = time.perf_counter() - start
        whole, model = detector.module(dense), detector.module(made)
        score = detector.score(model)
        if method in TIMED:
            detector.stored(stored, made)
    except Exception as error:  # whatever another package's code does
        return {**found, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"}
    return {
        **found,
        **{name: score[name] for name in ("map", "low", "high", "map50")},
        "macs": count_macs(model, (detector.example,)) / count_macs(whole, (detector.example,)),
        "params": count_parameters(model) / count_parameters(whole),
        "seconds": seconds,
    }


def timed(detector: Yolo | Torchvision, dense: Any, key: str, way: Callable[[], Any]) -> dict[str, Any]:
    """The speedup of a pruned model that was kept."""
    return onnx_speedup(detector.module(dense), detector.module(detector.restored(key, dense, way)), detector.example)


def cached(detector: Detector, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row, made once for a folder."""
    path = detector.folder / "rows.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if key not in known:
        known[key] = make()
        detector.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1))
    found: dict[str, Any] = known[key]
    return {**found, **({"of_dense": found["map"] / known["dense"]["map"]} if "map" in found else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=[*YOLOS, *TORCHVISION])
    parser.add_argument("--macs", type=float, nargs="+", default=[0.5, 0.35])
    parser.add_argument("--drops", type=float, nargs="*", default=[], help="of mean precision, 0.01 a point")
    parser.add_argument("--held-out", type=int, default=1600, help="shapes that a drop is judged on")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--train", type=int, default=320)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--images", type=int, default=240)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--untimed", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = options.data or draw(options.folder / "shapes", options.size, options.train, options.test)
    models = ((Torchvision if name in TORCHVISION else Yolo)(name, options, data) for name in options.models)
    found = collected((row for model in models for row in rows_of(model)), as_json=options.json)
    if not options.json:
        show(found, as_json=False)
    if options.keep:
        setting = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        setting.pop("folder")
        for package in ("ultralytics", "torch-pruning", "pycocotools", "onnxruntime"):
            try:
                setting[package] = version(package)
            except PackageNotFoundError:
                setting[package] = None
        keep("detection", found, setting)
        text = f"# Detectors at a share of their MACs\n\n{as_items(setting)}\n{as_markdown(found, COLUMNS)}"
        (RESULTS / "detection.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

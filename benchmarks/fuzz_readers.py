"""Readers of the files that strangers may have written: sound files of each, and how they are read and used whole."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import prunekit as pk
from prunekit.utils.files import sha256, with_checksum

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # sound files that the tests have too

from drawn_files import write_coco, write_yolo
from exported_files import CLASSES, FEED, classifier, photos
from synthetic_run import write_run
from tiny_language import text, write_tokenizer


@dataclass(frozen=True)
class Sound:
    """Sound files, and how they are read.

    Attributes:
        read: reads them and uses what it read, to the end.
        files: that are changed, one at a time.
        sign: makes checksums right again after a change, which else would hide what lies behind them.
    """

    read: Callable[[], Any]
    files: tuple[Path, ...]
    sign: Callable[[], None] = lambda: None


READERS: dict[str, Callable[[Path], Sound]] = {}
"""Name of a reader -> a function that writes its sound files into an empty folder."""


def reader(name: str) -> Callable[[Callable[[Path], Sound]], Callable[[Path], Sound]]:
    """Registers a reader."""

    def register(function: Callable[[Path], Sound]) -> Callable[[Path], Sound]:
        if name in READERS:
            raise ValueError(name)
        READERS[name] = function
        return function

    return register


def whole(splits: Any) -> None:
    """Reads all samples of a data set, augmented and as they are."""
    for part in (splits.train, splits.validation, splits.test):
        part.fetch(torch.arange(len(part)))
        part.fetch(torch.arange(len(part)), (0, 0))


def splits_of(source: str, root: Path, task: str = "image_classification", **more: Any) -> Any:
    """The splits of a data set, as a recipe has them."""
    from prunekit.data.sources import load_splits
    from prunekit.settings.inputs import DataSettings

    size = {} if source == "text" else {"image_size": 16}
    return load_splits(DataSettings(source, root=root, **size, **more), task)


@reader("recipes")
def recipes(folder: Path) -> Sound:
    from prunekit.recipe.loading import folder as bundled
    from prunekit.recipe.loading import load

    files = []
    for path in sorted(bundled().glob("*.yaml"))[:4]:
        (folder / path.name).write_bytes(path.read_bytes())
        files.append(folder / path.name)
    return Sound(lambda: [load(path) for path in files], tuple(files))


def small() -> Any:
    """A small classifier of images, pruned."""
    return pk.prune(classifier(16), torch.randn(2, 3, 8, 8), macs=0.5)


@reader("plans")
def plans(folder: Path) -> Sound:
    pk.plan(classifier(16), torch.randn(2, 3, 8, 8), macs=0.5).save(folder)
    known = folder / "plan.json", folder / "plan.safetensors"

    def read() -> None:
        plan = pk.load_plan(folder)
        repr(plan), plan.widths(), str(plan)
        pk.compact(classifier(16), plan)(torch.randn(1, 3, 8, 8))

    return Sound(read, known, lambda: _sign(*known))


BROKEN = (ValueError, AttributeError, TypeError, LookupError, RecursionError)
"""What comes of signing a file that is no longer JSON of its form: it stays as it is."""


def _sign(text: Path, tensors: Path) -> None:
    """Puts the checksum of a file into another, and that one's own."""
    with suppress(*BROKEN):
        known = json.loads(text.read_bytes())
        if isinstance(known["sha256"], dict):
            known["sha256"][tensors.name] = sha256(tensors)
        else:
            known["sha256"] = sha256(tensors)
        text.write_text(json.dumps(with_checksum(known)))


def _sign_state(text: Path, tensors: Path) -> None:
    """The same for the folder of a state, whose text is in its own."""
    with suppress(*BROKEN):
        body = json.loads(text.read_bytes())["body"]
        body["tensors"] = sha256(tensors)
        text.write_text(json.dumps({"sha256": hashlib.sha256(json.dumps(body).encode()).hexdigest(), "body": body}))


def _saved(folder: Path) -> tuple[Path, Path]:
    pk.save(small(), folder, preprocessing=FEED, classes=CLASSES, task="image_classification")
    Image.new("RGB", (12, 9), (10, 200, 30)).save(folder.parent / "photo.png")
    return folder / "prunekit.json", folder / "model.safetensors"


@reader("model folders")
def model_folders(folder: Path) -> Sound:
    known = _saved(folder / "small")

    def read() -> None:
        loaded = pk.load(folder / "small", model=classifier(16))
        pk.predict(loaded, folder / "photo.png").rows()

    return Sound(read, (*known, folder / "small" / "plan.json"), lambda: _sign(*known))


@reader("interfaces and preprocessing of folders")
def interfaces(folder: Path) -> Sound:
    """Changes what a folder says of inputs, outputs, classes, task and preprocessing, one part of its manifest."""
    manifest, _ = _saved(folder / "small")
    sound = json.loads(manifest.read_text())
    part = folder / "interface.json"
    part.write_text(json.dumps(sound["interface"]))

    def sign() -> None:
        with suppress(*BROKEN):
            manifest.write_text(json.dumps(with_checksum(sound | {"interface": json.loads(part.read_bytes())})))

    def read() -> None:
        loaded = pk.load(folder / "small", model=classifier(16))
        pk.predict(loaded, folder / "photo.png").rows()
        pk.interface(loaded)

    return Sound(read, (part,), sign)


@reader("weights (.pt, .th, .safetensors)")
def weights(folder: Path) -> Sound:
    from prunekit.models.state_dicts import load_weights

    state = {name: tensor.clone() for name, tensor in classifier(8).state_dict().items()}
    files = folder / "a.pt", folder / "b.th", folder / "c.safetensors", folder / "d.pt"
    torch.save(state, files[0])
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}, files[1])
    save_file(state, files[2])
    torch.save(state, files[3], _use_new_zipfile_serialization=False)

    def read() -> None:
        for path in files:
            model = classifier(8)
            load_weights(model, path)
            model(torch.randn(1, 3, 8, 8))

    return Sound(read, files)


@reader("archives of images (.npz)")
def archives(folder: Path) -> Sound:
    draw = np.random.default_rng(0)
    one = {"images": draw.integers(0, 256, (30, 6, 5, 3), dtype=np.uint8), "labels": np.arange(30) % 3}
    np.savez(folder / "one.npz", **one, classes=np.array(["a", "b", "c"]))
    two = {"x_train": one["images"], "y_train": one["labels"], "x_test": one["images"][:6], "y_test": one["labels"][:6]}
    np.savez_compressed(folder / "two.npz", **two)
    files = folder / "one.npz", folder / "two.npz"
    return Sound(lambda: [whole(splits_of("npz", path)) for path in files], files)


class Two(nn.Module):
    """Takes two inputs."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


@reader("inputs to predict (.npz, .npy, .safetensors)")
def inputs(folder: Path) -> Sound:
    arrays = {"left": np.ones((2, 4), np.float32), "right": np.zeros((2, 4), np.float32)}
    files = tuple(folder / f"x.{kind}" for kind in ("npz", "npy", "safetensors"))
    np.savez_compressed(files[0], **arrays)
    np.save(files[1], arrays["left"])
    save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, files[2])
    models = Two(), nn.Identity(), Two()
    return Sound(lambda: [pk.predict(m, path).rows() for m, path in zip(models, files, strict=True)], files)


@reader("folders of images")
def images(folder: Path) -> Sound:
    files = []
    draw = np.random.default_rng(0)
    kinds = (
        ("png", "RGB"),
        ("jpg", "RGB"),
        ("gif", "P"),
        ("bmp", "RGB"),
        ("webp", "RGB"),
        ("tif", "L"),
        ("ppm", "RGB"),
    )
    for number, (suffix, mode) in enumerate(kinds):
        for label in ("cat", "dog"):
            path = folder / "data" / label / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)).convert(mode).save(path)
        files.append(path)
    model = classifier(8)

    def read() -> None:
        whole(splits_of("imagefolder", folder / "data", test_share=0.3, max_corrupt=1))
        pk.predict(model, folder / "data", preprocessing=FEED, classes=CLASSES).rows()

    return Sound(read, tuple(files))


@reader("COCO")
def coco(folder: Path) -> Sound:
    root = write_coco(folder / "data", images=3)
    files = root / "annotations" / "instances_train2017.json", root / "annotations" / "person_keypoints_val2017.json"

    def read() -> None:
        whole(splits_of("coco", root, targets=("masks",)))
        whole(splits_of("coco", root, targets=("keypoints",)))

    return Sound(read, files)


@reader("YOLO")
def yolo(folder: Path) -> Sound:
    made = {kind: write_yolo(folder / kind, images=3, kind=kind) for kind in ("boxes", "polygons", "points")}
    targets = {"boxes": (), "polygons": ("masks",), "points": ("keypoints",)}
    listed = made["boxes"] / "some.txt"
    listed.write_text("".join(f"./images/train/{path.name}\n" for path in (made["boxes"] / "images/train").iterdir()))
    described = made["boxes"] / "data.yaml"
    described.write_text(described.read_text().replace("train: images/train", f"train: {listed.name}"))
    files = [listed, *(root / "data.yaml" for root in made.values())]
    files += [sorted((root / "labels" / "train").glob("*.txt"))[0] for root in made.values()]

    def read() -> None:
        for kind, root in made.items():
            whole(splits_of("yolo", root, targets=targets[kind], max_corrupt=1))

    return Sound(read, tuple(files))


@reader("texts (.txt, .jsonl)")
def texts(folder: Path) -> Sound:
    write_tokenizer(folder / "tokens", special=True)
    files = folder / "rows.jsonl", folder / "plain.txt"
    files[0].write_text("".join(json.dumps({"text": text(40), "id": number}) + "\n" for number in range(12)))
    files[1].write_text(text(500))
    tasks = ("causal_lm", "masked_lm", "embedding")

    def read() -> None:
        for path, task in product(files, tasks):
            whole(splits_of("text", path, task, tokenizer=folder / "tokens", window=10))

    return Sound(read, files)


@reader("tokenizers")
def tokenizers(folder: Path) -> Sound:
    write_tokenizer(folder / "tokens", special=True)
    named = {"mask_token": "[MASK]", "pad_token": {"content": "[PAD]"}, "eos_token": "[SEP]"}
    (folder / "tokens" / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "tokens" / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "plain.txt").write_text(text(500))

    def read() -> None:
        for task in ("causal_lm", "masked_lm", "embedding"):
            whole(splits_of("text", folder / "plain.txt", task, tokenizer=folder / "tokens", window=10))

    return Sound(read, tuple(sorted((folder / "tokens").glob("*.json"))))


def _exported(form: str) -> Callable[[Path], Sound]:
    def prepare(folder: Path) -> Sound:
        from prunekit.backends.files.exported_model import open_exported

        file = photos(form, folder)
        Image.new("RGB", (12, 9), (10, 200, 30)).save(folder / "photo.png")

        def read() -> None:
            model = open_exported(file)
            model(torch.randn(2, 3, 8, 8))
            pk.predict(file, folder / "photo.png").rows()

        beside = file.with_suffix(".bin")
        return Sound(read, (file, beside) if beside.is_file() else (file,))

    return prepare


for _form, _name in (("pt2", "pt2 programs"), ("onnx", "ONNX files"), ("openvino", "OpenVINO files (.xml, .bin)")):
    reader(_name)(_exported(_form))


@reader("channel statistics and thresholds")
def statistics(folder: Path) -> Sound:
    stats = pk.calibrate(classifier(8), torch.randn(16, 3, 8, 8))
    stats.save(folder / "stats")
    found = pk.calibrate_thresholds(classifier(8), torch.randn(16, 3, 8, 8), ["1"], target=0.5)
    found.save(folder / "thresholds")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]

    def read() -> None:
        str(type(stats).load(folder / "stats"))
        str(type(found).load(folder / "thresholds"))

    return Sound(read, tuple(files))


@reader("latency profiles and times of layers")
def profiles(folder: Path) -> Sound:
    from prunekit.measure.latency_profile.network_timing import read_times

    os.environ["PRUNEKIT_CACHE"] = str(folder)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    pk.profile(model, torch.randn(4, 8), networks=10)
    files = sorted((folder / "latency").glob("*.json"))[:3]
    return Sound(lambda: [read_times(path) for path in files], tuple(files))


@reader("checkpoints")
def checkpoints(folder: Path) -> Sound:
    from prunekit.utils.state_folders import TENSORS, TEXT, read_state, write_state

    model = classifier(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "random": torch.get_rng_state(),
    }
    write_state(folder / "state", state)

    def read() -> None:
        found = read_state(folder / "state")
        with suppress(*REFUSED):
            classifier(8).load_state_dict(found["model"])

    known = folder / "state" / TEXT, folder / "state" / TENSORS
    return Sound(read, known, lambda: _sign_state(*known))


REFUSED = (RuntimeError, KeyError, TypeError, AttributeError)
"""Errors of torch's `load_state_dict`, which here stands for the owner of a state."""


@reader("runs to report")
def reports(folder: Path) -> Sound:
    from prunekit.report.pages.run_page import missing, write_report

    run = write_run(folder / "run", groups=4)
    (run / "log.txt").write_text("2026-11-20T11:00:00+00:00 run: begun\n2026-11-20T11:02:54+00:00 finished\n")
    files = sorted(path for path in run.iterdir() if path.suffix in (".json", ".csv", ".txt", ".yaml"))
    return Sound(lambda: (write_report(run, whole=False), missing(run)), tuple(files))  # as `prunekit report` does


@reader("runs to resume")
def resumes(folder: Path) -> Sound:
    from prunekit.jobs.run.resume import find_run

    run = folder / "runs" / "t" / "20261120-110000"
    (run / "resume").mkdir(parents=True)
    identity = {
        "command": "finetune",
        "recipe": {"seed": 0, "data": {"batch": 8}},
        "versions": {"torch": "2"},
        "data": "x",
    }
    status = {"state": "interrupted", "started": "2026-11-20T11:00:00+00:00", "pid": 1, "pid_since": 1.0, "resumed": []}
    (run / "status.json").write_text(json.dumps(status))
    (run / "resume" / "run.json").write_text(json.dumps(identity))

    def read() -> None:
        find_run("auto", run.parent, identity, lambda message: None)
        find_run(run, run.parent, identity, lambda message: None)

    return Sound(read, (run / "status.json", run / "resume" / "run.json"))

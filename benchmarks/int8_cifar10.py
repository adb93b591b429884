"""int8 after pruning without training, on CIFAR-10 with trained weights: top-1, size and time of every file.

A ResNet is pruned from calibration images and repaired, as `oneshot_cifar10.py` does, or loaded from the folder that
`prunekit prune resnet56-cifar10-oneshot` wrote; it and the dense model are exported to ONNX, and quantized by ONNX
Runtime and by NNCF for OpenVINO, within `--max-drop` points on the last 2,000 training images, which neither int8 nor
pruning here is calibrated on. A row is a file in a runtime at a batch size: `top1` in percent of all test images,
computed by that runtime from the file of batch 16; `drop` the points that it is below the same model's float file;
`floats` the layers with operators that compute in float; `mb` its size with what lies beside
it; `median_ms` of a forward pass of the batch with the 10th and 90th percentile, all four files of a runtime and a
batch taking turns; `over_float` and `over_dense` how many times faster it is than the same model's float file, and than
the dense model's: medians of the paired ratios with their 10th and 90th percentile. `kernels` counts the operators that
ONNX Runtime's profiler saw, those of int8 among them. Test images are seen by the final measurement alone. DATA is an
`.npz` of x_train, y_train, x_test and y_test; WEIGHTS fit the ResNets for 32x32 images of `--zoo cifar`.

    python benchmarks/int8_cifar10.py --depth 56 --weights FILE --data FILE [--reduction 2.0] [--round-to 1]
        [--pruned FOLDER] [--seed N] [--images 1024] [--int8-images 256] [--max-drop 0.5] [--rounds 60] [--threads 1]
        [--json] [--keep]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, as_items, as_markdown, collected, keep, ratio, show
from oneshot_cifar10 import drawn, normalized

import prunekit
from prunekit.backends.backend import FORMATS, RUNTIMES
from prunekit.backends.files.onnx_program import export_onnx
from prunekit.backends.int8.quantizer import Quantized
from prunekit.backends.onnx_runtime import KERNEL, open_session
from prunekit.backends.session import Session, Setting, Source, Timer
from prunekit.data.local_files import LabeledArrays, read_npz
from prunekit.errors import DataError
from prunekit.measure.latency.timing import alternate, warm_up
from prunekit.measure.model_size import count_macs
from prunekit.models.names import DEPTHS
from prunekit.models.zoo import build_model
from prunekit.settings.deployment import QuantizeSettings
from prunekit.settings.inputs import ModelSettings
from prunekit.utils.availability import int8_note
from prunekit.utils.context import threads

CPU = torch.device("cpu")
BATCHES = (1, 16)
SCORED = 16
"""Batch size of the files that classify images: it divides their number."""
VALIDATION = 2000
Array = np.ndarray[Any, Any]
Run = Callable[[Array], Array]
COLUMNS = (
    "model", "macs", "runtime", "dtype", "batch", "top1", "drop", "floats", "mb", "median_ms", "spread_ms",
    "over_float", "over_dense",
)  # fmt: skip


def opened(file: Path, runtime: str, batch: int, options: argparse.Namespace) -> Session:
    """A session on a file of either dtype: the file says what is in int8."""
    setting = Setting(runtime, "cpu", batch, options.threads)
    files = {(batch, "float32"): file}
    return RUNTIMES.get(runtime).session(Source(files=files), (torch.zeros(batch, 3, 32, 32),), setting)


def runner(file: Path, runtime: str, options: argparse.Namespace) -> Run:
    """What classifies images: (N, 3, 32, 32) -> (N,)."""
    if runtime == "onnxruntime":
        session = open_session(file, options.threads)
        return lambda images: session.run(None, {session.get_inputs()[0].name: images})[0].argmax(1)
    import openvino

    hints = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(file, "CPU", hints)
    return lambda images: compiled(images)[0].argmax(1)


def top1(file: Path, runtime: str, pixels: torch.Tensor, labels: torch.Tensor, options: argparse.Namespace) -> float:
    """Percent of images that a file classifies rightly."""
    run, right = runner(file, runtime, options), 0
    for images, wanted in zip(pixels.split(SCORED), labels.split(SCORED), strict=True):
        right += int((run(normalized(images).contiguous().numpy()) == wanted.numpy()).sum())
    return 100 * right / len(labels)


def size_mb(file: Path) -> float:
    """Megabytes of a file and of those beside it that belong to it."""
    return sum(one.stat().st_size for one in file.parent.glob(f"{file.stem}.*") if one.suffix != ".json") / 1e6


def kernels(file: Path, batch: int) -> dict[str, int]:
    """Operators of one forward pass in ONNX Runtime."""
    session = open_session(file, 1, profile=file.with_suffix(""))
    session.run(None, {session.get_inputs()[0].name: np.zeros((batch, 3, 32, 32), np.float32)})
    written = Path(session.end_profiling())
    events = json.loads(written.read_text(encoding="utf-8"))
    written.unlink()
    return dict(Counter(event["args"]["op_name"] for event in events if event["name"].endswith(KERNEL)))


def quantized(
    model: torch.nn.Module, folder: Path, runtime: str, batch: int, data: LabeledArrays, options: argparse.Namespace
) -> tuple[Path, Quantized]:
    """The float file of a batch size, and the quantized one; both in the folder."""
    file = folder / f"{batch}.onnx"
    if not file.exists():
        export_onnx(model, torch.zeros(batch, 3, 32, 32), file)
    images = normalized(data.pixels[: options.int8_images]).contiguous().numpy()
    batches = [{"x": images[at : at + batch]} for at in range(0, len(images), batch)]
    settings = QuantizeSettings(images=options.int8_images, max_drop=options.max_drop)
    held = slice(len(data.pixels) - VALIDATION, None)
    if runtime == "onnxruntime":

        def score(path: Path) -> float:
            return top1(path, runtime, data.pixels[held], data.labels[held], options)

        limit = score if batch == SCORED else None  # the ranges of another batch size are the same
        made = folder / f"{batch}-int8.onnx"
        return file, FORMATS.get("onnx").quantize(file, made, batches, settings=settings, score=limit)

    def score(path: Path) -> float:
        return top1(path, runtime, data.pixels[held], data.labels[held], options)

    limit = score if batch == SCORED else None
    return file, FORMATS.get("openvino").quantize(
        file, folder / f"{batch}-nncf.xml", batches, settings=settings, score=limit
    )


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows, runtime by runtime."""
    build = ModelSettings(f"resnet{options.depth}", "cifar", weights=str(options.weights))
    archive, dense = read_npz(options.data), build_model(build, num_classes=10).eval()
    if archive.test is None:
        raise DataError(f"{options.data}: expected x_test and y_test")
    rest, test = archive.rest, archive.test
    models = {"dense": dense, "pruned": pruned_model(dense, rest, options)}
    with tempfile.TemporaryDirectory() as place:
        for runtime in ("onnxruntime", "openvino"):
            if runtime == "openvino" and (reason := FORMATS.get("openvino").unquantizable()):
                print(reason, file=sys.stderr)
                continue
            files: dict[tuple[str, str, int], Path] = {}
            facts: dict[tuple[str, str], dict[str, Any]] = {}
            for name, model in models.items():
                folder = Path(place) / name
                folder.mkdir(exist_ok=True)
                macs = count_macs(model, (normalized(test.pixels[:1]),))
                for batch in BATCHES:
                    file, found = quantized(model, folder, runtime, batch, rest, options)
                    files[name, "fp32", batch], files[name, "int8", batch] = file, found.path
                    if batch == SCORED:
                        scores = [top1(one, runtime, test.pixels, test.labels, options) for one in (file, found.path)]
                        facts[name, "fp32"] = {"macs": macs, "top1": scores[0], "drop": 0.0, "floats": 0}
                        facts[name, "int8"] = {
                            "macs": macs, "top1": scores[1], "drop": scores[0] - scores[1],
                            "floats": len(found.float_layers),
                            "validation_drop": found.drop, "output_error": found.error,
                        }  # fmt: skip
            for batch in BATCHES:
                yield from timed(runtime, batch, files, facts, options)


def pruned_model(dense: torch.nn.Module, rest: LabeledArrays, options: argparse.Namespace) -> torch.nn.Module:
    """The model of a folder, or the dense one pruned and repaired here."""
    if options.pruned is not None:
        return prunekit.load(options.pruned).eval()
    train = replace(rest, pixels=rest.pixels[:-VALIDATION], labels=rest.labels[:-VALIDATION])
    images, _ = drawn(train, options.images, options.seed)
    start = time.perf_counter()
    done = prunekit.prune(
        dense, calibration=images, macs=1 / options.reduction, ignore=("conv1",), round_to=options.round_to
    )
    print(f"pruned in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return done.model


def timed(
    runtime: str,
    batch: int,
    files: dict[tuple[str, str, int], Path],
    facts: dict[tuple[str, str], dict[str, Any]],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """The rows of a runtime and a batch size, whose files take turns."""
    keys = list(facts)
    with threads(options.threads), torch.inference_mode():
        sessions = [opened(files[*key, batch], runtime, batch, options) for key in keys]
        timers = [Timer(one.run, CPU) for one in sessions]
        for timer in timers:
            warm_up(timer, "cpu")
        times = dict(zip(keys, alternate(timers, options.rounds), strict=True))
    for name, dtype in keys:
        file, mine = files[name, dtype, batch], times[name, dtype]
        low, median, high = (float(value) for value in np.percentile(mine, (10, 50, 90)))
        yield {
            "model": name, "reduction": 1.0 if name == "dense" else options.reduction, "round_to": options.round_to,
            "runtime": runtime, "dtype": dtype, "batch": batch, **facts[name, dtype], "mb": size_mb(file),
            "median_ms": median, "spread_ms": [low, high],
            "over_float": _faster(times[name, "fp32"], mine),
            "over_dense": _faster(times["dense", "fp32"], mine),
            "kernels": kernels(file, batch) if runtime == "onnxruntime" else None,
        }  # fmt: skip


def in_words(column: str, value: Any) -> Any:
    """Ratios and intervals for a table."""
    if column.startswith("over_"):
        return "{:.2f} [{:.2f}, {:.2f}]".format(*value)
    if column == "spread_ms":
        return "[{:.2f}, {:.2f}]".format(*value)
    return value


def _faster(before: Array, after: Array) -> list[float]:
    found = ratio(before.tolist(), after.tolist())
    return [round(found[name], 3) for name in ("ratio", "low", "high")]


def main() -> None:
    """Prunes, quantizes and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS.values()), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--reduction", type=float, default=2.0, help="dense MACs over those left")
    parser.add_argument("--round-to", type=int, default=1, help="widths of the pruned model are multiples of this")
    parser.add_argument("--pruned", type=Path, metavar="FOLDER", help="a model folder of the pruned model, made before")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration images that prune and repair")
    parser.add_argument("--images", type=int, default=1024, metavar="N", help="to prune and repair with")
    parser.add_argument("--int8-images", type=int, default=256, metavar="N", help="to calibrate int8 on")
    parser.add_argument("--max-drop", type=float, default=0.5, help="points that int8 may cost on held-out images")
    parser.add_argument("--rounds", type=int, default=60, help="timings of each file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/int8_cifar10.json and .md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = collected(rows(options), as_json=options.json)
    if not options.json:
        show([{column: row[column] for column in COLUMNS} for row in found], as_json=False)
    if options.keep:
        names = ("depth", "reduction", "round_to", "seed", "images", "int8_images", "max_drop", "rounds", "threads")
        made = "here" if options.pruned is None else "loaded from a folder"
        setting = {name: getattr(options, name) for name in names} | {"pruned": made, "cpu": int8_note()}
        print(keep("int8_cifar10", found, setting), file=sys.stderr)
        shown = [{column: in_words(column, row[column]) for column in COLUMNS} for row in found]
        text = f"# int8 after pruning, without training\n\n{as_items(setting)}\n{as_markdown(shown, COLUMNS)}"
        (RESULTS / "int8_cifar10.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

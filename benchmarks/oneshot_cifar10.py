"""Pruning without training, on CIFAR-10 with trained weights: MACs and top-1 of each method at each reduction.

Every seed draws its calibration images from the training images; their labels are given to torch-pruning's Taylor and
Hessian importances alone, which need a labeled loss. Nothing is trained, and the test images are seen by the final
measurement alone. `macs` are those of one image by torch's `FlopCounterMode`, of the model
as it is loaded from its folder (torch-pruning's models have none); `top1` is in percent of all test images; `seconds`
is what pruning took, without measuring. A method that cannot meet a budget has a reason instead. The dense model's own
figures go to standard error. DATA is an `.npz` of x_train, y_train, x_test and y_test; WEIGHTS fit the ResNets for
32x32 images of `--zoo cifar`, trained with pixels / 255 and ImageNet's mean and deviation.

    python benchmarks/oneshot_cifar10.py --depth 56 --weights FILE --data FILE [--reduction 1.5,2.0] [--method A,B]
        [--seeds N] [--first-seed N] [--threads N] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import keep, reductions, rows_before, show
from oneshot_methods import Case, Method, methods, peer_names
from torch import Tensor

from prunekit.data.datasets import IMAGENET_MEAN, IMAGENET_STD
from prunekit.data.local_files import LabeledArrays, read_npz
from prunekit.errors import DataError, PlanError, PrunekitError
from prunekit.measure.accuracy import evaluate
from prunekit.measure.memory_format import images_channels_last
from prunekit.measure.model_size import count_macs
from prunekit.models.names import DEPTHS
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings

CPU = torch.device("cpu")
KEEP = "write benchmarks/results/oneshot_resnet<depth>.json, where other rows (method, reduction, seed) stay"
BATCH = 500
ALL = ",".join(dict.fromkeys([*methods(), *peer_names()]))


def normalized(pixels: Tensor) -> Tensor:
    """(N, 3, H, W) uint8 -> float32, as the weights were trained."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    images: Tensor = images_channels_last((pixels.float() / 255 - mean) / std)
    return images


def drawn(train: LabeledArrays, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(count, 3, H, W) calibration images and (count,) labels."""
    if len(train.pixels) < count:
        raise DataError(f"x_train: expected at least {count} images to calibrate on, got {len(train.pixels)}")
    order = torch.randperm(len(train.pixels), generator=torch.Generator().manual_seed(seed))
    return normalized(train.pixels[order[:count]]), train.labels[order[:count]]


def measured(model: torch.nn.Module, test: LabeledArrays) -> dict[str, Any]:
    """MACs of one image, and top-1 in percent."""
    batches = zip(test.pixels.split(BATCH), test.labels.split(BATCH), strict=True)
    pairs = ((normalized(pixels), labels) for pixels, labels in batches)
    top1 = evaluate(model, pairs, "image_classification", CPU).values["top1"]
    return {"macs": count_macs(model, (normalized(test.pixels[:1]),)), "top1": top1}


def row(name: str, method: Method, case: Case, test: LabeledArrays) -> dict[str, Any]:
    """One method at one reduction."""
    start = time.perf_counter()
    try:
        result = method(case)
    except PlanError as error:
        return {"macs": None, "top1": None, "seconds": time.perf_counter() - start, "reason": f"{name}: {error}"}
    seconds = time.perf_counter() - start
    return {**measured(result.loaded(case), test), "seconds": seconds}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and worst seed of every method at every reduction, of those that meet it for all seeds."""
    found = []
    for method, reduction in dict.fromkeys((row["method"], row["reduction"]) for row in rows):
        same = [row for row in rows if (row["method"], row["reduction"]) == (method, reduction)]
        if all(row["top1"] is not None for row in same):
            top1, seconds = ([row[key] for row in same] for key in ("top1", "seconds"))
            timed = None if None in seconds else statistics.fmean(seconds)
            means = {"top1_mean": statistics.fmean(top1), "top1_worst": min(top1), "seconds": timed}
            found.append({"method": method, "reduction": reduction, **means, "seeds": len(same)})
    return found


def chosen(text: str) -> dict[str, Method]:
    """The methods of these names, without those whose tool is not installed."""
    known, wanted = methods(), text.split(",")
    absent = [name for name in wanted if name in peer_names() and name not in known]
    if absent:
        reason = "torch-pruning is not installed (pip install torch-pruning)"
        print(f"skipped: {', '.join(absent)}: {reason}", file=sys.stderr)
    unknown = [name for name in wanted if name not in known and name not in absent]
    if unknown:
        raise argparse.ArgumentTypeError(f"no method {unknown[0]!r}; expected some of {', '.join(known)}")
    return {name: known[name] for name in wanted if name in known}


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, each printed as soon as it is there where JSON is asked for."""
    build = ModelSettings(f"resnet{options.depth}", "cifar", weights=str(options.weights))
    archive, dense = read_npz(options.data), build_model(build, num_classes=10).eval()
    if archive.test is None:
        raise DataError(f"{options.data}: expected x_test and y_test")
    whole = measured(dense, archive.test)
    print(f"dense: {whole['macs']:,} MACs, top-1 {whole['top1']:.2f} %", file=sys.stderr)
    rows = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        images, labels = drawn(archive.rest, options.images, seed)
        for reduction in options.reduction:
            case = Case(dense, build, images, labels, 1 / reduction)
            for name, method in options.method.items():
                found = row(name, method, case, archive.test)
                rows.append({"method": name, "reduction": reduction, **found, "seed": seed})
                if options.json:
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Runs the methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS.values()), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--reduction", type=reductions, default="2.0", metavar="A,B", help="dense MACs over those left")
    parser.add_argument("--method", type=chosen, default=ALL, metavar="A,B", help=f"of {ALL}  [default: all]")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="draws of the calibration images")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="of the first draw")
    parser.add_argument("--images", type=int, default=1024, metavar="N", help="to calibrate on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help=KEEP)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        rows = run(options)
    except PrunekitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if not options.json:
        show(rows, as_json=False)
        print()
        show(summary(rows), as_json=False)
    if options.keep:
        setting = {"images": options.images, "threads": options.threads, "dtype": "float32", "top1": "percent"}
        name = f"oneshot_resnet{options.depth}"
        rows += rows_before(name, rows, ("method", "reduction", "seed"))
        print(keep(name, [*rows, *summary(rows)], setting), file=sys.stderr)


if __name__ == "__main__":
    main()

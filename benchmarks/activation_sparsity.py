"""Activation sparsity without training, on CIFAR-10 with trained weights: top-1 with one share of zeros, and spread.

The inputs of all convolutions are masked by magnitude; `overall` is the share of zeros asked for, weighted by MACs. It
is met in two ways: `uniform`, with one share for all layers, and `spread` over them by the error of the output,
as `prunekit.calibrate_thresholds(overall=)` does; it takes the better one on held-out calibration images. `reached`:
share of zeros on all test images, by MACs. `error`: of the output on the held-out images, as a share of its variance.
`top1`: in percent of all test images, which nothing else has seen. No label is used. The row `dense` has no masks, and
the zeros that ReLUs leave. DATA is an `.npz` of x_train, y_train, x_test and y_test; WEIGHTS fit the ResNets for 32x32
images of `--zoo cifar`, trained with pixels / 255 and ImageNet's mean and deviation.

    python benchmarks/activation_sparsity.py --depth 20 --weights FILE --data FILE [--overall 0.6,0.7] [--ignore conv1]
        [--images N] [--threads N] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import collected, keep, shares, show
from oneshot_cifar10 import BATCH, CPU, drawn, normalized
from torch import nn

from prunekit.data.local_files import LabeledArrays, read_npz
from prunekit.errors import DataError
from prunekit.masks.activation_budget import spread_budgets
from prunekit.masks.activation_masks import ActivationMasks
from prunekit.masks.threshold_search import MaskedActivations
from prunekit.measure.accuracy import evaluate
from prunekit.models.names import DEPTHS
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings

KEEP = "write benchmarks/results/activations_resnet<depth>.json, with `_without_<path>` where one is ignored"


def measured(
    model: nn.Module, test: LabeledArrays, thresholds: dict[str, float], weights: dict[str, float]
) -> dict[str, float]:
    """Share of zeros by weights, and top-1 under masks."""
    batches = zip(test.pixels.split(BATCH), test.labels.split(BATCH), strict=True)
    pairs = ((normalized(pixels), labels) for pixels, labels in batches)
    with ActivationMasks(model, thresholds, side="input") as masks:
        top1 = evaluate(model, pairs, "image_classification", CPU).values["top1"]
    layers = masks.sparsity().layers
    return {"reached": sum(weight * layers[path] for path, weight in weights.items()), "top1": top1}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The dense model, and both ways at each budget."""
    archive = read_npz(options.data)
    build = ModelSettings(f"resnet{options.depth}", "cifar", weights=str(options.weights))
    model = build_model(build, num_classes=10).eval().to(memory_format=torch.channels_last)
    if archive.test is None:
        raise DataError(f"{options.data}: expected x_test and y_test")
    images, _ = drawn(archive.rest, options.images, options.seed)
    layers = [path for path, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    paths = tuple(path for path in layers if path != options.ignore)
    masked = MaskedActivations(model, paths, "input", [((part,), None) for part in images.split(128)], CPU)
    budgets = spread_budgets(masked, options.overall, "macs")
    for number, (overall, budget) in enumerate(zip(options.overall, budgets, strict=True)):
        if number == 0:
            whole = measured(model, archive.test, dict.fromkeys(paths, 0.0), budget.weights)
            yield {"way": "dense", "overall": None, **whole, "error": 0.0}
        for way, found in reversed(budget.found.items()):
            figures = measured(model, archive.test, found.thresholds, budget.weights)
            masks = {"shares": found.reached, "thresholds": found.thresholds}
            yield {"way": way, "overall": overall, **figures, "error": budget.errors[way], **masks}


def main() -> None:
    """Prints a table, or a row a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS.values()), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--overall", type=shares, default="0.5,0.6,0.7", metavar="A,B", help="shares of zeros, by MACs")
    parser.add_argument("--ignore", metavar="PATH", help="a convolution that is not masked, such as conv1")
    parser.add_argument("--images", type=int, default=1024, metavar="N", help="to calibrate on")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw of these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help=KEEP)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = collected(rows(options), as_json=options.json)
    if not options.json:
        show(
            [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in found], as_json=False
        )
    if options.keep:
        setting = {"images": options.images, "seed": options.seed, "threads": options.threads, "top1": "percent"}
        rest = f"_without_{options.ignore}" if options.ignore else ""
        print(keep(f"activations_resnet{options.depth}{rest}", found, setting), file=sys.stderr)


if __name__ == "__main__":
    main()

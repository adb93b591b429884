"""Zeros among single weights without training, on CIFAR-10 with trained weights: top-1 of each pattern and method.

Every draw takes its calibration images from the training images, without labels; the test images are seen by the final
measurement alone. `zeros` is the share among all weights of convolutions and linear layers; `top1` is in percent of all
test images; `seconds` is what pruning took, without measuring. Magnitude, Wanda and SparseGPT stand beside ours without
a refit, with the same share of zeros in each layer, as their papers have it; for 2:4 of channels that are left, with
our channels. DATA is an `.npz` of x_train, y_train, x_test and y_test; WEIGHTS fit the ResNets for 32x32 images of
`--zoo cifar`. Rows of a file of results stay where they are not made again.

    python benchmarks/patterns.py --depth 56 --weights FILE --data FILE [--only A,B] [--method A,B] [--seeds N]
        [--first-seed N] [--threads N] [--json] [--keep]
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
from common import keep, rows_before, show
from oneshot_cifar10 import drawn, measured
from torch import nn

import prunekit as pk
from prunekit.data.local_files import read_npz
from prunekit.errors import PrunekitError
from prunekit.models.names import DEPTHS
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings

CASES: dict[str, dict[str, Any]] = {
    "50 %": {"kind": "unstructured", "sparsity": 0.5},
    "70 %": {"kind": "unstructured", "sparsity": 0.7},
    "80 %": {"kind": "unstructured", "sparsity": 0.8},
    "90 %": {"kind": "unstructured", "sparsity": 0.9},
    "2:4": {"kind": "2:4"},
    "4:8": {"kind": "4:8"},
    "block 4x1, 50 %": {"kind": "block", "block": (4, 1), "sparsity": 0.5},
    "half of the MACs and 2:4": {"kind": "2:4", "macs": 0.5},
}
METHODS: dict[str, dict[str, Any]] = {
    "ours": {},
    "uniform": {"scope": "uniform"},
    "sparsegpt": {"method": "sparsegpt", "scope": "uniform", "repair": False},
    "wanda": {"method": "wanda", "scope": "uniform", "repair": False},
    "magnitude": {"method": "magnitude", "scope": "uniform", "repair": False},
}
"""`ours` without options; parts of it taken out; and other methods without a refit."""
STREAM = ("conv1",)
"""What makes the residual stream: its channels stay where channels are removed."""


def row(case: str, method: str, dense: nn.Module, images: torch.Tensor, test: Any) -> dict[str, Any]:
    """One pattern by one method."""
    options = CASES[case] | METHODS[method]
    repair, macs = options.pop("repair", None), options.pop("macs", None)
    budget = {} if macs is None else {"macs": macs, "ignore": STREAM}
    start = time.perf_counter()
    done = pk.prune(dense, calibration=images, pattern=pk.PatternSettings(**options), repair=repair, **budget)
    seconds = time.perf_counter() - start
    weights = [tensor for tensor in done.model.parameters() if tensor.ndim > 1]
    zeros = sum(int((tensor == 0).sum()) for tensor in weights) / sum(tensor.numel() for tensor in weights)
    return {**measured(done.model, test), "zeros": zeros, "seconds": seconds}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and worst draw of every pattern and method."""
    found = []
    for case, method in dict.fromkeys((row["pattern"], row["method"]) for row in rows):
        same = [row for row in rows if (row["pattern"], row["method"]) == (case, method)]
        top1 = [row["top1"] for row in same]
        found.append(
            {
                "pattern": case,
                "method": method,
                "zeros": statistics.fmean(row["zeros"] for row in same),
                "top1_mean": statistics.fmean(top1),
                "top1_worst": min(top1),
                "seconds": statistics.fmean(row["seconds"] for row in same),
                "draws": len(same),
            }
        )
    return found


def run(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """All rows; each is printed, and kept where asked for, as soon as it is there."""
    build = ModelSettings(f"resnet{options.depth}", "cifar", weights=str(options.weights))
    archive, dense = read_npz(options.data), build_model(build, num_classes=10).eval()
    print(f"dense: {measured(dense, archive.test)}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        images, _ = drawn(archive.rest, options.images, seed)
        for case in options.only:
            for method in options.method:
                found = row(case, method, dense, images, archive.test)
                rows.append({"pattern": case, "method": method, **found, "seed": seed})
                if options.json:
                    print(json.dumps(rows[-1]), flush=True)
                if options.keep:
                    every = [*rows_before(name, rows, ("pattern", "method", "seed")), *rows]
                    setting = {"images": options.images, "threads": options.threads, "top1": "percent"}
                    keep(name, [*every, *summary(every)], setting)
    return rows


def chosen(known: dict[str, Any]) -> Any:
    """Returns a type of arguments: some names, `;` between them."""

    def names(text: str) -> list[str]:
        found = [name.strip() for name in text.split(";")]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}; expected some of {'; '.join(known)}")
        return found

    return names


def main() -> None:
    """Runs the methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, choices=sorted(DEPTHS.values()), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument(
        "--only", type=chosen(CASES), default=list(CASES), metavar="A;B", help="; ".join(CASES).replace("%", "%%")
    )
    parser.add_argument("--method", type=chosen(METHODS), default=["ours"], metavar="A;B", help="; ".join(METHODS))
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="draws of the calibration images")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="of the first draw")
    parser.add_argument("--images", type=int, default=1024, metavar="N", help="to calibrate on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/patterns_resnet<depth>.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        rows = run(options, f"patterns_resnet{options.depth}")
    except PrunekitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if not options.json:
        show(summary(rows), as_json=False)


if __name__ == "__main__":
    main()

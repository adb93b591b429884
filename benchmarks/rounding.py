"""Accuracy that rounding widths costs, and time that it saves: `round_to` of 1, None and 8, in time also 4 and 16.

Accuracy: ResNets of CIFAR-10 with trained weights, pruned and repaired by `prune(model, calibration=images, macs=...)`
from training images without labels; nothing is trained, and the test images are seen by `top1` (percent) alone.
`macs_left` and `params_left` are shares of the dense model's, `multiples_of_8` is the share of convolutions with such a
number of outputs, `worst` that of the draws of images with the least `top1`. Data is an `.npz` of x_train, y_train,
x_test and y_test; weights fit the ResNets for 32x32 images of `--zoo cifar`, trained with pixels / 255 and ImageNet's
mean and deviation.

Time: torchvision's models with random weights at half of their MACs, pruned by example (`l2`, `uniform`), 1x3x224x224,
float32, one thread, all timed alternately with the dense one in one process. `ms` is the median of the rounds,
`least_ms` the fastest of them, which other work on the machine disturbs least. `over_1` is the time over that of
`round_to=1`, and `over_dense` over the dense model's, the median over the rounds of their ratio; brackets are the 10th
and 90th percentile.

    python benchmarks/rounding.py [--data FILE --weights DEPTH=FILE ...] [--macs 0.8 0.6 0.5] [--seeds N]
        [--models A,B] [--runtime eager|onnxruntime] [--rounds N] [--out FILE] [--json] [--keep]

Without `--data` times alone are measured; `--models ""` measures none. Those in ONNX Runtime are kept apart, in
`rounding_onnxruntime.json`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torchvision
from common import RESULTS, Rows, as_items, as_markdown, keep, ratio, show
from latency_networks import names
from oneshot_cifar10 import drawn, measured
from sparse_runtimes import FORMS
from torch import nn

import prunekit
from prunekit.data.local_files import ClassParts, LabeledArrays, read_npz
from prunekit.errors import DataError, PrunekitError
from prunekit.measure.latency.timing import alternate, warm_up
from prunekit.models.zoo import build_model
from prunekit.settings.inputs import ModelSettings

ROUNDINGS = (1, None, 8)
TIMED = (1, 4, None, 8, 16)
RUNTIMES = ("eager", "onnxruntime")
SHARE = 0.5
"""Share of the MACs at which times are measured."""
KEYS = ("model", "macs", "round_to", "seed")
MEANS = ("model", "macs", "round_to", "top1", "worst", "macs_left", "params_left", "multiples_of_8", "seeds")
TIMES = (
    "model", "round_to", "macs_left", "params_left", "multiples_of_8", "ms", "least_ms", "over_1", "over_dense"
)  # fmt: skip


def facts(model: nn.Module, plan: prunekit.Plan) -> dict[str, float]:
    """Return the shares that are left of a model, and how many of its widths are multiples of 8."""
    totals = plan.totals()
    widths = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    macs, params = (totals[name][1] / totals[name][0] for name in ("MACs", "parameters"))
    return {
        "macs_left": macs,
        "params_left": params,
        "multiples_of_8": sum(width % 8 == 0 for width in widths) / len(widths),
    }


def accuracies(
    depth: int, weights: Path, data: ClassParts[LabeledArrays], options: argparse.Namespace, rows: Rows
) -> None:
    """Adds a row for each share of MACs, each rounding and each draw of images that `rows` lacks."""
    assert data.test is not None
    dense = build_model(ModelSettings(f"resnet{depth}", "cifar", weights=str(weights)), num_classes=10).eval()
    for seed in range(options.seeds):
        wanted = [{"model": f"resnet{depth}", "macs": macs, "round_to": to, "seed": seed}
                  for macs in options.macs for to in ROUNDINGS]  # fmt: skip
        left = [which for which in wanted if rows.get(**which) is None]
        collected = prunekit.collect(dense, drawn(data.rest, options.images, seed)[0]) if left else None
        for which in left:
            done = prunekit.prune(
                dense, calibration=collected, macs=which["macs"], round_to=which["round_to"], images=options.images
            )
            top1 = measured(done.model, data.test)["top1"]
            rows.add({**which, "top1": top1, **facts(done.model, done.plan)})


def timed(name: str, rounds: int, runtime: str) -> Iterator[dict[str, Any]]:
    """The rows of a model of torchvision, all of which take turns."""
    torch.manual_seed(0)
    dense, example = getattr(torchvision.models, name)(weights=None).eval(), torch.randn(1, 3, 224, 224)
    pruned = {to: prunekit.prune(dense, example, macs=SHARE, round_to=to) for to in TIMED}

    def run(one: Callable[[], Any]) -> float:
        start = time.perf_counter()
        one()
        return 1e3 * (time.perf_counter() - start)

    with TemporaryDirectory() as folder, torch.inference_mode():
        runs = []
        for number, model in enumerate((dense, *(done.model for done in pruned.values()))):
            (own := Path(folder, str(number))).mkdir()
            runs.append(partial(run, FORMS[runtime][0](model, example, own)))
        for one in runs:
            warm_up(one)
        times = alternate(runs, rounds).tolist()
    for (to, done), mine in zip(pruned.items(), times[1:], strict=True):
        over = {key: ratio(mine, times[place]) for key, place in (("over_1", 1), ("over_dense", 0))}
        yield {
            "model": name, "runtime": runtime, "macs": SHARE, "round_to": to, **facts(done.model, done.plan),
            "ms": over["over_1"]["median_ms"], "least_ms": min(mine), "dense_ms": over["over_dense"]["baseline_ms"],
            **{key: [found["ratio"], found["low"], found["high"]] for key, found in over.items()},
        }  # fmt: skip


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the draws of images, and the worst of them."""
    found = []
    for which in dict.fromkeys((row["model"], row["macs"], row["round_to"]) for row in rows):
        same = [row for row in rows if (row["model"], row["macs"], row["round_to"]) == which]
        mean = {
            name: fmean(row[name] for row in same) for name in ("top1", "macs_left", "params_left", "multiples_of_8")
        }
        worst = min(row["top1"] for row in same)
        found.append(dict(zip(KEYS, which, strict=False)) | mean | {"worst": worst, "seeds": len(same)})
    return found


def in_words(row: dict[str, Any]) -> dict[str, Any]:
    """A row as tables show it."""
    shown = {**row, "round_to": "None" if row["round_to"] is None else row["round_to"]}
    shown |= {name: f"{row[name]:.2f}" for name in ("top1", "worst") if name in row}
    shown |= {name: f"{row[name]:.3f}" for name in ("macs_left", "params_left", "multiples_of_8")}
    overs = {name: value for name, value in row.items() if name.startswith("over_")}
    return shown | {name: "{:.2f} [{:.2f}, {:.2f}]".format(*value) for name, value in overs.items()}


def weights_of(text: str) -> tuple[int, Path]:
    """A depth with the file of its weights."""
    depth, _, file = text.partition("=")
    if not depth.isdigit() or not file:
        raise argparse.ArgumentTypeError(f"expected a depth and a file, such as 20=resnet20.th, got {text}")
    return int(depth), Path(file)


def main() -> None:
    """Measures, and prints two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FILE", help="an .npz")
    parser.add_argument("--weights", type=weights_of, nargs="+", default=[], metavar="DEPTH=FILE")
    parser.add_argument(
        "--macs", type=float, nargs="+", default=[0.8, 0.6, 0.5], metavar="SHARE", help="that may be left"
    )
    parser.add_argument("--images", type=int, default=256, metavar="N", help="to calibrate on")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="draws of these")
    parser.add_argument("--models", type=names, default="resnet18,resnet50,mobilenet_v3_large", metavar="A,B")
    parser.add_argument("--runtime", choices=RUNTIMES, default="eager", help="that times are measured in")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="timings of each model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="rows of accuracy; those in it are not made again")
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument(
        "--keep", action="store_true", help="write benchmarks/results/rounding.json and .md, where other rows stay"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, times = Rows(options.out, KEYS, as_json=options.json), Rows(None, KEYS, as_json=options.json)
    try:
        if options.data is not None:
            archive = read_npz(options.data)
            if archive.test is None:
                raise DataError(f"{options.data}: expected x_test and y_test")
            for depth, weights in options.weights:
                accuracies(depth, weights, archive, options, rows)
        for name in filter(None, options.models):
            for row in timed(name, options.rounds, options.runtime):
                times.add(row)
    except PrunekitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    tables = [(MEANS, [in_words(row) for row in means(list(rows))]), (TIMES, [in_words(row) for row in times])]
    for columns, shown in [] if options.json else tables:
        if shown:
            show([{name: row[name] for name in columns} for row in shown], as_json=False)
    if options.keep:
        setting = {"images": options.images, "rounds": options.rounds, "threads": 1, "dtype": "float32"}
        file = "rounding" if options.runtime == RUNTIMES[0] else f"rounding_{options.runtime}"
        print(keep(file, [*rows, *times], setting), file=sys.stderr)
        text = "\n".join(as_markdown(shown, columns) for columns, shown in tables if shown)
        (RESULTS / f"{file}.md").write_text(f"# Rounded widths\n\n{text}\n{as_items(setting)}", encoding="utf-8")


if __name__ == "__main__":
    main()

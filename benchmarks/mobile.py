"""Networks of phones pruned without training: agreement with the dense model at shares of its MACs.

Inputs that judge are seen by nothing else. `agreement` is in percent of the dense model's: classes, pitches, scores,
lines of text, the cosine of vectors, or F1 of faces, notes, speech or text's pixels; `error` is the squared error of
the output as a share of its variance; `macs` the share left; `seconds` are those of the CPU. Packages and their
licences are in `mobile_networks.py`, inputs in `mobile_inputs.py`, `mobile_sounds.py` and `mobile_texts.py`. Methods:

- `prunekit`: `pk.prune` with any widths; `rounded`, as it comes; `unrepaired`, the plan of the first alone; `uniform`,
  our order with the same share of every group; `no-joint` and `no-rectified`, without the fits of two layers together,
  or of what a ReLU lets through.
- `l2`: filters of least norm over the whole model (Li et al. 2017), BatchNorm statistics taken anew where there are
  any; `l2-fitted`, the same filters and our repair.
- `by-time`: `pk.prune(speedup=...)` in ONNX Runtime, batch 1, one thread, for each of `--speedup`, as `asked`.
- `fpgm`: filters nearest to their median over the whole model (He et al. 2019) by torch-pruning, statistics anew.

With `--timed` rows have the `speedup` in ONNX Runtime over the dense model, with its 95 % interval.

    python benchmarks/mobile.py --pictures FOLDER [--network A,B] [--macs 0.9,0.8,0.7,0.5] [--method A,B] [--threads N]
        [--speedup 1.3,1.5] [--timed] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from common import collected, keep, onnx_speedup, reductions, rows_before, shares, show
from mobile_agreement import BATCH, Subject, error
from mobile_networks import NETWORKS
from torch import Tensor, nn

import prunekit as pk
from prunekit.errors import PlanError, PrunekitError
from prunekit.measure.model_size import count_macs

KEEP = "write benchmarks/results/mobile.json, where other rows (network, macs, method) stay"
HALVINGS = 12
"""Of the interval in which the smallest ratio of channels that meets the budget is searched."""


def ours(subject: Subject, share: float, round_to: int | None = 1, **options: Any) -> nn.Module:
    """Our order, budget and repair, or others."""
    return pk.prune(subject.model, calibration=subject.inputs[0], macs=share, round_to=round_to, **options).model


def magnitude(subject: Subject, share: float) -> nn.Module:
    """The filters of least L2 norm go, ranked over the whole model; BatchNorm is recalibrated."""
    images = subject.inputs[0]
    return recalibrated(
        pk.prune(subject.model, images[:2], macs=share, criterion="l2", scope="global", round_to=1).model, images
    )


def recalibrated(model: nn.Module, images: Tensor) -> nn.Module:
    """The model itself, with BatchNorm statistics of these images."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        pk.recalibrate_batchnorm(model, [(some, torch.zeros(len(some))) for some in torch.split(images, BATCH)])
    return model


def fpgm(subject: Subject, share: float) -> nn.Module:
    """The smallest ratio of channels found that meets the budget, the last layers whole.

    Raises:
        PlanError: none does, or torch-pruning fails.
    """
    peer, example = import_module("torch_pruning"), subject.inputs[0][:2]
    labels = pk.trace(subject.model, example).labels
    best, low, high = None, 0.0, 1.0
    for _ in range(HALVINGS):
        model, ratio = deepcopy(subject.model), (low + high) / 2
        last = [module for path, module in model.named_modules() if _locked(labels.get(f"{path}.weight"))]
        try:
            importance = peer.importance.FPGMImportance()
            arguments = {"global_pruning": True, "pruning_ratio": ratio, "ignored_layers": last}
            peer.pruner.BasePruner(model, example, importance=importance, **arguments).step()
            left = count_macs(model, (example[:1],))
        except Exception as failure:  # whatever another package raises
            raise PlanError(f"torch-pruning: {type(failure).__name__}: {str(failure)[:100]}") from failure
        if left <= share * count_macs(subject.model, (example[:1],)):
            best, high = model, ratio
        else:
            low = ratio
    if best is None:
        raise PlanError(f"torch-pruning: no ratio of channels leaves {share:.0%} of the MACs")
    return recalibrated(best, subject.inputs[0])


def _locked(axes: Any) -> bool:
    """Tells whether no channel that a weight makes may go."""
    return axes is not None and axes[0] is not None and not axes[0].any()


def by_time(subject: Subject, asked: float) -> nn.Module:
    """Our order and repair, to a time."""
    target = pk.Target(runtime="onnxruntime")
    return pk.prune(subject.model, calibration=subject.inputs[0], speedup=asked, target=target).model


METHODS: dict[str, Callable[[Subject, float], nn.Module]] = {
    "prunekit": ours,
    "rounded": partial(ours, round_to=None),
    "unrepaired": partial(ours, repair=False),
    "l2": magnitude,
    "l2-fitted": partial(ours, criterion="l2", scope="global"),
    "fpgm": fpgm,
    "uniform": partial(ours, criterion="elimination", scope="uniform"),
    "no-joint": partial(ours, repair=pk.RepairSettings(joint_steps=0)),
    "no-rectified": partial(ours, repair=pk.RepairSettings(rectified_steps=0)),
}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows."""
    for name in options.network:
        subject = NETWORKS[name](options.pictures)
        dense, example = subject.output(subject.model), (subject.inputs[0][:1],)
        whole = count_macs(subject.model, example)
        asked = [(share, method, METHODS[method]) for share in options.macs for method in options.method]
        for budget, method, way in [*asked, *((one, "by-time", by_time) for one in options.speedup)]:
            row: dict[str, Any] = {"network": name, "asked": budget, "method": method}
            start = time.process_time()
            try:
                model = way(subject, budget)
            except PrunekitError as failure:
                yield {**row, "reason": f"{type(failure).__name__}: {failure}"}
                continue
            seconds, other = time.process_time() - start, subject.output(model)
            figures = {"agreement": subject.agreement(dense, other), "error": error(dense, other)}
            row |= {"macs": count_macs(model, example) / whole, **figures, "seconds": seconds}
            yield row | (onnx_speedup(subject.model, model, *example) if options.timed else {})


def named(text: str, known: dict[str, Any]) -> list[str]:
    """Names with commas between them."""
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; expected some of {', '.join(known)}")
    return text.split(",")


def main() -> None:
    """Prunes and judges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, required=True, metavar="FOLDER", help="two unpacked packages")
    every = ",".join(NETWORKS)
    parser.add_argument("--network", type=lambda text: named(text, NETWORKS), default=every, metavar="A,B", help=every)
    parser.add_argument("--macs", type=shares, default="0.9,0.8,0.7,0.5", metavar="A,B", help="shares that are left")
    parser.add_argument("--speedup", type=reductions, default=[], metavar="A,B", help="that `by-time` is asked for")
    parser.add_argument("--timed", action="store_true", help="in ONNX Runtime")
    methods = ",".join(METHODS)
    parser.add_argument(
        "--method", type=lambda text: named(text, METHODS), default=methods, metavar="A,B", help=methods
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help=KEEP)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = collected(rows(options), as_json=options.json)
    if not options.json:
        show(found, as_json=False)
    if options.keep:
        others = rows_before("mobile", found, ("network", "asked", "method"))
        print(keep("mobile", [*others, *found], {"threads": options.threads, "dtype": "float32"}), file=sys.stderr)


if __name__ == "__main__":
    main()

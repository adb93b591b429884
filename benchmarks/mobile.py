"""Networks of phones pruned without training: agreement with the dense model at shares of its MACs.

`prunekit` is `pk.prune` as it comes, `unrepaired` the same plan without repair, and `l2` filters of least norm over the
whole model with BatchNorm statistics taken anew (none where an ONNX file has folded them). Inputs that judge are seen
by nothing else. `agreement` is in percent of the dense model's: classes, F1 of faces or of text's
pixels; `error` is the squared error of the output as a share of its variance; `macs` the share left;
`seconds` are those of the CPU. Packages and their licences are in `mobile_networks.py`, pictures in `mobile_inputs.py`.

    python benchmarks/mobile.py --pictures FOLDER [--network A,B] [--macs 0.9,0.8,0.7,0.5] [--method A,B] [--threads N]
        [--json] [--keep]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import collected, keep, rows_before, shares, show
from mobile_networks import BATCH, NETWORKS, Subject, error
from torch import nn

import prunekit as pk
from prunekit.errors import PrunekitError
from prunekit.measure.model_size import count_macs

KEEP = "write benchmarks/results/mobile.json, where other rows (network, macs, method) stay"


def default(subject: Subject, share: float) -> nn.Module:
    """Our order and budget, repaired."""
    return pk.prune(subject.model, calibration=subject.inputs[0], macs=share, round_to=1).model


def unrepaired(subject: Subject, share: float) -> nn.Module:
    """Our order and budget alone."""
    return pk.prune(subject.model, calibration=subject.inputs[0], macs=share, round_to=1, repair=False).model


def magnitude(subject: Subject, share: float) -> nn.Module:
    """The filters of least L2 norm go, ranked over the whole model (Li et al. 2017); BatchNorm is recalibrated."""
    images = subject.inputs[0]
    model = pk.prune(subject.model, images[:2], macs=share, criterion="l2", scope="global", round_to=1).model
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        pk.recalibrate_batchnorm(model, [(some, torch.zeros(len(some))) for some in torch.split(images, BATCH)])
    return model


METHODS: dict[str, Callable[[Subject, float], nn.Module]] = {
    "prunekit": default,
    "unrepaired": unrepaired,
    "l2": magnitude,
}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows."""
    for name in options.network:
        subject = NETWORKS[name](options.pictures)
        dense, example = subject.output(subject.model), (subject.inputs[0][:1],)
        whole = count_macs(subject.model, example)
        for share in options.macs:
            for method in options.method:
                row: dict[str, Any] = {"network": name, "asked": share, "method": method}
                start = time.process_time()
                try:
                    model = METHODS[method](subject, share)
                except PrunekitError as failure:
                    yield {**row, "reason": f"{type(failure).__name__}: {failure}"}
                    continue
                seconds, other = time.process_time() - start, subject.output(model)
                figures = {"agreement": subject.agreement(dense, other), "error": error(dense, other)}
                yield {**row, "macs": count_macs(model, example) / whole, **figures, "seconds": seconds}


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

"""What capturing costs: the outputs of all convolutions of resnet34, reduced and as full copies, beside the forward.

Each row is a forward pass with something captured in it, timed alternately with the plain forward in one run: `ratio`
is the median over the rounds, `low` and `high` are the 10th and 90th percentile. `hooks` keeps
nothing and shows what the hooks themselves take; `mean`, `moments` and `extremes` are prunekit's reducers; `copies`
keeps every output, and `torch/copies` does so by forward hooks of a few lines. For these, `copy_ms` is what cloning the
same tensors alone takes, in the same rounds, `added_ms` by how much the forward is longer (medians), and `of_copy` the
one over the other: 1 is the memory bandwidth's cost and no more. Eval mode without gradients, random weights.

    python benchmarks/capture.py [--json] [--only PREFIX] [--rounds N] [--threads N] [--batch N] [--size PX]
                                 [--model NAME] [--cpu-time] [--keep]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
import torchvision
from common import keep, ratio, shown_as_made
from torch import Tensor, nn

import prunekit

REDUCERS = ("mean", "moments", "extremes")
COPIES = ("capture/copies", "torch/copies")
Form = Callable[[nn.Module], AbstractContextManager[Any]]


class PlainHooks(ExitStack):
    """Full copies as one writes them by hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                self.callback(module.register_forward_hook(self._keep).remove)

    def _keep(self, module: nn.Module, arguments: Any, result: Tensor) -> None:
        self.found.append(result.detach().clone())


def forms() -> dict[str, Form]:
    """What is captured, by the name of the row."""
    captured = {"hooks": lambda values: None, **{name: name for name in REDUCERS}, "copies": None}
    ours: dict[str, Form] = {
        f"capture/{name}": partial(prunekit.capture, layers=nn.Conv2d, reduce=reduce)
        for name, reduce in captured.items()
    }
    return {**ours, "torch/copies": PlainHooks}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each form."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, options.model)(weights=None).eval()
    images = torch.randn(options.batch, 3, options.size, options.size)
    wanted = {name: form for name, form in forms().items() if name.startswith(options.only)}
    clock = time.thread_time if options.cpu_time else time.perf_counter
    with torch.no_grad():
        with prunekit.capture(model, nn.Conv2d) as record:
            model(images)
        outputs = record.values()
        baseline, times, copies = _alternated(model, images, wanted, options.rounds, clock)
    for name in wanted:
        row = {"name": f"{name}/{options.model}", **ratio(times[name], baseline), "outputs": len(outputs)}
        if name in COPIES:
            added = statistics.median(times[name]) - statistics.median(baseline)
            copy = statistics.median(copies)
            mib = sum(one.nbytes for one in outputs) / 2**20
            row |= {"mib": mib, "copy_ms": copy, "added_ms": added, "of_copy": added / copy}
        yield row | {"batch": options.batch, "size": options.size, "threads": options.threads, "dtype": "float32"}


def _alternated(
    model: nn.Module, images: Tensor, wanted: dict[str, Form], rounds: int, clock: Callable[[], float]
) -> tuple[list[float], dict[str, list[float]], list[float]]:
    """Milliseconds of the plain forward, of each form, and of cloning all outputs; the first round warms up."""
    with prunekit.capture(model, nn.Conv2d) as record:
        model(images)
    sources = record.values()
    baseline: list[float] = []
    copies: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in wanted}
    for _ in range(rounds + 1):
        baseline.append(_ms(lambda: model(images), clock))
        for name, form in wanted.items():
            with form(model):
                times[name].append(_ms(lambda: model(images), clock))
        if any(name in COPIES for name in wanted):
            copies.append(_ms(lambda: [values.clone() for values in sources], clock))
    return baseline[1:], {name: each[1:] for name, each in times.items()}, copies[1:]


def _ms(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    kept = run()
    seconds = clock() - start
    del kept  # freeing is not part of it
    return 1000 * seconds


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--cpu-time", action="store_true", help="time of this thread alone, on a machine that is busy")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/capture.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = shown_as_made(rows(options), options, parser, "row")
    if options.keep:
        clock = "CPU time of the thread" if options.cpu_time else "wall time"
        setting = {"ratio": "median; low and high: 10th and 90th percentile", "clock": clock, "rounds": options.rounds}
        print(keep("capture", found, setting), file=sys.stderr)


if __name__ == "__main__":
    main()

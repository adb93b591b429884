"""Drops that `max_drop` delivers, and the cost of `prunekit.frontier`, for ResNets on CIFAR-10 with trained weights.

Every seed draws its calibration images from the training images, whose labels nobody sees, and splits the test images
at random: on the held-out half models are judged, the test half nobody but the final measurement sees. Images are read
and normalized as the recipe `resnet56-cifar10.yaml` says. A drop is a share, 0.01 for one point of top-1.

`--what drop`: `prunekit.prune(max_drop=...)` for each drop and seed (`max_drop`), and with `--by-hand` what is done
without it: separate calls of `prune(macs=...)`, bisected until 2 % of the MACs are left to tell apart, by the accuracy
on the held-out half alone (`by_hand`). A row is a delivered model: `drop` on the test half, of the same images for the
dense model, with its 95 % interval from `low` to `high`; `holds` is whether that is at most what was asked, `beyond`
whether all of the interval is more; `held_out` the drop on the held-out images that confirmed the model (by hand: on
those that it was chosen by), and `most` its bound; `macs` and `params` the shares that are left; `tried` the number of
models. What is refused has a reason instead. A row without a seed sums up the draws: how many were delivered, how many
of these held and were beyond, and medians. The test half is a sample too: where it has 5,000 images, and the bound by
2,500 others is exactly what was asked, a model does not hold in about 9 of 100 draws, though it truly loses more in 5.
Draws share the test images, and are not independent.

`--what cost`: CPU seconds of `prunekit.frontier`, which measures its points on the held-out half, and of separate calls
of `prune(macs=...)`, which measure nothing, alternately; `measuring` is what the accuracy of their models and the dense
one takes on the same images. `ratio` is the frontier over the calls, `ratio_measured` over calls and measuring.

`seconds` are of the clock, `cpu_seconds` of the process with all its threads. DATA is an `.npz` of x_train, y_train,
x_test and y_test; WEIGHTS fit the ResNets for 32x32 images of `--zoo cifar`.

    python benchmarks/frontier.py --what drop|cost --weights FILE --data FILE [--model resnet56]
        [--drops 0.005,0.01,0.02] [--by-hand] [--points 10] [--calls 0.8,0.6,0.4,0.3] [--draws N] [--first-seed N]
        [--images 1024] [--threads 1] [--json] [--keep]
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from common import collected, keep, rows_before, shares, show
from torch import Tensor, nn

import prunekit as pk
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.errors import DataError, PlanError
from prunekit.measure.score_drop import HeldOut
from prunekit.models.names import DEPTHS
from prunekit.models.zoo import build_model
from prunekit.pruning.pruned import Pruned
from prunekit.recipe.loading import load

RECIPE = Path(__file__).parent.parent / "recipes" / "resnet56-cifar10.yaml"
TASK = "image_classification"
LEAST, CLOSE = 0.1, 0.02
"""First share of the bisection by hand, and the MACs that it does not tell apart."""
KEYS = ("what", "model", "way", "asked", "seed")
VERDICT = re.compile(r"max_drop: .*: (holds|too much)")
KEEP = f"write benchmarks/results/frontier.json, where other rows ({', '.join(KEYS)}) stay"


@dataclass(frozen=True, eq=False)
class Drawn:
    """A dense model, and images of one seed: (N, 3, 32, 32) normalized, with labels (N,) but for the calibration."""

    dense: nn.Module
    images: Tensor
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def by(cls, seed: int, dense: nn.Module, splits: Splits, count: int) -> Drawn:
        """Draws the images; none are augmented."""
        random, total = torch.Generator().manual_seed(seed), len(splits.train)
        if total < count:
            raise DataError(f"x_train: expected at least {count} images to calibrate on, got {total}")
        images, _ = splits.train.fetch(torch.randperm(total, generator=random)[:count])
        order = torch.randperm(len(splits.test), generator=random)
        half = len(order) // 2
        return cls(dense, images, splits.test.fetch(order[:half]), splits.test.fetch(order[half:]))

    @cached_property
    def judge(self) -> HeldOut:
        """The test half."""
        return HeldOut(self.dense, self.test, TASK)

    def pruned(self, **asked: Any) -> Pruned:
        """One call of `prune`."""
        return pk.prune(self.dense, calibration=self.images, images=len(self.images), progress=False, **asked)

    def frontier(self, points: int | Sequence[float]) -> pk.Frontier:
        """Untimed."""
        held_out = {"evaluate": TASK, "held_out": self.held_out}
        images = {"calibration": self.images, "images": len(self.images)}
        return pk.frontier(self.dense, **images, **held_out, points=points, timed=False, progress=False)


@dataclass
class Clock:
    """Seconds since it was made, of the clock and of the process."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def read(self) -> dict[str, float]:
        """Both, as columns."""
        return {"seconds": time.perf_counter() - self.wall, "cpu_seconds": time.process_time() - self.cpu}


class Refused(Exception):
    """No model is delivered, after so many were tried."""

    def __init__(self, reason: str, tried: int) -> None:
        super().__init__(reason)
        self.tried = tried


@contextmanager
def counted() -> Iterator[list[str]]:
    """Verdicts of the search on the models that it tries, as it logs them."""
    found: list[str] = []

    class Verdicts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if told := VERDICT.fullmatch(record.getMessage()):
                found.append(told[1])

    logger, handler = logging.getLogger("prunekit"), Verdicts()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def by_budget(drawn: Drawn, asked: float) -> tuple[Pruned, dict[str, Any]]:
    """The model of `max_drop`."""
    with counted() as verdicts:
        try:
            found = drawn.pruned(max_drop=asked, evaluate=TASK, held_out=drawn.held_out)
        except PlanError as error:
            raise Refused(str(error), len(verdicts)) from None
    assert found.score is not None
    return found, {"held_out": found.score.drop, "most": found.score.most, "tried": len(verdicts)}


def by_hand(drawn: Drawn, asked: float) -> tuple[Pruned, dict[str, Any]]:
    """The model with the fewest MACs that a bisection finds, whose accuracy on the held-out half falls by so much."""
    held_out, low, high, tried = HeldOut(drawn.dense, drawn.held_out, TASK), LEAST, 1.0, 0
    best: tuple[Pruned, dict[str, Any]] | None = None
    while high - low > CLOSE:
        share = (low + high) / 2
        tried += 1
        try:
            found = drawn.pruned(macs=share)
        except PlanError:
            low = share  # no plan leaves as few
            continue
        drop = held_out.drop(held_out.score(found.model))
        if drop.drop <= asked:
            high, best = share, (found, {"held_out": drop.drop, "most": drop.most})
        else:
            low = share
    if best is None:
        raise Refused(f"no model held down to {high:.0%} of the MACs", tried)
    return best[0], {**best[1], "tried": tried}


WAYS: dict[str, Callable[[Drawn, float], tuple[Pruned, dict[str, Any]]]] = {"max_drop": by_budget, "by_hand": by_hand}


def delivered(way: str, drawn: Drawn, asked: float) -> dict[str, Any]:
    """The model that one way delivers, and what it loses on the test half."""
    clock = Clock()
    try:
        found, told = WAYS[way](drawn, asked)
    except Refused as error:
        figures = ("drop", "low", "high", "holds", "beyond", "held_out", "most", "macs", "params")
        return {**dict.fromkeys(figures), "tried": error.tried, **clock.read(), "reason": str(error)}
    took, totals = clock.read(), found.plan.totals()
    drop = drawn.judge.drop(drawn.judge.score(found.model))
    assert drop.interval is not None
    low, high = drop.interval
    left = {name: totals[of][1] / totals[of][0] for name, of in (("macs", "MACs"), ("params", "parameters"))}
    verdict = {"holds": drop.drop <= asked, "beyond": low > asked}
    return {"drop": drop.drop, "low": low, "high": high, **verdict, **told, **left, **took}


def cost(drawn: Drawn, points: int, shares: Sequence[float], *, frontier_first: bool) -> dict[str, Any]:
    """CPU seconds of a frontier, and of separate calls for some shares of the MACs."""
    small: list[nn.Module] = []

    def frontier() -> dict[str, Any]:
        clock = Clock()
        found = drawn.frontier(points)
        return {"points": len(found.points), "frontier_cpu_seconds": clock.read()["cpu_seconds"]}

    def calls() -> dict[str, Any]:
        clock = Clock()
        small.extend(drawn.pruned(macs=share).model for share in shares)
        return {"calls": len(small), "calls_cpu_seconds": clock.read()["cpu_seconds"]}

    first, second = (frontier, calls) if frontier_first else (calls, frontier)
    took = {**first(), **second()}
    clock = Clock()
    judge = HeldOut(drawn.dense, drawn.held_out, TASK)
    for model in small:
        judge.drop(judge.score(model))
    measuring = clock.read()["cpu_seconds"]
    whole, separate = took["frontier_cpu_seconds"], took["calls_cpu_seconds"]
    ratios = {"ratio": whole / separate, "ratio_measured": whole / (separate + measuring)}
    return {**took, "measuring_cpu_seconds": measuring, **ratios}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows, but for those that sum up."""
    places = (f"data.root={options.data.resolve()}", f"model.weights={options.weights.resolve()}")
    job = load(RECIPE, [*places, f"model.name={options.model}"])
    splits, dense = load_splits(job.data), build_model(job.model, num_classes=10).eval()
    warm = True
    for seed in range(options.first_seed, options.first_seed + options.draws):
        drawn = Drawn.by(seed, dense, splits, options.images)
        if warm:  # what is imported and set up once is none of the costs
            Drawn(dense, drawn.images[:16], drawn.held_out, drawn.test).frontier([0.5])
            warm = False
        if options.what == "cost":
            kind = dict(zip(KEYS, ("cost", options.model, "frontier and calls", None, seed), strict=True))
            yield {**kind, **cost(drawn, options.points, options.calls, frontier_first=seed % 2 == 0)}
            continue
        for asked in options.drops:
            for way in WAYS if options.by_hand else ("max_drop",):
                kind = dict(zip(KEYS, ("drop", options.model, way, asked, seed), strict=True))
                yield {**kind, **delivered(way, drawn, asked)}


def summaries(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The draws of each case together: counts and medians."""
    for kind in dict.fromkeys(tuple(row[key] for key in KEYS[:-1]) for row in found):
        same = [row for row in found if tuple(row[key] for key in KEYS[:-1]) == kind]
        median = partial(median_of, same)
        summary = {**dict(zip(KEYS[:-1], kind, strict=True)), "draws": len(same)}
        if kind[0] == "cost":
            columns = [name for name in same[0] if name.endswith("cpu_seconds") or name.startswith("ratio")]
        else:
            columns = ["drop", "held_out", "macs", "params", "tried", "seconds", "cpu_seconds"]
            counts = {name: sum(bool(row[name]) for row in same) for name in ("holds", "beyond")}
            summary |= {"delivered": sum(row["drop"] is not None for row in same), **counts}
        yield summary | {name: median(name) for name in columns}


def median_of(found: Sequence[dict[str, Any]], name: str) -> float | None:
    """The median of a column, of the rows that have it."""
    values = [row[name] for row in found if row[name] is not None]
    return statistics.median(values) if values else None


def main() -> None:
    """Runs one of the two, and prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    few = partial(shares, example="0.01,0.02")
    parser.add_argument("--what", choices=("drop", "cost"), required=True)
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="a state dict of the dense model")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="an .npz")
    parser.add_argument("--model", choices=sorted(DEPTHS, key=lambda name: DEPTHS[name]), default="resnet56")
    parser.add_argument("--drops", type=few, default="0.005,0.01,0.02", metavar="A,B", help="of top-1, 0.01 a point")
    parser.add_argument("--draws", type=int, default=1, metavar="N", help="of the images; for the cost, rounds")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="of the first draw")
    parser.add_argument("--images", type=int, default=1024, metavar="N", help="to calibrate on")
    parser.add_argument("--points", type=int, default=10, metavar="N", help="of the frontier")
    parser.add_argument("--calls", type=few, default="0.8,0.6,0.4,0.3", metavar="A,B", help="MACs left by each")
    parser.add_argument("--by-hand", action="store_true", help="bisect the MACs by separate calls as well")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object a line, as soon as it is there")
    parser.add_argument("--keep", action="store_true", help=KEEP)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = collected(rows(options), as_json=options.json)
    if options.json:
        show(summaries(found), as_json=True)
    else:
        show([{name: value for name, value in row.items() if name != "what"} for row in found], as_json=False)
        print()
        show(summaries(found), as_json=False)
    if options.keep:
        every = [*found, *rows_before("frontier", found, KEYS)]
        every.sort(key=lambda row: tuple(row[key] or 0 for key in KEYS))
        setting = {"recipe": RECIPE.name, "images": options.images, "threads": options.threads, "drops": "shares"}
        print(keep("frontier", [*every, *summaries(every)], setting), file=sys.stderr)


if __name__ == "__main__":
    main()

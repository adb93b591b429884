"""Plans that were measured on the way to a budget of time, and what to aim at next. Pure functions of the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np

from prunekit.settings.budgets import facts_of

TOLERANCE = 0.03
"""By how much what is delivered may differ from what was asked for."""
GOAL = 0.99
"""What is aimed at, as a share of the time that was asked for: the middle of what is within the tolerance and no
slower."""
NEAR = 0.01
"""An attempt this near to the goal is taken."""


@dataclass(frozen=True)
class Timing:
    """A model on the target, measured beside the dense one in fresh processes.

    Attributes:
        ms, ms_low, ms_high: of a forward pass of the batch: the median over processes of their medians, and an interval
            that holds the 95 % intervals of all.
        speedup, speedup_low, speedup_high: over the dense model, pair by pair; the same.
        stable: whether the figures support a claim; if not, `doubts` says why.
        notes: that it was not measured in processes of its own after all, with the reason.
        processes: how many measured it.
    """

    ms: float
    ms_low: float
    ms_high: float
    speedup: float
    speedup_low: float
    speedup_high: float
    stable: bool
    doubts: tuple[str, ...]
    notes: tuple[str, ...] = ()
    processes: int = 1

    def excess(self, asked: dict[str, float]) -> float:
        """The time it takes over the time asked for: the largest over the budgets of time."""
        return max(facts_of(name).excess(value, self.ms, self.speedup) for name, value in asked.items())

    def __str__(self) -> str:
        return (
            f"{self.ms:.3g} ms [{self.ms_low:.3g}, {self.ms_high:.3g}], {self.speedup:.3g}x "
            f"[{self.speedup_low:.3g}, {self.speedup_high:.3g}]{'' if self.stable else ', unstable'}"
        )


@dataclass(frozen=True)
class Attempt:
    """A plan that was measured.

    Attributes:
        plan: number of the plan: a plan may be measured again, or be the same for another share.
        share: of the time that was asked for: what the plan was made for, as predicted.
        predicted_ms: by the latency table.
        macs_left: share of the dense model's.
        excess: the time it takes over the time asked for.
    """

    plan: int
    share: float
    predicted_ms: float
    macs_left: float
    excess: float
    timing: Timing

    def __str__(self) -> str:
        return (
            f"predicted {self.predicted_ms:.3g} ms with {self.macs_left:.1%} of the MACs, measured {self.timing}: "
            f"{100 * self.excess:.1f} % of the time asked for"
        )


def next_share(attempts: Sequence[Attempt]) -> float:
    """What to aim at: between neighbors on either side of the goal, else the last attempt scaled to it.

    Neighbors are plans made for about the same time, whatever they took: where kernels change from one width to the
    next, one that is nearer to the goal may lie beyond others, and what is between it and them was tried.
    """
    last = {one.plan: one.share for one in attempts}
    points = [(math.log(share), math.log(mean_excess(attempts, plan) / GOAL)) for plan, share in last.items()]
    below, above = [point for point in points if point[1] <= 0], [point for point in points if point[1] > 0]
    if not below or not above:
        return math.exp(points[-1][0] - points[-1][1])
    around = [(one, other) for one, other in pairwise(sorted(points)) if one[1] <= 0 < other[1]]
    if not around:  # noise: every plan for less time took more
        nearest = (max(below, key=itemgetter(1)), min(above, key=itemgetter(1)))
        return math.exp(sum(share - excess for share, excess in nearest) / 2)
    (low, under), (high, over) = max(around, key=lambda pair: pair[1][0] - pair[0][0])
    return math.exp(low - (high - low) / (over - under) * under)


def mean_excess(attempts: Sequence[Attempt], plan: int) -> float:
    """The geometric mean over the measurements of one plan."""
    return math.exp(float(np.mean([math.log(one.excess) for one in attempts if one.plan == plan])))


def distance(excess: float) -> float:
    """From the goal; slower than asked for counts as more than any other within the tolerance, and what is beyond the
    tolerance as more than all that is within it."""
    beyond = abs(excess - 1) > TOLERANCE
    return abs(excess - GOAL) + (TOLERANCE if excess > 1 else 0.0) + (2 * TOLERANCE if beyond else 0.0)

"""Budgets of time: the target that they are for, measured attempts to meet them, and the final result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from torch import nn

from prunekit.backends.session import Inputs
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.deploy.deployment_transform import AS_IT_IS, Transform
from prunekit.errors import PlanError
from prunekit.measure.latency.comparison import LatencyReport, choose_settings, devices
from prunekit.measure.latency.row_text import setting_text
from prunekit.planning.budgets.latency_table import LatencyTable
from prunekit.planning.feasibility import conflicting_limits, least_possible
from prunekit.planning.solver import feasible_plan
from prunekit.pruning.latency.device_clock import Timing
from prunekit.pruning.latency.profiling import Profile
from prunekit.settings.pruning import PruneSettings, facts_of
from prunekit.utils.display import factor, share, shares_left
from prunekit.utils.files import json_values

TOLERANCE = 0.03
"""How far the final time may be from the time that was asked for, as a share of it."""
GOAL = 0.99
"""The share of the time asked for that is aimed at: a little less, so that noise makes it no slower."""
NEAR = 0.01
"""An attempt this near to the goal ends the search."""
PROFILE_SHARE, SEARCH_SHARE, FINAL_SHARE = 0.4, 0.35, 0.25
"""The shares of the seconds of `target.limit_s` that the profile, the plans and the final model may take."""


@dataclass(frozen=True)
class Attempt:
    """A plan that was measured."""

    plan: int  # number of the plan; a plan may be measured twice, or be the same for another share
    share: float  # of the time asked for, that the plan was made for by prediction
    predicted_ms: float  # by the latency table
    macs_left: float  # share of the dense model's
    excess: float  # the measured time over the time asked for
    timing: Timing  # of the compact model
    ended: str = ""  # why no other plan was tried, where that was for want of time; else empty

    def __str__(self) -> str:
        return (
            f"predicted {self.predicted_ms:.3g} ms with {shares_left({'macs': self.macs_left})}, measured "
            f"{self.timing}: {share(self.excess)} of the time asked for"
        )


def next_share(attempts: Sequence[Attempt]) -> float:
    """Return the share of the time to aim at: between neighbors on either side of the goal, or the last one scaled.

    Neighbors are plans that were made for similar times, whatever their measured times: kernels change from one width
    to the next, so that measured times need not be in the order of the shares.
    """
    last = {one.plan: one.share for one in attempts}
    points = [(math.log(share), math.log(mean_excess(attempts, plan) / GOAL)) for plan, share in last.items()]
    below, above = [point for point in points if point[1] <= 0], [point for point in points if point[1] > 0]
    if not below or not above:
        return math.exp(points[-1][0] - points[-1][1])
    around = [(one, other) for one, other in pairwise(sorted(points)) if one[1] <= 0 < other[1]]
    if not around:  # noise: all plans for less time took more
        nearest = (max(below, key=itemgetter(1)), min(above, key=itemgetter(1)))
        return math.exp(sum(share - excess for share, excess in nearest) / 2)
    (low, under), (high, over) = max(around, key=lambda pair: pair[1][0] - pair[0][0])
    return math.exp(low - (high - low) / (over - under) * under)


def mean_excess(attempts: Sequence[Attempt], plan: int) -> float:
    """Return the geometric mean over the measurements of one plan."""
    return math.exp(float(np.mean([math.log(one.excess) for one in attempts if one.plan == plan])))


def distance(excess: float) -> float:
    """Return the distance from the goal.

    Slower than asked for is farther than any faster time within the tolerance, and times beyond the tolerance are
    farther than all within.
    """
    beyond = abs(excess - 1) > TOLERANCE
    return abs(excess - GOAL) + (TOLERANCE if excess > 1 else 0.0) + (2 * TOLERANCE if beyond else 0.0)


@dataclass(frozen=True, eq=False)
class LatencyTarget:
    """Budgets of time for a model, with all that is needed to predict and measure the times of its plans."""

    model: nn.Module  # dense, on the CPU; its weights do not matter
    channel_map: ChannelMap  # from its trace
    inputs: Inputs  # that models are timed on
    settings: PruneSettings  # with at least one budget of time, and runtime, device and batch
    profile: Profile  # on the target, or in eager if its runtime cannot tell layers apart
    transform: Transform = AS_IT_IS  # applied to the dense model and to every compact one before they are timed

    @property
    def table(self) -> LatencyTable:
        """The table that predicts the times of plans."""
        return self.profile.table

    @property
    def asked(self) -> dict[str, float]:
        """The budgets of time that are given."""
        return {name: value for name, value in self.settings.budget.given.items() if facts_of(name).measured}

    @property
    def given(self) -> dict[str, float]:
        """The budgets of time that a user gave; none where a score or the points of a frontier decide."""
        return {name: value for name, value in self.settings.budget.asked_for.items() if facts_of(name).measured}

    @property
    def asked_figures(self) -> dict[str, dict[str, float]]:
        """The budgets of time in the form of a plan's provenance."""
        return {name: {"asked": value} for name, value in self.asked.items()}

    @property
    def in_words(self) -> str:
        """The given budgets of time with their units."""
        return " and ".join(facts_of(name).asked(value) for name, value in self.given.items())

    @property
    def called(self) -> str:
        """The beginning of sentences on the time: the given budgets, or "time" without any."""
        return f"budget {self.in_words}" if self.given else "time"

    @cached_property
    def dense(self) -> nn.Module:
        """The dense model, deployed as the compact ones that are timed beside it."""
        return self.transform(self.model)

    @cached_property
    def least_share(self) -> float:
        """The least time that is predicted for any plan, over the time asked for."""
        least = least_possible(self.channel_map, self.settings.in_blocks, self.table)
        return max(least[name] / facts_of(name).as_cost(value) for name, value in self.asked.items()) * (1 + 1e-9)

    @property
    def most_share(self) -> float:
        """Just less than the time predicted for the dense model, over the time asked for."""
        dense_ms = self.table.at(self.channel_map)
        shares = (facts_of(name).excess(value, dense_ms, 1.0) for name, value in self.asked.items())
        return min(shares) * (1 - 1e-6)

    @property
    def first_share(self) -> float:
        """The share to aim at first: all of the time, or the least that is predicted."""
        return max(1.0, self.least_share)

    def aim(self, share: float) -> PruneSettings:
        """Return settings, in blocks, whose plans are predicted to take that share of the time asked for."""
        settings = self.settings.in_blocks
        aims = {name: facts_of(name).loosened(value, share) for name, value in self.asked.items()}
        if any(facts_of(name).problem(aim) is not None for name, aim in aims.items()):
            feasible_plan(self.channel_map, settings, self.table)
        return replace(settings, budget=settings.budget.changed(**aims))

    def out_of_reach(self, timing: Timing) -> PlanError:
        """Return the error for budgets that the fastest plan, with this timing, does not meet."""
        obstacles = conflicting_limits(self.channel_map, self.settings.in_blocks, self.table)
        return PlanError(
            f"{self.called}: the plan predicted to be fastest takes {timing.ms:.4g} ms, "
            f"{factor(timing.speedup)} the dense model's speed (measured), and no other is predicted to be "
            f"faster{obstacles}; raise the budget, or relax ignore, ratios, min_channels, min_blocks, round_to and "
            "target.block"
        )


@dataclass(frozen=True, eq=False)
class LatencyResult:
    """The result of a budget of time: the time of the final model, measured last."""

    target: LatencyTarget  # with the budgets
    attempts: tuple[Attempt, ...]  # all plans that were measured, in order
    binding: bool  # whether time limits the plan; if not, it may be faster than asked for
    final: Timing  # the time of the final model

    @property
    def excess(self) -> float:
        """The final time over the time asked for; 1 where none was."""
        return self.final.excess(self.target.given) if self.target.given else 1.0

    @property
    def within(self) -> bool:
        """True if the time is within the tolerance, or faster because another budget binds."""
        return abs(self.excess - 1) <= TOLERANCE or (self.excess < 1 and not self.binding)

    @property
    def shortfalls(self) -> list[str]:
        """Shortfalls and doubts, in sentences."""
        asked, final = self.target.called, self.final
        found = f"{final.ms:.4g} ms, {factor(final.speedup)} the dense model's speed"
        texts = []
        if not final.stable:
            texts.append(f"{asked}: the figure is unstable: {'; '.join(final.doubts)}")
        elif self.excess > 1:
            texts.append(f"{asked}: delivered {found}: {100 * (self.excess - 1):.1f} % slower than asked for")
        elif not self.within:
            texts.append(f"{asked}: delivered {found}: {100 * (1 - self.excess):.1f} % faster than asked for")
        if self.attempts and self.attempts[-1].ended:
            texts.append(f"{asked}: {self.attempts[-1].ended}")
        texts += [f"{asked}: {note}" for note in final.notes]
        return texts

    def in_place(self, report: LatencyReport, model: str) -> LatencyReport:
        """Return a report in which the final speedup replaces that of a model on the target.

        A report's own figures are of one process in each setting, and differ by some percent from process to process;
        two figures for the same speedup would confuse.
        """
        target = self.target.settings.target
        if target.elsewhere:  # where the report times nothing
            return report
        asked = target.as_latency
        (setting,) = choose_settings(asked, devices(target.device, asked))[0]
        same = {"model": model} | {key: value for key, value in asdict(setting).items() if key != "memory_format"}
        there = [row for row in report.speedup if same.items() <= row.items()]
        # A report has the memory format of the models, not of the settings.
        there = [row for row in there if row["memory_format"] == setting.memory_format] or there
        final, notes = self.final, list(report.notes)
        figures = {
            "median": final.speedup, "low": final.speedup_low, "high": final.speedup_high, "stable": final.stable,
            "doubts": list(final.doubts), "processes": final.processes,
        }  # fmt: skip

        def placed(row: Mapping[str, Any]) -> dict[str, Any]:
            if row not in there:
                return dict(row)
            notes.append(
                f"speedup of {model} ({setting_text(row)}): the figure of the budget of time, the median over as many "
                f"processes as it took ({final.processes}); times in ms are of one process each"
            )
            return {**row, **figures}

        speedup = tuple(placed(row) for row in report.speedup)
        return replace(report, speedup=speedup, notes=tuple(notes))

    def summary(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "asked": self.target.given,
            "deployed": str(self.target.transform),
            "target": json_values(self.target.settings.noted["target"]),
            "final": asdict(self.final),
            "excess": self.excess,
            "within": self.within,
            "tolerance": TOLERANCE,
            "binding": self.binding,
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }

"""The target of a budget of time: what was asked for, what was measured on the way, and the figure that counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.channel_map import ChannelMap
from prunekit.deploy.transform import AS_IT_IS, Transform
from prunekit.errors import PlanError
from prunekit.jobs.bench import devices
from prunekit.jobs.profile import as_latency, in_blocks
from prunekit.jobs.prune.latency_profile import Profile
from prunekit.measure.latency.comparison import LatencyReport, choose_settings
from prunekit.measure.latency.row_text import setting_text
from prunekit.measure.runtimes.session import Inputs
from prunekit.planning.feasibility import conflicting_limits, least_possible
from prunekit.planning.latency_table import LatencyTable
from prunekit.planning.solver import feasible_plan
from prunekit.settings.prune import PruneSettings, facts_of
from prunekit.utils.files import json_values

TOLERANCE = 0.03
"""How far the delivered time may be from the time that was asked for, as a share of it."""
GOAL = 0.99
"""The share of the time asked for that is aimed at: the middle of what is within the tolerance and no slower."""
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
        """Return the time it takes over the time asked for: the largest over the budgets of time."""
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
    """Return the share of the time to aim at: between neighbors on either side of the goal, else the last one scaled.

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
    """Return the geometric mean over the measurements of one plan."""
    return math.exp(float(np.mean([math.log(one.excess) for one in attempts if one.plan == plan])))


def distance(excess: float) -> float:
    """Return the distance from the goal.

    Slower than asked for counts as more than any other within the tolerance, and what is beyond the tolerance as more
    than all that is within it.
    """
    beyond = abs(excess - 1) > TOLERANCE
    return abs(excess - GOAL) + (TOLERANCE if excess > 1 else 0.0) + (2 * TOLERANCE if beyond else 0.0)


@dataclass(frozen=True, eq=False)
class LatencyTarget:
    """Budgets of time, the model that they are asked of, and all that is needed to predict and to measure its plans.

    Attributes:
        model: dense; on the CPU. Its weights make no difference to time.
        channel_map: of it, traced.
        inputs: that it is timed on.
        settings: budgets, of which at least one is of time, and the runtime, device and batch.
        profile: what layers take there, or in the runtime that stands in for it.
        transform: what is done to the dense model and to every compact one before they are timed.
    """

    model: nn.Module
    channel_map: ChannelMap
    inputs: Inputs
    settings: PruneSettings
    profile: Profile
    transform: Transform = AS_IT_IS

    @property
    def table(self) -> LatencyTable:
        """By which plans are predicted."""
        return self.profile.table

    @property
    def asked(self) -> dict[str, float]:
        """The budgets of time that are given."""
        return {name: value for name, value in self.settings.budget.given.items() if facts_of(name).measured}

    @property
    def asked_figures(self) -> dict[str, dict[str, float]]:
        """The same as plans note it."""
        return {name: {"asked": value} for name, value in self.asked.items()}

    @property
    def in_words(self) -> str:
        """The budgets of time with their units."""
        return " and ".join(f"{name} {facts_of(name).in_words(value)}" for name, value in self.asked.items())

    @cached_property
    def dense(self) -> nn.Module:
        """What compact models are timed beside: the dense one with all that is done to them but pruning."""
        return self.transform(self.model)

    @cached_property
    def least_share(self) -> float:
        """The least time that any plan is predicted to take, over what was asked for."""
        least = least_possible(self.channel_map, in_blocks(self.settings), self.table)
        return max(least[name] / facts_of(name).as_cost(value) for name, value in self.asked.items()) * (1 + 1e-9)

    @property
    def most_share(self) -> float:
        """Just less than the dense model is predicted to take, over what was asked for."""
        dense_ms = self.table.at(self.channel_map)
        shares = (facts_of(name).excess(value, dense_ms, 1.0) for name, value in self.asked.items())
        return min(shares) * (1 - 1e-6)

    @property
    def first_share(self) -> float:
        """The share to aim at before anything was measured: all of the time, or the least that is predicted."""
        return max(1.0, self.least_share)

    def aim(self, share: float) -> PruneSettings:
        """Return the settings in blocks whose plans take that share of the time asked for, as predicted.

        Raises:
            PlanError: no plan is predicted to be faster than the dense model, so that there is nothing to aim at.
        """
        settings = in_blocks(self.settings)
        aims = {name: facts_of(name).loosened(value, share) for name, value in self.asked.items()}
        if any(facts_of(name).problem(aim) is not None for name, aim in aims.items()):
            feasible_plan(self.channel_map, settings, self.table)
        return replace(settings, budget=settings.budget.changed(**aims))

    def out_of_reach(self, timing: Timing) -> PlanError:
        """Return the error to raise where the fastest plan, which took so long, is too slow."""
        obstacles = conflicting_limits(self.channel_map, in_blocks(self.settings), self.table)
        return PlanError(
            f"budget {self.in_words}: the plan predicted to be fastest takes {timing.ms:.4g} ms, "
            f"{timing.speedup:.3g}x the dense model's speed (measured), and no other is predicted to be "
            f"faster{obstacles}; raise the budget, or relax ignore, ratios, min_channels, round_to and target.block"
        )


@dataclass(frozen=True, eq=False)
class LatencyResult:
    """The figure that counts for a budget of time: of the model that is handed over, measured last.

    Attributes:
        target: what was asked for.
        attempts: all plans that were measured on the way, in order.
        binding: whether time is what the plan is limited by; if not, it may be faster than asked for.
        final: what the model takes that is handed over.
    """

    target: LatencyTarget
    attempts: tuple[Attempt, ...]
    binding: bool
    final: Timing

    @property
    def excess(self) -> float:
        """The time it takes over the time asked for."""
        return self.final.excess(self.target.asked)

    @property
    def within(self) -> bool:
        """Whether what is delivered is within the tolerance, or faster where another budget binds."""
        return abs(self.excess - 1) <= TOLERANCE or (self.excess < 1 and not self.binding)

    @property
    def shortfalls(self) -> list[str]:
        """What was promised and not delivered, in sentences: each figure that is slower than asked for among it."""
        asked, final = self.target.in_words, self.final
        found = f"{final.ms:.4g} ms, {final.speedup:.3g}x the dense model's speed"
        texts = []
        if self.excess > 1:
            texts.append(f"budget {asked}: delivered {found}: {100 * (self.excess - 1):.1f} % slower than asked for")
        elif not self.within:
            texts.append(f"budget {asked}: delivered {found}: {100 * (1 - self.excess):.1f} % faster than asked for")
        if not final.stable:
            texts.append(f"budget {asked}: the figure is unstable: {'; '.join(final.doubts)}")
        texts += [f"budget {asked}: {note}" for note in final.notes]
        return texts

    def in_place(self, report: LatencyReport, model: str) -> LatencyReport:
        """Return a report in which the figure that counts stands for the speedup of a model on the target.

        A report's own figures are of one process in each setting, whose memory lies by chance; two figures for the same
        thing, each certain to a percent, need not agree.
        """
        target = self.target.settings.target
        asked = as_latency(target)
        (setting,) = choose_settings(asked, devices(target.device, asked))[0]
        # Layouts are as models have them, not as they were asked for.
        same = {key: value for key, value in asdict(setting).items() if key != "memory_format"}
        final, notes = self.final, list(report.notes)
        figures = {
            "median": final.speedup, "low": final.speedup_low, "high": final.speedup_high, "stable": final.stable,
            "doubts": list(final.doubts), "processes": final.processes,
        }  # fmt: skip

        def placed(row: Mapping[str, Any]) -> dict[str, Any]:
            if row["model"] != model or any(row[key] != value for key, value in same.items()):
                return dict(row)
            notes.append(
                f"speedup of {model} ({setting_text(row)}): the figure of the budget of time, the median over as many "
                f"processes as it took ({final.processes}); times in ms are of one process each"
            )
            return {**row, **figures}

        speedup = tuple(placed(row) for row in report.speedup)
        return replace(report, speedup=speedup, notes=tuple(notes))

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "asked": self.target.asked,
            "deployed": str(self.target.transform),
            "target": json_values(asdict(self.target.settings.target)),
            "final": asdict(self.final),
            "excess": self.excess,
            "within": self.within,
            "tolerance": TOLERANCE,
            "binding": self.binding,
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }

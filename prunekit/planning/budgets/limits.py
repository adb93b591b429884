"""The budgets of a job as functions of widths: what is left of each, and whether all are met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.planning.budgets.budget import BUDGETS, Countable
from prunekit.planning.candidates import GroupPart
from prunekit.planning.costs import CostModel, Numbers, Term, cost_model
from prunekit.planning.latency_table import LatencyTable
from prunekit.settings.prune import BudgetFacts, PruneSettings, noted_facts

BITS = 40
"""To which the largest term of a sum of fractions is counted."""


@dataclass(frozen=True, eq=False)
class Budgets:
    """What a plan may cost, in the units of the budgets: shares of the dense model, megabytes, and milliseconds.

    Figures that are the least of something are here as one over it: a speedup as the share of the time. A budget may be
    several limits: memory is the most of what is alive at each of several moments.

    Attributes:
        facts: of the budgets that were asked for.
        asked: (budgets,) the most of each that may be left.
        dense: (budgets,) what the dense model has of each; 1 where it is a share.
        left: counts of the parts (..., parts) -> what they leave, (..., budgets).
        limited: the same -> what is limited, (..., limits): but for what no counts bring to its limit, where it is
            `smooth`, it is so in each count, unlike the most of it.
        limits: (limits,) the most of each that may be left.
        owner: (limits,) index of the budget that it belongs to.
        steps: that widths are rounded up to where time is counted.
        turning: whether another kernel may take over at some width, so that more channels take less time.
        turns: of each part the counts at which one does; of widths that several parts decide, none.
    """

    facts: tuple[BudgetFacts, ...]
    asked: Numbers
    dense: Numbers
    left: Callable[[Labels], Numbers]
    limited: Callable[[Labels], Numbers]
    limits: Numbers
    owner: Labels
    steps: tuple[int, ...]
    turning: bool
    turns: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the budgets that were asked for."""
        return tuple(one.name for one in self.facts)

    @property
    def smooth(self) -> bool:
        """Whether costs neither go in steps nor turn."""
        return not self.steps and not self.turning

    def fits(self, counts: Labels) -> Any:
        """Return whether counts (..., parts) meet every budget: bool (...)."""
        return (self.limited(counts) <= self.limits).all(axis=-1)

    def found(self, counts: Labels) -> dict[str, Any]:
        """For a plan's provenance: of each budget what was asked for and what is left, and the one that binds."""
        left = self.left(counts)
        each = {
            one.name: {
                "asked": one.as_cost(asked),
                "left": one.as_cost(value),
                "dense": one.as_cost(dense),
                **noted_facts(one),
            }
            for one, asked, value, dense in zip(self.facts, self.asked, left, self.dense, strict=True)
        }
        return {"budgets": each, "binding": self.names[int(np.argmax(left / self.asked))]}


def budgets_of(
    channel_map: ChannelMap, parts: list[GroupPart], settings: PruneSettings, latency: LatencyTable | None = None
) -> Budgets:
    """Return the budgets of a job as functions of the parts' counts.

    Args:
        latency: of the target, where a budget is one of time.

    Raises:
        PlanError: a budget of time without the table.
        UsageError: a figure means nothing, or a budget's function returns something else than terms.
    """
    settings.budget.require_sound()
    asked = settings.budget.given
    budgets = [BUDGETS.get(name) for name in asked]
    facts = [budget.facts for budget in budgets]
    countable = Countable(channel_map, parts, settings.target, latency)
    each = [_finer(budget.sums(countable), budget.facts) for budget in budgets]
    terms = [one for several, _ in each for one in several]
    starts = np.cumsum([0, *(len(several) for several, _ in each)], dtype=np.int64)[:-1]
    owner = np.repeat(np.arange(len(each)), [len(several) for several, _ in each])
    model = cost_model(channel_map, parts, terms)
    dense = model(np.array([part.labels.size for part in parts]))
    units = [finer * one.per_unit for one, (_, finer) in zip(facts, each, strict=True)]
    wholes = zip(facts, dense[starts], units, strict=True)
    scale = np.array([whole if one.share else unit for one, whole, unit in wholes])[owner]
    scale = np.maximum(scale, 1)
    most = np.array([one.as_cost(value) for one, value in zip(facts, asked.values(), strict=True)])
    within = _within(dense / scale, most, owner)
    each_group = [index for index, one in enumerate(facts) if one.each_group and settings.scope == "uniform"]
    worst = _worst(parts)

    def counted(of: CostModel, scale: Numbers, owner: Labels) -> Callable[[Labels], Numbers]:
        def values(counts: Labels) -> Numbers:
            result: Numbers = of(counts) / scale
            for index in each_group:
                result[..., owner == index] = worst(counts)[..., None]
            return result

        return values

    every = counted(model, scale, owner)
    return Budgets(
        facts=tuple(facts),
        asked=most,
        dense=np.maximum.reduceat(dense / scale, starts),
        left=lambda counts: np.maximum.reduceat(every(counts), starts, axis=-1),
        limited=counted(model.of(within), scale[within], owner[within]),
        limits=most[owner[within]],
        owner=owner[within],
        steps=tuple(sorted({step for one in terms for term in one for step in term.steps if step > 1})),
        turning=model.turning,
        turns=tuple(tuple(sorted(found)) for found in model.turns([part.labels.size for part in parts])),
    )


def _within(dense: Numbers, most: Numbers, owner: Labels) -> Labels:
    """Of what makes up the budgets, with its amount in the dense model, all that may be above its limit.

    And the largest of each budget, which says how far below it all is.
    """
    largest = np.array([int(np.argmax(np.where(owner == index, dense, -1.0))) for index in range(most.size)])
    above = dense > most[owner]
    above[largest] = True
    return np.flatnonzero(above)


def _finer(sums: list[list[Term]], facts: BudgetFacts) -> tuple[list[list[Term]], float]:
    """Return terms whose sums are precise as whole numbers, which are all that is counted, and how much finer they are.

    Constants that are whole stay as they are, and so do times, which are in nanoseconds.
    """
    terms = [term for one in sums for term in one]
    if facts.measured or all(float(term.constant).is_integer() for term in terms):
        return sums, 1.0
    most = max(abs(term.constant) * math.prod(factor.size for factor in term.factors) for term in terms) or 1.0
    finer = 2.0 ** (BITS - math.ceil(math.log2(most)))
    return [[term.times(finer) for term in one] for one in sums], finer


def _worst(parts: list[GroupPart]) -> Callable[[Labels], Numbers]:
    """Return the largest share that a part keeps, of those that are not at their smallest: a share is asked of every
    group.
    """
    sizes = np.array([part.labels.size for part in parts])
    free = np.array([len(part.counts) > 1 for part in parts])
    floor = np.array([part.at_most(0) for part in parts]) / sizes

    def worst(counts: Labels) -> Numbers:
        share = counts / sizes
        most: Numbers = np.where(free & (share > floor), share, 0.0).max(axis=-1)
        return most

    return worst

"""Budgets: what each of them counts, whether a choice of widths meets them all, and what is said if none can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.errors import PlanError
from prunekit.planning.costs import CostModel, cost_model
from prunekit.planning.latency import LatencyTable
from prunekit.planning.select import Part
from prunekit.planning.terms import Numbers, Term, latency_terms, memory_terms, terms_of
from prunekit.settings.pruning import LATENCIES, BudgetSettings, PruneSettings

COUNTED = {"channels": "channels", "macs": "macs", "params": "params", "size_mb": "bytes"}
"""What each budget counts; those of `LATENCIES` count nanoseconds, and `memory_mb` bytes that are alive."""
MB = 1e6
NS_PER_MS = 1e6


@dataclass(frozen=True, eq=False)
class Budgets:
    """What a plan may cost, in the units of the budgets: shares of the dense model, megabytes, and milliseconds.

    A speedup is one over the share of the dense model's latency. A budget may be several limits: memory is the most of
    what is alive at each of several moments.

    Attributes:
        names: of the budgets that were asked for.
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

    names: tuple[str, ...]
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
    def smooth(self) -> bool:
        """Whether costs neither go in steps nor turn."""
        return not self.steps and not self.turning

    def fits(self, counts: Labels) -> Any:
        """Whether counts (..., parts) meet every budget: bool (...)."""
        return (self.limited(counts) <= self.limits).all(axis=-1)

    def found(self, counts: Labels) -> dict[str, Any]:
        """For a plan's provenance: of each budget what was asked for and what is left, and the one that binds."""
        left = self.left(counts)
        each = {
            name: {"asked": as_given(name, asked), "left": as_given(name, value), "dense": as_given(name, dense)}
            for name, asked, value, dense in zip(self.names, self.asked, left, self.dense, strict=True)
        }
        return {"budgets": each, "binding": self.names[int(np.argmax(left / self.asked))]}


def asked_for(budget: BudgetSettings) -> dict[str, float]:
    """The budgets that are given."""
    return {name: value for name, value in asdict(budget).items() if value is not None}


def as_given(name: str, value: float) -> float:
    """A figure of `Budgets` as the setting is given: a speedup for a share of time."""
    return float(1 / value if name == "speedup" else value)


def in_words(name: str, value: float) -> str:
    """A figure of a budget, as `Budgets` has it, with its unit."""
    unit = {"size_mb": " MB", "memory_mb": " MB", "latency_ms": " ms", "speedup": "x"}.get(name, "")
    return f"{as_given(name, value):.4g}{unit}"


def budgets_of(
    channel_map: ChannelMap, parts: list[Part], settings: PruneSettings, latency: LatencyTable | None = None
) -> Budgets:
    """The budgets of a job as functions of the parts' counts.

    Args:
        latency: of the target, where a budget is one of time.

    Raises:
        PlanError: a budget of time without the table.
    """
    asked = asked_for(settings.budget)
    each = [_limited(channel_map, parts, name, settings, latency) for name in asked]
    terms = [one for several in each for one in several]
    starts = np.cumsum([0, *map(len, each)], dtype=np.int64)[:-1]
    owner = np.repeat(np.arange(len(each)), [len(several) for several in each])
    model = cost_model(channel_map, parts, terms)
    dense = model(np.array([part.labels.size for part in parts]))
    fixed = {"size_mb": MB, "memory_mb": MB, "latency_ms": NS_PER_MS}
    scale = np.array([fixed.get(name, whole) for name, whole in zip(asked, dense[starts], strict=True)])[owner]
    scale = np.maximum(scale, 1)
    most = np.array([as_given(name, value) for name, value in asked.items()])  # one over it is its own inverse
    within = _within(dense / scale, most, owner)
    each_group = [index for index, name in enumerate(asked) if name == "channels" and settings.scope == "uniform"]
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
        names=tuple(asked),
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


def _limited(
    channel_map: ChannelMap, parts: list[Part], name: str, settings: PruneSettings, latency: LatencyTable | None
) -> list[list[Term]]:
    """What a budget counts: a sum of products of widths, or several, the most of which counts."""
    if name == "memory_mb":
        return memory_terms(channel_map, settings.target.batch, settings.target.dtype)
    if name not in LATENCIES:
        return [terms_of(channel_map, parts, COUNTED[name])]
    if latency is None:
        raise PlanError(f"budget {name}: expected a latency table of the target; `prunekit.profile` measures one")
    return [latency_terms(channel_map, latency)]


def _worst(parts: list[Part]) -> Callable[[Labels], Numbers]:
    """The largest share that a part keeps, of those that are not at their smallest: a share is asked of every group."""
    sizes = np.array([part.labels.size for part in parts])
    free = np.array([len(part.counts) > 1 for part in parts])
    floor = np.array([part.at_most(0) for part in parts]) / sizes

    def worst(counts: Labels) -> Numbers:
        share = counts / sizes
        most: Numbers = np.where(free & (share > floor), share, 0.0).max(axis=-1)
        return most

    return worst

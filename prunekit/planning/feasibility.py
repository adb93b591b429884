"""What may be asked for: figures that mean something, and the least that can be left of each budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.tracing.tracer import there
from prunekit.errors import PlanError, UsageError
from prunekit.planning.budgets.limits import Budgets, budgets_of
from prunekit.planning.candidates import GroupPart, Scores, free_parts
from prunekit.planning.costs import Numbers
from prunekit.planning.latency_table import LatencyTable
from prunekit.settings.prune import BudgetSettings, PruneSettings, budget_names, facts_of

LIMITS = ("ignore", "ratios", "min_channels", "round_to")
SWEEPS = 4
"""Over all parts, where the narrowest plan may not be the fastest."""


def calls_no_own_module(channel_map: ChannelMap) -> str:
    """Say it, where the model calls no module of its own that has parameters; nothing otherwise.

    So it is of a predictor that makes its own copy of the model that it holds.
    """
    if channel_map.source is None:
        return ""
    trace = channel_map.source.trace
    model = trace.model()
    holders = {path for path, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    inside = there(model)
    if not inside or holders & trace.ran:
        return ""
    return f"{type(model).__name__} calls no module of its own that has parameters, on the example{inside}"


def nothing_free_error(channel_map: ChannelMap) -> PlanError:
    """Return what to raise where no channel can go: names the lock that holds most of them."""
    if another := calls_no_own_module(channel_map):
        return PlanError(another)
    locks = [lock for lock in channel_map.locks if lock.channels and (lock.module or lock.operator)]
    most = max(locks, key=lambda lock: lock.channels, default=None)
    where = "" if most is None else " ".join(filter(None, (most.module, most.operator and f"({most.operator})")))
    why = "" if most is None else f", most of them in {where}: {most.reason}"
    return PlanError(f"no channel is free: all are locked or excluded{why}; `prunekit inspect` lists all reasons")


def least_possible(
    channel_map: ChannelMap, settings: PruneSettings, latency: LatencyTable | None = None
) -> dict[str, float]:
    """Return the least that can be left of each budget that is given, in the units of `Budgets`: of time, within the
    others.

    Raises:
        PlanError: nothing is free, or a glob matches no module.
    """
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), settings)
    if not parts:
        raise nothing_free_error(channel_map)
    budgets = budgets_of(channel_map, parts, settings, latency)
    return dict(zip(budgets.names, least_of(parts, budgets).tolist(), strict=True))


def require_unmeasured_met(channel_map: ChannelMap, settings: PruneSettings) -> None:
    """Checks that every budget can be met that needs no latency table.

    Raises:
        PlanError: one cannot; or nothing is free, or a glob matches no module.
        ModelError: the model does not run on the batch and dtype that memory is counted for.
    """
    timed = [name for name in settings.budget.given if facts_of(name).measured]
    wanted = replace(settings, budget=_without(settings, timed))
    if wanted.budget.given:
        scores = np.zeros(channel_map.n_labels)
        parts = free_parts(channel_map, scores, wanted)
        if not parts:
            raise nothing_free_error(channel_map)
        require_met(channel_map, scores, parts, budgets_of(channel_map, parts, wanted), wanted)


def require_met(
    channel_map: ChannelMap,
    scores: Scores,
    parts: list[GroupPart],
    budgets: Budgets,
    settings: PruneSettings,
    latency: LatencyTable | None = None,
) -> None:
    """Checks that every budget can be met.

    Raises:
        PlanError: one cannot; of each budget that is out of reach the best that can be had, and what stands in its
            way.
    """
    least = least_of(parts, budgets)
    missed = [index for index in range(least.size) if least[index] > budgets.asked[index]]
    if not missed:
        return
    if another := calls_no_own_module(channel_map):
        raise PlanError(another)
    texts = []
    for index in missed:
        facts, asked = budgets.facts[index], float(budgets.asked[index])
        without = "".join(_in_the_way(channel_map, scores, settings, facts.name, asked, latency))
        no_less = "no more" if facts.least else "no less"
        of_dense = " (predicted)" if facts.measured else " of the dense model" if facts.share else ""
        wanted, left = (facts.in_words(facts.as_cost(value)) for value in (asked, float(least[index])))
        texts.append(
            f"budget {facts.name}: {facts.limit} {wanted} was asked for, but locks, exclusions, ratios, min_channels "
            f"and round_to leave {no_less} than {left}{of_dense}{without}"
        )
    raise PlanError(f"{'; '.join(texts)}; raise the budget or relax these")


def conflicting_limits(channel_map: ChannelMap, settings: PruneSettings, latency: LatencyTable) -> str:
    """Return what alone makes a budget of time impossible, as predicted, with what could be had without it; may be
    empty.
    """
    scores, least = np.zeros(channel_map.n_labels), least_possible(channel_map, settings, latency)
    given = ((facts_of(name), value) for name, value in settings.budget.given.items())
    asked = ((facts.name, facts.as_cost(value)) for facts, value in given if facts.measured)
    missed = [(name, value) for name, value in asked if least[name] > value]
    found = (_in_the_way(channel_map, scores, settings, name, value, latency) for name, value in missed)
    return "".join(text for texts in found for text in texts)


def _in_the_way(
    channel_map: ChannelMap,
    scores: Scores,
    settings: PruneSettings,
    name: str,
    asked: float,
    latency: LatencyTable | None,
) -> Iterator[str]:
    """Yield the limits and other budgets of which each alone makes one impossible, with what could be had without
    it.
    """
    facts = facts_of(name)
    others = [other for other in settings.budget.given if facts.measured and not facts_of(other).measured]
    without: dict[str, dict[str, Any]] = {limit: {limit: getattr(PruneSettings(), limit)} for limit in LIMITS}
    without |= {f"budget {other}": {"budget": _without(settings, [other])} for other in others}
    for limit, change in without.items():
        relaxed = replace(settings, **change)
        if relaxed != settings:
            parts = free_parts(channel_map, scores, relaxed)
            budgets = budgets_of(channel_map, parts, relaxed, latency)
            least = float(least_of(parts, budgets)[budgets.names.index(name)])
            if least <= asked:
                blocks = limit == "round_to" and settings.budget.measured and settings.target.block > 1
                shown = "round_to or target.block" if blocks else limit
                yield f" (it contradicts {shown}, without which {facts.in_words(facts.as_cost(least))} can be had)"


def _without(settings: PruneSettings, names: Iterable[str]) -> BudgetSettings:
    return settings.budget.changed(**dict.fromkeys(names))


def least_of(parts: list[GroupPart], budgets: Budgets) -> Numbers:
    """Return the least that can be left of each budget, (budgets,): of time, within the others."""
    narrow, quick = budgets.left(_narrowest(parts)), budgets.left(fastest(parts, budgets))
    return np.where(_timed(budgets), quick, narrow)


def fastest(parts: list[GroupPart], budgets: Budgets) -> Labels:
    """Return counts that leave the least time within the budgets that are not of time; the narrowest where none is of
    time.

    Where another kernel may take less time for a wider part, what no part alone makes less, from the narrowest or the
    widest counts that are within the others: whichever ends at less.
    """
    narrowest, timed = _narrowest(parts), _timed(budgets)
    if not budgets.turning:
        return narrowest
    others = ~timed if (budgets.left(narrowest) <= budgets.asked)[~timed].all() else np.zeros_like(timed)
    widest = np.array([part.counts[-1] for part in parts])

    def times(counts: Labels) -> Numbers:
        """(trials,) shares of the time asked for; infinite beyond the other budgets."""
        left = budgets.left(counts) / budgets.asked
        return np.where((left[:, others] <= 1).all(axis=1), left[:, timed].max(axis=1), np.inf)

    ends = [_downhill(parts, start, times) for start in (narrowest, widest)]
    return min(ends, key=lambda counts: float(times(counts[None])[0]))


def _downhill(parts: list[GroupPart], counts: Labels, times: Callable[[Labels], Numbers]) -> Labels:
    for _ in range(SWEEPS):
        before = counts
        for number, part in enumerate(parts):
            trials = np.repeat(counts[None], part.counts.size, axis=0)
            trials[:, number] = part.counts
            took = times(trials)
            if took.min() < np.inf:
                counts = trials[int(np.argmin(took))]
        if np.array_equal(before, counts):
            break
    return counts


def _timed(budgets: Budgets) -> NDArray[np.bool_]:
    return np.array([facts.measured for facts in budgets.facts], dtype=np.bool_)


def _narrowest(parts: list[GroupPart]) -> Labels:
    return np.array([part.counts[0] for part in parts])


def require_budget(settings: PruneSettings) -> None:
    """Checks that there is something to plan for.

    Raises:
        UsageError: there is no budget.
    """
    if not settings.budget.given:
        names = ", ".join(budget_names())
        raise UsageError(f"budget: expected at least one of {names}, each the most that may be left; got none")

"""Feasibility of budgets: the least that can be left of each, and what keeps one from being met."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap
from prunekit.errors import PlanError
from prunekit.planning.budgets.budget import Budgets, budgets_of
from prunekit.planning.budgets.cost_model import GroupPart, Numbers
from prunekit.planning.budgets.latency_table import LatencyTable
from prunekit.planning.candidates import Scores, calls_no_own_module, found_by_trial, free_parts, nothing_free_error
from prunekit.planning.depth_search import all_that_may_go, blocks_of, without_blocks
from prunekit.settings.pruning import BudgetSettings, PruneSettings, facts_of
from prunekit.utils.globs import globs, matching

LIMITS = ("ignore", "ratios", "min_channels", "round_to", "min_blocks", "depth", "plain_classes")
SWEEPS = 4
"""Passes over all parts in the search for the fastest plan, where it need not be the narrowest."""


def require_met(
    channel_map: ChannelMap,
    scores: Scores,
    parts: list[GroupPart],
    budgets: Budgets,
    settings: PruneSettings,
    latency: LatencyTable | None = None,
) -> None:
    """Raise if a budget cannot be met."""
    least = _least_possible(parts, budgets)
    missed = [index for index in range(least.size) if least[index] > budgets.asked[index]]
    if not missed:
        return
    if reason := calls_no_own_module(channel_map):
        raise PlanError(reason)
    texts, limits = [], ", round_to and blocks that stay" if channel_map.branches.found else " and round_to"
    for index in missed:
        facts, asked = budgets.facts[index], float(budgets.asked[index])
        without = "".join(_conflicts(channel_map, scores, settings, facts.name, asked, latency))
        no_less = "no more" if facts.least else "no less"
        of_dense = " (predicted)" if facts.measured else " of the dense model" if facts.share else ""
        wanted, left = (facts.in_words(facts.as_cost(value)) for value in (asked, float(least[index])))
        texts.append(
            f"budget {facts.name}: {facts.limit} {wanted} was asked for, but locks, exclusions, ratios, "
            f"min_channels{limits} leave {no_less} than {left}{of_dense}{without}"
        )
    found = found_by_trial(channel_map)
    why = found and f". The trial of a plan locked {found}"
    raise PlanError(f"{'; '.join(texts)}; raise the budget or relax these{why}")


def require_unmeasured_met(channel_map: ChannelMap, settings: PruneSettings) -> None:
    """Raise if a budget that needs no latency table cannot be met."""
    timed = [name for name in settings.budget.given if facts_of(name).measured]
    wanted = replace(settings, budget=_without(settings, timed))
    if wanted.budget.given:
        scores = np.zeros(channel_map.n_labels)
        require_met(channel_map, scores, *_least_parts(channel_map, scores, wanted), wanted)


def least_possible(channel_map: ChannelMap, settings: PruneSettings, latency: LatencyTable | None) -> dict[str, float]:
    """Return the least that can be left of each given budget, in the units of `Budgets`; of time within the others."""
    parts, budgets = _least_parts(channel_map, np.zeros(channel_map.n_labels), settings, latency)
    return dict(zip(budgets.names, _least_possible(parts, budgets).tolist(), strict=True))


def _least_parts(
    channel_map: ChannelMap, scores: Scores, settings: PruneSettings, latency: LatencyTable | None = None
) -> tuple[list[GroupPart], Budgets]:
    """Return the parts that a plan may prune, those of all blocks that may go without channels, and the budgets."""
    parts = free_parts(channel_map, scores, settings)
    budgets = budgets_of(channel_map, parts, settings, latency)
    blocks = blocks_of(channel_map, parts, scores, settings)
    return without_blocks(parts, all_that_may_go(parts, blocks, settings, budgets)), budgets


def _least_possible(parts: list[GroupPart], budgets: Budgets) -> Numbers:
    """Return the least that can be left of each budget, (budgets,); of time within the others."""
    return np.where(budgets.timed, budgets.left(fastest(parts, budgets)), budgets.left(_narrowest(parts)))


def conflicting_limits(channel_map: ChannelMap, settings: PruneSettings, latency: LatencyTable) -> str:
    """Return which limits make a budget of time impossible by themselves, and what is possible without each.

    Times are predicted. Empty if there is no such limit.
    """
    scores, least = np.zeros(channel_map.n_labels), least_possible(channel_map, settings, latency)
    given = ((facts_of(name), value) for name, value in settings.budget.given.items())
    asked = ((facts.name, facts.as_cost(value)) for facts, value in given if facts.measured)
    missed = [(name, value) for name, value in asked if least[name] > value]
    found = (_conflicts(channel_map, scores, settings, name, value, latency) for name, value in missed)
    return "".join(text for texts in found for text in texts)


def _conflicts(
    channel_map: ChannelMap,
    scores: Scores,
    settings: PruneSettings,
    name: str,
    asked: float,
    latency: LatencyTable | None,
) -> Iterator[str]:
    """Yield the limits and other budgets without which a budget could be met, and how far."""
    facts = facts_of(name)
    others = [other for other in settings.budget.given if facts.measured and not facts_of(other).measured]
    changes: list[tuple[str, dict[str, Any]]] = [(limit, {limit: getattr(PruneSettings(), limit)}) for limit in LIMITS]
    changes += [(f"budget {other}", {"budget": _without(settings, [other])}) for other in others]
    changes += [("layout", {"layout": layout}) for layout in settings.nearer_layouts]
    for limit, change in changes:
        relaxed = replace(settings, **change)
        if relaxed == settings:
            continue
        parts, budgets = _least_parts(channel_map, scores, relaxed, latency)
        least = float(_least_possible(parts, budgets)[budgets.names.index(name)])
        if least > asked:
            continue
        blocks = limit == "round_to" and settings.budget.measured and settings.target.block > 1
        shown = (
            "round_to or target.block"
            if blocks
            else f"{limit}={getattr(settings, limit)!r}"
            if limit in ("depth", "layout")
            else limit
        )
        nearest = f" by layout={relaxed.layout!r}, the nearest," if limit == "layout" else ""
        left = facts.in_words(facts.as_cost(least))
        yield f" (it contradicts {shown}, without which{nearest} {left} can be had)"
        if limit == "layout":
            return


def _without(settings: PruneSettings, names: Iterable[str]) -> BudgetSettings:
    return settings.budget.changed(**dict.fromkeys(names))


def fastest(parts: list[GroupPart], budgets: Budgets) -> Labels:
    """Return counts that take the least time within the other budgets; the narrowest if no budget is one of time.

    Where a wider part may take less time, by another kernel, the counts are those that no change of a single part
    improves: from the narrowest or from the widest counts, whichever search ends at less.
    """
    narrowest = _narrowest(parts)
    if not budgets.non_monotonic:
        return narrowest
    timed = budgets.timed
    others = ~timed if (budgets.left(narrowest) <= budgets.asked)[~timed].all() else np.zeros_like(timed)
    widest = np.array([part.counts[-1] for part in parts])

    def times(counts: Labels) -> Numbers:
        """Return the share (trials,) that is taken of the time asked for; infinite beyond the other budgets."""
        left = budgets.left(counts) / budgets.asked
        return np.where((left[:, others] <= 1).all(axis=1), left[:, timed].max(axis=1), np.inf)

    ends = [_coordinate_descent(parts, start, times) for start in (narrowest, widest)]
    return min(ends, key=lambda counts: float(times(counts[None])[0]))


def _coordinate_descent(parts: list[GroupPart], counts: Labels, times: Callable[[Labels], Numbers]) -> Labels:
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


def _narrowest(parts: list[GroupPart]) -> Labels:
    return np.array([part.counts[0] for part in parts])


def chosen_groups(channel_map: ChannelMap, patterns: Sequence[str]) -> tuple[ChannelGroup, ...]:
    """Return the groups whose names match one of the globs; all of them without globs."""
    names = [group.name for group in channel_map.groups]
    if not names:
        raise nothing_free_error(channel_map)
    wanted = globs(patterns, "groups")
    found = {name for glob in wanted for name in matching(glob, names, "groups", PlanError, "channel group")}
    return tuple(group for group in channel_map.groups if not wanted or group.name in found)

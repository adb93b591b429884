"""The solver: from scores and budgets to a plan, by one of four scopes.

`uniform` keeps the same share of each group, `global` ranks all channels together, `per_mac` ranks them by score per
cost, and `capacity` chooses widths alone. The last two start from several choices of widths and improve the best.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from prunekit.channels.labels.constraints import Removal
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.errors import NonFiniteError, PlanError, UsageError
from prunekit.planning.budgets.budget import Budgets, Countable, budgets_of
from prunekit.planning.budgets.cost_model import GroupPart, Numbers, cost_model
from prunekit.planning.budgets.latency_table import LatencyTable
from prunekit.planning.candidates import UNBOUNDED, PlanBounds, Scores, calls_no_own_module, free_parts
from prunekit.planning.depth_search import all_that_may_go, blocks_of, chosen_blocks, without_blocks
from prunekit.planning.feasibility import fastest, require_met
from prunekit.planning.plan import Plan
from prunekit.planning.width_search import KeptScores, are_few, lagrangian_search, local_search
from prunekit.settings.pruning import PruneSettings, Scope, budget_names
from prunekit.utils.files import json_values

ROUNDS = 3
"""How often scores are divided by costs and spent: what a channel costs depends on its neighbors' widths."""
GRID = 4096
"""Steps of the uniform share."""
TRIED = 129
"""Steps of a ladder that are tried at once where costs may fall as widths grow."""
FEW = 16
"""The most heads, experts or the like of a layer that are counted with those of all layers like it."""
GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio: the fractional parts of its multiples are spread evenly, however many there are."""
STARTS = 2
"""How many of the best starts are improved by local search; all of them if there are few widths."""

Ladder = Callable[[int], Labels]
"""Step -> number of labels kept of each part; never fewer at a higher step."""


def make_plan(
    channel_map: ChannelMap,
    scores: Scores,
    settings: PruneSettings,
    *,
    seed: int = 0,
    latency: LatencyTable | None = None,
    bounds: PlanBounds = UNBOUNDED,
) -> Plan:
    """Choose the labels to keep so that every budget is met and the kept scores are the highest.

    Scores, float (n_labels,), are comparable between groups, except for scope `uniform`. The seed is only noted in the
    plan: the solver draws no random numbers. With bounds, as in a step of a schedule, the plan may remove nothing. Its
    provenance has under `budgets` what of each was asked for and is left, and under `binding` the one that is used up
    the most. A budget that cannot be met is a `PlanError`, which gives the least possible.
    """
    if not settings.budget.given and settings.pattern is None:
        names = ", ".join(budget_names())
        raise UsageError(
            f"budget: expected at least one of {names}, each the most that may be left, or a pattern; got none"
        )
    if np.shape(scores) != (channel_map.n_labels,):
        raise PlanError(f"scores: expected one for each label, shape ({channel_map.n_labels},), got {np.shape(scores)}")
    bad = [group.name for group in channel_map.groups if np.isnan(scores[group.labels]).any()]
    if bad:
        raise NonFiniteError(f"scores: NaN in {', '.join(bad[:5])}; are the weights, or the statistics, finite there?")
    if settings.channels_stay:
        keep = np.ones(channel_map.n_labels, dtype=bool)
        return Plan(channel_map, keep, _origin(settings, seed, {"budgets": {}, "binding": None}))
    parts = free_parts(channel_map, scores, settings, bounds)
    budgets = budgets_of(channel_map, parts, settings, latency)
    blocks = blocks_of(channel_map, parts, scores, settings, bounds) if channel_map.branches.found else []
    least = without_blocks(parts, all_that_may_go(parts, blocks, settings, budgets)) if blocks else parts
    require_met(channel_map, scores, least, budgets, settings, latency)
    if blocks:
        solve = partial(_chosen, channel_map, scores=scores, budgets=budgets, scope=settings.scope)
        counts = chosen_blocks(parts, blocks, KeptScores.of(parts, scores), budgets, settings, solve)
    else:
        counts = _chosen(channel_map, parts, scores, budgets, settings.scope)
    counts = counts if counts is not None else fastest(least, budgets)
    keep = keep_of(channel_map, parts, counts)
    if keep.all() and bounds.most is None:
        raise PlanError(calls_no_own_module(channel_map) or _removes_nothing(budgets, settings))
    return Plan(channel_map, keep, _origin(settings, seed, budgets.found(counts)))


def _origin(settings: PruneSettings, seed: int, budgets: dict[str, Any]) -> Any:
    """Return where a plan comes from, as JSON values."""
    origin = {"prune": settings.noted, "seed": seed, "prunekit": version("prunekit"), "torch": torch.__version__}
    return json_values(origin | budgets)


def feasible_plan(channel_map: ChannelMap, settings: PruneSettings, latency: LatencyTable | None = None) -> Plan:
    """Return a plan from equal scores, to check before any training whether the budgets can be met.

    Budgets of time are predicted by `latency`, the table of the target.
    """
    scope: Scope = "uniform" if settings.scope == "uniform" else "global"  # as wide, and quicker
    return make_plan(channel_map, np.ones(channel_map.n_labels), replace(settings, scope=scope), latency=latency)


def keep_of(channel_map: ChannelMap, parts: list[GroupPart], counts: Labels) -> Keep:
    """Return the labels that are kept with counts (parts,): bool (n_labels,)."""
    keep = np.ones(channel_map.n_labels, dtype=bool)
    for part, count in zip(parts, counts, strict=True):
        keep[part.labels[count:]] = False
    return channel_map.completed(keep)


def halved(channel_map: ChannelMap, settings: PruneSettings) -> Keep:
    """Return labels that prune about half of every group, as far as its counts allow: for a trial of all groups."""
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), settings)
    return keep_of(channel_map, parts, np.array([part.at_most(part.labels.size / 2) for part in parts]))


def _removes_nothing(budgets: Budgets, settings: PruneSettings) -> str:
    asked = ", ".join(
        f"{one.name} {one.as_cost(value):.4g}" for one, value in zip(budgets.facts, budgets.asked, strict=True)
    )
    whole = "".join(
        f" (which has {one.in_words(one.as_cost(dense))})"
        for one, dense in zip(budgets.facts, budgets.dense, strict=True)
        if not one.share
    )
    if none := [one.name for one, dense in zip(budgets.facts, budgets.dense, strict=True) if not dense]:
        return (
            f"the plan removes nothing: the model has no {none[0]}, as one of embeddings alone; "
            "give another budget, such as params=0.5"
        )
    return (
        f"the plan removes nothing: budget {asked} leaves the whole model{whole}, or "
        f"round_to {settings.round_to or 'by width'} and min_channels {settings.min_channels} allow no smaller width"
    )


def _chosen(
    channel_map: ChannelMap, parts: list[GroupPart], scores: Scores, budgets: Budgets, scope: Scope
) -> Labels | None:
    """Return counts within the budgets by a scope, else the fastest counts; None if these exceed the budgets too."""
    if scope == "uniform":
        found = [_uniform(channel_map, parts, budgets)]
    elif scope == "global":
        found = [_global(parts, budgets, [scores[part.labels] for part in parts])]
    elif scope == "per_mac":
        found = _most_worth(channel_map, parts, scores, budgets)
    else:
        found = _most_worth(channel_map, parts, worth_of_widths(channel_map, parts), budgets)
    fitting = [counts for counts in [*found, fastest(parts, budgets)] if budgets.fits(counts)]
    return fitting[0] if fitting else None


def _most_worth(channel_map: ChannelMap, parts: list[GroupPart], scores: Scores, budgets: Budgets) -> list[Labels]:
    """Return counts within the budgets from several starts, those with the highest sum of kept scores first."""
    worth = KeptScores.of(parts, scores)
    found = [*by_score_per_cost(parts, scores, budgets, partial(_global, parts, budgets))]
    found += lagrangian_search(parts, worth, budgets)
    found += [_uniform(channel_map, parts, budgets), fastest(parts, budgets)]
    distinct = {tuple(counts.tolist()): counts for counts in found if budgets.fits(counts)}.values()
    starts = sorted(distinct, key=worth, reverse=True)[: None if are_few(parts) else STARTS]
    return sorted((local_search(parts, worth, budgets, counts) for counts in starts), key=worth, reverse=True)


def by_score_per_cost(
    parts: list[GroupPart], scores: Scores, budgets: Budgets, spend: Callable[[list[Scores]], Labels]
) -> list[Labels]:
    """Return the counts that rank labels by score per cost, once for each budget, which costs are counted in.

    If scores are increments of a group's error, and do not fall in the order of removal, removing the lowest first is
    the greedy and the Lagrangian solution (Everett 1963; as in optimal bit allocation, Shoham & Gersho 1988). Costs
    are linearized around the last plan, because neighbors' widths multiply.
    """
    sizes, found = np.array([part.labels.size for part in parts]), []
    for index in range(len(budgets.names)):
        counts = sizes
        for _ in range(ROUNDS):
            prices = np.maximum(costs_of_parts(parts, budgets.left, counts)[:, index] / sizes, 1e-12)  # of a label
            counts = spend([scores[part.labels] / price for part, price in zip(parts, prices, strict=True)])
        found.append(counts)
    return found


def costs_of_parts(parts: list[GroupPart], cost: Callable[[Labels], Numbers], counts: Labels) -> Numbers:
    """Return what each whole part costs, given counts (parts,) of the others: (parts, resources).

    `cost` maps counts (trials, parts) to costs (trials, resources).
    """
    whole, none = (np.repeat(counts[None], len(parts), axis=0) for _ in range(2))
    np.fill_diagonal(whole, [part.labels.size for part in parts])
    np.fill_diagonal(none, 0)
    return cost(whole) - cost(none)


def worth_of_widths(channel_map: ChannelMap, parts: list[GroupPart]) -> Scores:
    """Return scores (n_labels,) whose sum is a logarithm of each part's width, weighted by the MACs it takes part in.

    A layer's MACs are its inputs times its outputs, and the logarithm of a product is a sum. So the sum of kept scores
    is the mean over layers, weighted by MACs, of the logarithm of the share that each keeps of them. Halving any width
    costs the same, so no group is given up for another.
    """
    model = cost_model(channel_map, parts, [Countable(channel_map, parts).terms("macs")])
    whole = np.array([part.labels.size for part in parts])
    weights = costs_of_parts(parts, model, whole)[:, 0] / channel_map.macs()
    scores = np.zeros(channel_map.n_labels)
    for part, weight in zip(parts, weights, strict=True):
        scores[part.labels] = weight * np.log1p(1 / np.arange(1, part.labels.size + 1))
    return scores


@dataclass(frozen=True, eq=False)
class _Pool:
    """Parts that keep a share together, as the heads of all layers do."""

    parts: list[int]  # their indices
    counts: Labels  # (choices, parts) from the least to all; none falls from one choice to the next
    shares: Numbers  # (choices,) of all that they have

    def at(self, share: float, at_most: bool) -> int:
        """Return the choice whose share is the nearest to one, or the largest of at most it, if there is one."""
        ends = self.shares[1:] if at_most else (self.shares[1:] + self.shares[:-1]) / 2 + 2e-9
        return int(np.searchsorted(ends, share + 1e-9, side="right"))


def _uniform(channel_map: ChannelMap, parts: list[GroupPart], budgets: Budgets) -> Labels:
    """Return counts that keep the same share of every part, as near as its steps allow.

    Heads of keys with their query heads are one share, and positions in heads another: both are factors of products
    between tokens, of which else half would be left at half of the channels. Heads are few, so that those of all layers
    keep it together. What is left of the budget goes where the next step keeps the least; a budget of each group is the
    most that any keeps.
    """
    each = any(one.each_group for one in budgets.facts)
    pools = [_pool([[index]], parts) for index in range(len(parts))] if each else _pools(channel_map, parts)

    def counts_of(choices: list[int]) -> Labels:
        counts = np.zeros(len(parts), dtype=np.int64)
        for pool, choice in zip(pools, choices, strict=True):
            counts[pool.parts] = pool.counts[choice]
        return counts

    # no count grows as the share falls, so that a trial at the least share has seen all that a larger one prunes
    def choices_at(step: int) -> list[int]:
        return [pool.at(step / GRID, each) for pool in pools]

    choices = choices_at(_highest(lambda step: counts_of(choices_at(step)), GRID, budgets))
    waiting = {*range(len(pools))}
    while waiting := {index for index in waiting if choices[index] + 1 < pools[index].shares.size}:
        index = min(waiting, key=lambda one: (pools[one].shares[choices[one] + 1], one))
        choices[index] += 1
        if not budgets.fits(counts_of(choices)):
            choices[index] -= 1
            waiting.remove(index)
    return counts_of(choices)


def _pools(channel_map: ChannelMap, parts: list[GroupPart]) -> list[_Pool]:
    """Return the parts by what keeps a share together: few labels of many channels, as heads, in layers that repeat."""
    owner = np.full(channel_map.n_labels, -1)
    for index, part in enumerate(parts):
        owner[part.labels] = index
    pairs = np.unique(owner[channel_map.joint[:, [1, 3]]], axis=0)
    queries = {int(heads): int(own) for heads, own in pairs if heads >= 0 and own >= 0}
    together: dict[Hashable, list[list[int]]] = {}
    for index in sorted(set(range(len(parts))) - {*queries.values()}):
        family = [index, queries[index]] if index in queries else [index]
        groups = [channel_map.groups[channel_map.group_of[parts[one].labels[0]]] for one in family]
        few = all(parts[one].labels.size // parts[one].together <= FEW for one in family)
        coarse = few and parts[index].channels > 1 and channel_map.kind_of(groups[0]) != Removal.POSITIONS
        free = any(parts[one].counts.size > 1 for one in family)  # others are given, or those of a block that goes
        key = frozenset(map(channel_map.family_of, groups)) if coarse and free else index
        together.setdefault(key, []).append(family)
    return [_pool(families, parts) for families in together.values()]


def _pool(families: list[list[int]], parts: list[GroupPart]) -> _Pool:
    """Return the pool of families, each of a layer: what rounding takes first goes first, in layers far apart."""
    indices = [index for family in families for index in family]
    own = [parts[index] for index in indices]
    now = [int(part.counts[-1]) for part in own]
    rows, places = [now], [(place, number) for number, family in enumerate(families) for place in range(len(family))]
    steps = (
        (-(before + after) / part.labels.size, place, (number + 1) * GOLDEN % 1, column, after)
        for column, (part, (place, number)) in enumerate(zip(own, places, strict=True))
        for before, after in pairwise(part.counts[::-1].tolist())
    )
    for *_, column, count in sorted(steps):
        now = [*now[:column], count, *now[column + 1 :]]
        rows.append(now)
    rows.append([part.labels.size if part.counts.size > 1 else int(part.counts[-1]) for part in own])
    starts = [0, *np.cumsum([len(family) for family in families])[:-1]]
    kept = np.multiply.reduceat(np.array(rows), starts, axis=1).sum(axis=1)
    return _Pool(indices, np.array(rows[-2::-1]), kept[-2::-1] / max(kept[-1], 1))


def _global(parts: list[GroupPart], budgets: Budgets, ranks: list[Scores]) -> Labels:
    """Return counts that keep the highest ranks of all parts together."""
    owner = np.concatenate([np.full(part.labels.size, index) for index, part in enumerate(parts)])
    ranked = owner[np.argsort(-np.concatenate(ranks), kind="stable")]

    def ladder(step: int) -> Labels:
        wanted = np.bincount(ranked[:step], minlength=len(parts))
        return np.array([part.at_most(count) for part, count in zip(parts, wanted, strict=True)])

    return _fill(parts, ladder(_highest(ladder, int(ranked.size), budgets)), budgets.fits)


def _highest(ladder: Ladder, top: int, budgets: Budgets) -> int:
    """Return the highest step of a ladder that fits; 0 if none does."""
    low, high = 0, top
    if budgets.non_monotonic:
        # costs may fall as widths grow, so that a step that fits may lie above one that does not
        tried = np.unique(np.linspace(0, top, TRIED).round().astype(np.int64))
        fits = np.flatnonzero(budgets.fits(np.stack([ladder(int(step)) for step in tried])))
        at = int(fits[-1]) if fits.size else 0
        low, high = int(tried[at]), int(tried[min(at + 1, tried.size - 1)])
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if budgets.fits(ladder(middle)) else (low, middle - 1)
    return low


def _fill(parts: list[GroupPart], counts: Labels, fits: Callable[[Labels], bool]) -> Labels:
    """Spend what rounding left over: one more step for each part if it fits, the most pruned part first."""
    share = [count / part.labels.size for part, count in zip(parts, counts, strict=True)]
    for index in np.argsort(share, kind="stable"):
        part = parts[index]
        if counts[index] < part.counts[-1]:
            candidate = counts.copy()
            candidate[index] = part.counts[np.searchsorted(part.counts, counts[index] + 1)]
            if fits(candidate):
                counts = candidate
    return counts

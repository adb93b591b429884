"""The solver: from scores and budgets to a plan, by one of four scopes.

`uniform` keeps the same share of each group, `global` ranks all channels together, `per_mac` ranks them by score per
cost, and `capacity` chooses widths alone. The last two start from several choices of widths and improve the best.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

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
        found = [_highest(parts, *_uniform(channel_map, parts), budgets)]
    elif scope == "global":
        found = [_highest(parts, *_global(parts, [scores[part.labels] for part in parts]), budgets)]
    elif scope == "per_mac":
        found = _most_worth(channel_map, parts, scores, budgets)
    else:
        found = _most_worth(channel_map, parts, worth_of_widths(channel_map, parts), budgets)
    fitting = [counts for counts in [*found, fastest(parts, budgets)] if budgets.fits(counts)]
    return fitting[0] if fitting else None


def _most_worth(channel_map: ChannelMap, parts: list[GroupPart], scores: Scores, budgets: Budgets) -> list[Labels]:
    """Return counts within the budgets from several starts, those with the highest sum of kept scores first."""
    worth = KeptScores.of(parts, scores)
    found = [*by_score_per_cost(parts, scores, budgets, lambda ranks: _highest(parts, *_global(parts, ranks), budgets))]
    found += lagrangian_search(parts, worth, budgets)
    found += [_highest(parts, *_uniform(channel_map, parts), budgets), fastest(parts, budgets)]
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


def _uniform(channel_map: ChannelMap, parts: list[GroupPart]) -> tuple[Ladder, int]:
    """Return a ladder that keeps the same share of every part, and so of heads and of positions in them."""
    # products between tokens have the width of attention, heads times positions, as a factor once: if all positions
    # were kept, half of these MACs would be left at half of the channels: 33.5 % in test_vit, pit_ti_224, halonet_h1
    families = _nested(channel_map, parts) if channel_map.joint.size else []
    chains = [_chain([parts[index] for index in family]) for family in families]
    products = [np.prod(chain, axis=1) for chain in chains]

    # no count grows as the share falls, so that a trial at the least share has seen all that a larger one prunes
    def ladder(step: int) -> Labels:
        share = step / GRID
        counts = np.array([part.at_most(part.labels.size * share) for part in parts])
        # the product nearest to the share, as heads are few: of 3 with 3 queries each, two thirds are 2 times 3, not 2
        for family, chain, product in zip(families, chains, products, strict=True):
            counts[family] = chain[int(np.argmin(np.abs(product - product[0] * share ** len(family))))]
        return counts

    return ladder, GRID


def _chain(family: list[GroupPart]) -> Labels:
    """Return counts of parts (steps, parts), from all to the least; each step takes from what rounding takes first."""
    at = [part.counts.size - 1 for part in family]
    found = [[int(part.counts[-1]) for part in family]]
    while any(at):
        middles = [
            (part.counts[index] + part.counts[index - 1]) / (2 * part.labels.size) if index else -1.0
            for part, index in zip(family, at, strict=True)
        ]
        at[int(np.argmax(middles))] -= 1
        found.append([int(part.counts[index]) for part, index in zip(family, at, strict=True)])
    return np.array(found)


def _nested(channel_map: ChannelMap, parts: list[GroupPart]) -> list[list[int]]:
    """Return the parts whose product is the width of an attention: heads, their query heads, and positions in them."""
    owner = np.full(channel_map.n_labels, -1)
    for index, part in enumerate(parts):
        owner[part.labels] = index
    _, heads, positions, queries = channel_map.joint.T
    taken: set[int] = set()
    families = []
    for family in np.unique(owner[np.stack([heads, queries, positions], 1)], axis=0):
        free = [int(index) for index in dict.fromkeys(family) if index >= 0 and index not in taken]
        taken |= {*free}
        families += [free] if free else []
    return families


def _global(parts: list[GroupPart], ranks: list[Scores]) -> tuple[Ladder, int]:
    """Return a ladder that keeps the highest ranks of all parts together."""
    owner = np.concatenate([np.full(part.labels.size, index) for index, part in enumerate(parts)])
    ranked = owner[np.argsort(-np.concatenate(ranks), kind="stable")]

    def ladder(step: int) -> Labels:
        wanted = np.bincount(ranked[:step], minlength=len(parts))
        return np.array([part.at_most(count) for part, count in zip(parts, wanted, strict=True)])

    return ladder, int(ranked.size)


def _highest(parts: list[GroupPart], ladder: Ladder, top: int, budgets: Budgets) -> Labels:
    """Return the highest step of a ladder that fits, and then more of single parts as far as that fits."""
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
    return _fill(parts, ladder(low), budgets.fits)


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

"""Importance for what a channel costs, in whatever the budgets count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prunekit.channels.labels import Labels
from prunekit.planning.budgets.limits import Budgets
from prunekit.planning.select import Part, Scores
from prunekit.planning.terms import Numbers

ROUNDS = 3
"""How often a budget is spent per price: what a channel costs depends on its neighbors' widths in the plan before."""


def priced(
    parts: list[Part], scores: Scores, budgets: Budgets, spend: Callable[[list[Scores]], Labels]
) -> list[Labels]:
    """Counts by score over price, once for each budget, in whose units the price is.

    Where the scores are what a group's error rises by, and never fall along the order in which its labels go, removing
    the lowest first is the greedy and the Lagrangian solution (Everett 1963; as in optimal bit allocation, Shoham &
    Gersho 1988). Costs are linear around a plan: neighbors' widths multiply.

    Args:
        scores: (n_labels,) comparable between groups.
        spend: a number for each label of every part -> counts within all budgets that keep the highest.
    """
    return [_in_units_of(index, parts, scores, budgets, spend) for index in range(len(budgets.names))]


def _in_units_of(
    index: int, parts: list[Part], scores: Scores, budgets: Budgets, spend: Callable[[list[Scores]], Labels]
) -> Labels:
    counts = np.array([part.labels.size for part in parts])
    for _ in range(ROUNDS):
        prices = _prices(parts, budgets, counts)[:, index]
        counts = spend([scores[part.labels] / price for part, price in zip(parts, prices, strict=True)])
    return counts


def _prices(parts: list[Part], budgets: Budgets, counts: Labels) -> Scores:
    """What a label costs, on average over those of its part: (parts, budgets)."""
    sizes = np.array([part.labels.size for part in parts])
    prices: Scores = costs_of_parts(parts, budgets.left, counts) / sizes[:, None]
    return np.maximum(prices, 1e-12)


def costs_of_parts(parts: list[Part], cost: Callable[[Labels], Numbers], counts: Labels) -> Numbers:
    """What each part costs as a whole beside counts (parts,) of the others: (parts, resources).

    Args:
        cost: of counts (trials, parts): (trials, resources).
    """
    whole, none = (np.repeat(counts[None], len(parts), axis=0) for _ in range(2))
    np.fill_diagonal(whole, [part.labels.size for part in parts])
    np.fill_diagonal(none, 0)
    return cost(whole) - cost(none)

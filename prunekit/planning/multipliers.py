"""Widths by Lagrange multipliers: the most kept scores less a price for what they cost, where that meets a budget."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prunekit.channels.labels import Labels
from prunekit.planning.budgets.limits import Budgets
from prunekit.planning.exchange import Worth
from prunekit.planning.select import Part
from prunekit.planning.terms import Numbers

SWEEPS = 3
"""Over all parts, at one price: what a part costs depends on its neighbors' widths."""
BISECTIONS = 16
REWEIGHTS = 6
"""Of the limits of a budget that is several: prices are made anew so often."""
RATE = 8.0
CHEAPEST, DEAREST = -30.0, 10.0
"""Logarithms of the price of one whole budget, in units of all scores."""
MOST = 64
"""Counts of a part that are priced one by one where costs go in steps or turn."""
BLENDS, FEWER = {2: (0.25, 0.5, 0.75)}, (0.5,)
"""By the number of budgets: shares of one of two in a price, beside each budget alone; and where they are more."""


def by_multipliers(parts: list[Part], worth: Worth, budgets: Budgets) -> Iterator[Labels]:
    """The counts that keep the most, of those within the budgets that were found, for each blend of them.

    Args:
        worth: concave in each part's count: the labels of a part go by their scores.
    """
    several = np.bincount(budgets.owner, minlength=budgets.asked.size)
    for weights in _blends(budgets.asked.size):
        shares = 1 / several[budgets.owner]
        for _ in range(REWEIGHTS if (several[weights > 0] > 1).any() else 1):
            best = _along(parts, worth, budgets, weights[budgets.owner] * shares / budgets.limits)
            if best is None:
                break
            yield best
            shares = _reweighted(shares, budgets, best)


def _along(parts: list[Part], worth: Worth, budgets: Budgets, direction: Numbers) -> Labels | None:
    """Of counts at prices in one direction those that keep the most within the budgets; None where none are."""
    low, high = CHEAPEST, DEAREST
    counts = np.array([part.counts[-1] for part in parts])
    best: Labels | None = None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        counts = _at_price(parts, worth, budgets, worth.total * np.exp(middle) * direction, counts)
        if budgets.fits(counts):
            best = counts if best is None or worth(counts) > worth(best) else best
            high = middle
        else:
            low = middle
    return best


def _reweighted(shares: Numbers, budgets: Budgets, counts: Labels) -> Numbers:
    """Shares of the limits of each budget in its price: what is far below its limit is made cheaper than the rest.

    By multiplicative weights (Plotkin, Shmoys and Tardos 1995), as of several limits only some bind.
    """
    grown = shares * np.exp(RATE * (budgets.limited(counts) / budgets.limits - 1))
    result: Numbers = grown / np.bincount(budgets.owner, grown)[budgets.owner]
    return result


def _blends(budgets: int) -> Iterator[Numbers]:
    single = np.eye(budgets)
    yield from single
    for one in range(budgets):
        for other in range(one):
            shares = BLENDS.get(budgets, FEWER)
            yield from (share * single[one] + (1 - share) * single[other] for share in shares)


def _at_price(parts: list[Part], worth: Worth, budgets: Budgets, price: Numbers, counts: Labels) -> Labels:
    """Counts from which no part alone does better at a price, as far as sweeps get."""
    counts = counts.copy()
    for _ in range(SWEEPS):
        before = counts.copy()
        for index, part in enumerate(parts):
            if part.counts.size > 1:
                wanted = part.counts if budgets.smooth else _spread(part, budgets.turns[index])
                cost = _cost_at(wanted, index, counts, budgets, price)
                counts[index] = wanted[int(np.argmax(worth.kept[index][wanted] - cost))]
        if np.array_equal(before, counts):
            break
    return counts


def _spread(part: Part, turns: tuple[int, ...]) -> Labels:
    """At most `MOST` of the counts, the last among them, in equal steps from it, and both sides of each turn."""
    every = -(-part.counts.size // MOST)
    also = np.searchsorted(part.counts, turns)
    also = np.clip(np.concatenate([also, also - 1]), 0, part.counts.size - 1)
    return np.union1d(part.counts[::-1][::every], part.counts[also])


def _cost_at(wanted: Labels, index: int, counts: Labels, budgets: Budgets, price: Numbers) -> Numbers:
    """What each count of one part costs at a price: a parabola where costs are smooth, as a width meets itself once."""
    points = wanted if wanted.size < 3 or not budgets.smooth else wanted[[0, wanted.size // 2, -1]]
    trials = np.repeat(counts[None], points.size, axis=0)
    trials[:, index] = points
    cost: Numbers = budgets.limited(trials) @ price
    return cost if points.size == wanted.size else _parabola(points, cost, wanted)


def _parabola(points: Labels, values: Numbers, at: Labels) -> Numbers:
    """Through three points, by Newton's divided differences."""
    (a, b, c), (u, v, w) = points.astype(float), values
    first, second = (v - u) / (b - a), (w - v) / (c - b)
    result: Numbers = u + (at - a) * (first + (at - b) * (second - first) / (c - a))
    return result

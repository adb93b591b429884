"""Widths by Lagrange multipliers: the most kept scores less a price for what they cost, where that meets a budget.

Local search over widths: steps of a few groups at a time, taken while they keep more within the budgets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels import Labels
from prunekit.planning.budgets.limits import Budgets
from prunekit.planning.candidates import GroupPart, Scores
from prunekit.planning.costs import Numbers

STEPS = (-16, -8, -4, -3, -2, -1, 1, 2, 3, 4, 8, 16)
"""By how many of its allowed counts a part is tried narrower and wider, where all of all parts are more than `FEW`."""
FEW = 128
EXHAUSTIVE = 20_000
"""Combinations of steps of several parts that are all priced exactly; where there are more, the best by estimate."""
SHORTLIST = 256
MARGIN = 0.02
"""Of a budget: what neighbors' widths, which multiply, may save beyond the sum of two steps' own costs."""
ROUNDS = 2000
EPSILON = 1e-12
"""Of all scores: a smaller gain is rounding."""


@dataclass(frozen=True, eq=False)
class KeptScores:
    """What counts keep: the sum of the scores.

    Attributes:
        kept: for each part (size + 1,) the sum of its first so many scores.
        total: the sum of all scores, without their signs.
    """

    kept: tuple[Numbers, ...]
    total: float

    @classmethod
    def of(cls, parts: list[GroupPart], scores: Scores) -> KeptScores:
        """Of parts; a label with an infinite score is worth more than all others together."""
        own = [scores[part.labels] for part in parts]
        finite = np.concatenate(own)
        most = float(np.abs(finite[np.isfinite(finite)]).sum()) + 1.0
        bounded = [np.nan_to_num(values, posinf=most, neginf=-most) for values in own]
        kept = tuple(np.concatenate([[0.0], np.cumsum(values)]) for values in bounded)
        return cls(kept, float(sum(np.abs(values).sum() for values in bounded)))

    def __call__(self, counts: Labels) -> float:
        """Return the sum of what counts (parts,) keep."""
        return float(sum(values[count] for values, count in zip(self.kept, counts, strict=True)))


@dataclass(frozen=True, eq=False)
class _CountChanges:
    """Changes of one part each.

    Attributes:
        part: (steps,) which.
        change: (steps,) of its count.
        gain: (steps,) in worth.
        cost: (steps, limits) if it were the only one.
    """

    part: Labels
    change: Labels
    gain: Numbers
    cost: Numbers


def local_search(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, counts: Labels) -> Labels:
    """Return counts from which no step of one part, and no two at a time, keep more within the budgets.

    Where there are few enough, three and four at a time too. The best of each round is taken, the first of equals.

    Args:
        counts: within the budgets.
    """
    for _ in range(ROUNDS):
        steps = _steps(parts, worth, budgets, counts)
        better = next((found for found in _neighbors(steps, budgets, counts, worth.total)), None)
        if better is None:
            break
        counts = better
    return counts


def are_few(parts: list[GroupPart]) -> bool:
    """Return whether there are so few widths to choose from that more can be tried of them."""
    return sum(part.counts.size for part in parts) <= FEW


def _steps(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, counts: Labels) -> _CountChanges:
    rows: list[tuple[int, int]] = []
    few = are_few(parts)
    for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
        at = int(np.searchsorted(part.counts, count))
        last = part.counts.size - 1
        reached = set(range(last + 1)) if few else {min(max(at + step, 0), last) for step in STEPS}
        reached |= set() if few else set(_edges(part, int(count), budgets.steps, budgets.turns[index]))
        rows += [(index, int(part.counts[other] - count)) for other in sorted(reached - {at})]
    owner, change = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    trials = np.repeat(counts[None], len(rows), axis=0)
    trials[np.arange(len(rows)), owner] += change
    now = [values[count] for values, count in zip(worth.kept, counts, strict=True)]
    gain = np.array([worth.kept[index][counts[index] + by] - now[index] for index, by in rows])
    return _CountChanges(owner, change, gain, budgets.limited(trials) - budgets.limited(counts))


def _edges(part: GroupPart, count: int, steps: tuple[int, ...], turns: tuple[int, ...]) -> Iterator[int]:
    """Yield where in a part's counts the next ones below and above lie that fill a step of its own width; and all
    turns.
    """
    last = part.counts.size - 1
    for step in steps:
        for filled in ((count - 1) // step * step, (count // step + 1) * step):
            yield int(np.clip(np.searchsorted(part.counts, filled, side="right") - 1, 0, last))
    for turn in turns:
        at = int(np.searchsorted(part.counts, turn))
        yield from (min(at, last), max(at - 1, 0))


def _neighbors(steps: _CountChanges, budgets: Budgets, counts: Labels, total: float) -> Iterator[Labels]:
    """The best counts by one step; else by two at a time; else by three or four."""
    yield from _best_of(_several(steps, 1), steps, budgets, counts, total)
    slack = budgets.limits - budgets.limited(counts)
    yield from _best_of(_pairs(steps, slack, budgets.limits, total), steps, budgets, counts, total)
    for size in (3, 4):
        yield from _best_of(_several(steps, size), steps, budgets, counts, total)


def _best_of(group: Labels, steps: _CountChanges, budgets: Budgets, counts: Labels, total: float) -> Iterator[Labels]:
    """The counts by the best steps of a group of them that fit, where one keeps more."""
    if len(group):
        gain = steps.gain[group].sum(axis=1)
        order = np.argsort(-gain, kind="stable")
        group = group[order[gain[order] > EPSILON * total]]
        trials = np.repeat(counts[None], len(group), axis=0)
        for column in group.T:
            trials[np.arange(len(group)), steps.part[column]] += steps.change[column]
        trials = trials[budgets.fits(trials)]
        if len(trials):
            yield _together(trials, counts, budgets)


def _together(trials: Labels, counts: Labels, budgets: Budgets) -> Labels:
    """The first of some changed counts, and of the others what changes other parts and still fits."""
    found: Labels = trials[0]
    for trial in trials[1:SHORTLIST]:
        moved = trial != counts
        if not (moved & (found != counts)).any():
            both = np.where(moved, trial, found)
            found = both if budgets.fits(both) else found
    return found


def _pairs(steps: _CountChanges, slack: Numbers, limits: Numbers, total: float) -> Labels:
    """Return one part wider and another narrower that together keep more: all, or the best of those that should fit."""
    wider, narrower = np.flatnonzero(steps.change > 0), np.flatnonzero(steps.change < 0)
    first, second = np.repeat(wider, narrower.size), np.tile(narrower, wider.size)
    gain = steps.gain[first] + steps.gain[second]
    wanted = (gain > EPSILON * total) & (steps.part[first] != steps.part[second])
    first, second, gain = first[wanted], second[wanted], gain[wanted]
    if first.size > EXHAUSTIVE:
        over = np.full(first.size, -np.inf)
        for index in np.flatnonzero(steps.cost.max(axis=0) > slack):  # the others stay within their limits
            cost = steps.cost[first, index] + steps.cost[second, index]
            np.maximum(over, (cost - slack[index]) / limits[index], out=over)
        chosen = np.concatenate([_best(gain, over <= most) for most in (0.0, MARGIN)])
        first, second = first[chosen], second[chosen]
    return np.stack([first, second], axis=1)


def _best(gain: Numbers, allowed: NDArray[np.bool_]) -> Labels:
    where = np.flatnonzero(allowed)
    if where.size > SHORTLIST:
        where = np.sort(where[np.argpartition(-gain[where], SHORTLIST)[:SHORTLIST]])
    best: Labels = where[np.argsort(-gain[where], kind="stable")[:SHORTLIST]]
    return best


def _several(steps: _CountChanges, number: int) -> Labels:
    """Return the steps of so many different parts, where there are few enough combinations."""
    own = [np.flatnonzero(steps.part == part) for part in np.unique(steps.part)]
    combined = np.poly([-each.size for each in own])  # elementary symmetric polynomials of the sizes
    if number > len(own) or combined[number] > EXHAUSTIVE:
        return np.zeros((0, number), dtype=np.int64)
    found = [row for some in combinations(own, number) for row in product(*some)]
    return np.array(found, dtype=np.int64)


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


def lagrangian_search(parts: list[GroupPart], worth: KeptScores, budgets: Budgets) -> Iterator[Labels]:
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


def _along(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, direction: Numbers) -> Labels | None:
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
    """Return the shares of the limits of each budget in its price: what is far below its limit is made cheaper than the
    rest.

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


def _at_price(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, price: Numbers, counts: Labels) -> Labels:
    """Return counts from which no part alone does better at a price, as far as sweeps get."""
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


def _spread(part: GroupPart, turns: tuple[int, ...]) -> Labels:
    """At most `MOST` of the counts, the last among them, in equal steps from it, and both sides of each turn."""
    every = -(-part.counts.size // MOST)
    also = np.searchsorted(part.counts, turns)
    also = np.clip(np.concatenate([also, also - 1]), 0, part.counts.size - 1)
    return np.union1d(part.counts[::-1][::every], part.counts[also])


def _cost_at(wanted: Labels, index: int, counts: Labels, budgets: Budgets, price: Numbers) -> Numbers:
    """Return what each count of one part costs at a price: a parabola where costs are smooth, as a width meets
    itself once.
    """
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

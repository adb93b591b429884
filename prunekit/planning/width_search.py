"""Search for the widths that keep the highest sum of scores within budgets.

For parts i with counts k_i out of their allowed ones,

    maximize   sum_i kept_i(k_i)         kept_i(k): the sum of the k highest scores of the part
    such that  cost_j(k) <= limit_j      each cost a sum of products of widths, for every limit j of every budget

`lagrangian_search` finds where to start (Everett 1963): at prices p_j it maximizes sum_i kept_i(k_i) - sum_j p_j
cost_j(k), one part after the other, and bisects the logarithm of the price until the budget is just met:

    price   e^-30 ───────────────┬─────────────── e^10
            all is kept, too dear │ fits, less is kept than at the boundary

`local_search` then changes one to four parts at a time as long as that keeps more: no price leads to choices that lie
inside the convex hull of all, but a pair of changes, one part wider and one narrower, does.

1. What either search returns fits every limit: `budgets.fits` is asked for every choice, estimates only order them.
2. Local search never keeps less than its start, and takes the best change of each round, the first of equals: the
   same scores give the same plan.
3. kept_i is concave, since labels are removed by their scores; costs need not be convex, and may have steps, or fall
   as widths grow. Then counts on both sides of every step are among those that are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels.label_union import Labels
from prunekit.planning.budgets.budget import Budgets
from prunekit.planning.budgets.cost_model import GroupPart, Numbers
from prunekit.planning.candidates import Scores

STEPS = (-16, -8, -4, -3, -2, -1, 1, 2, 3, 4, 8, 16)
"""Changes of a part that local search tries, in numbers of allowed counts, if all counts are more than `FEW`."""
FEW = 128
EXHAUSTIVE = 20_000
"""The most combinations of changes of several parts that are all priced exactly."""
SHORTLIST = 256
"""How many combinations are priced exactly where there are more: the best by estimate."""
MARGIN = 0.02
"""Share of a budget by which an estimate may exceed it, as widths of neighbors multiply."""
ROUNDS = 2000
EPSILON = 1e-12
"""Gains below this share of all scores are rounding errors."""
SWEEPS = 3
"""Passes over all parts at one price: what a part costs depends on its neighbors' widths."""
BISECTIONS = 16
REWEIGHTS = 6
"""How often prices are recomputed for a budget with several limits."""
RATE = 8.0
CHEAPEST, DEAREST = -30.0, 10.0
"""Logarithms of the lowest and the highest price of one whole budget, in units of the sum of all scores."""
MOST = 64
"""The most counts of a part that are priced one by one, where costs have steps or breakpoints."""
BLENDS, FEWER = {2: (0.25, 0.5, 0.75)}, (0.5,)
"""Shares of one of two budgets in a price, by the number of budgets; the second is for other numbers."""


@dataclass(frozen=True, eq=False)
class KeptScores:
    """The sum of the scores that counts keep."""

    kept: tuple[Numbers, ...]  # for each part the sums of its first scores, (size + 1,)
    total: float  # the sum of the absolute values of all scores

    @classmethod
    def of(cls, parts: list[GroupPart], scores: Scores) -> KeptScores:
        """Return the sums for parts; an infinite score counts as more than all others together."""
        own = [scores[part.labels] for part in parts]
        finite = np.concatenate(own)
        most = float(np.abs(finite[np.isfinite(finite)]).sum()) + 1.0
        bounded = [np.nan_to_num(values, posinf=most, neginf=-most) for values in own]
        kept = tuple(np.concatenate([[0.0], np.cumsum(values)]) for values in bounded)
        return cls(kept, float(sum(np.abs(values).sum() for values in bounded)))

    def __call__(self, counts: Labels) -> float:
        """Return the sum of the scores that counts (parts,) keep."""
        return float(sum(values[count] for values, count in zip(self.kept, counts, strict=True)))


@dataclass(frozen=True, eq=False)
class _CountChanges:
    """Changes of counts, each of one part."""

    part: Labels  # (changes,) index of the part
    change: Labels  # (changes,) of its count
    gain: Numbers  # (changes,) in kept scores
    cost: Numbers  # (changes, limits) of this change alone


def local_search(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, counts: Labels) -> Labels:
    """Return counts that keep more within the budgets, until no change of one part, or of two together, does.

    Changes of three and four parts are tried too if there are few enough. Each round takes the best change, the first
    of equals.
    """
    for _ in range(ROUNDS):
        steps = _steps(parts, worth, budgets, counts)
        better = next((found for found in _neighbors(steps, budgets, counts, worth.total)), None)
        if better is None:
            break
        counts = better
    return counts


def are_few(parts: list[GroupPart]) -> bool:
    """Return whether there are so few widths to choose from that all can be tried."""
    return sum(part.counts.size for part in parts) <= FEW


def _steps(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, counts: Labels) -> _CountChanges:
    rows: list[tuple[int, int]] = []
    few = are_few(parts)
    for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
        at = int(np.searchsorted(part.counts, count))
        last = part.counts.size - 1
        reached = set(range(last + 1)) if few else {min(max(at + step, 0), last) for step in STEPS}
        reached |= set() if few else set(_edges(part, int(count), budgets.steps, budgets.breakpoints[index]))
        rows += [(index, int(part.counts[other] - count)) for other in sorted(reached - {at})]
    owner, change = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    trials = np.repeat(counts[None], len(rows), axis=0)
    trials[np.arange(len(rows)), owner] += change
    now = [values[count] for values, count in zip(worth.kept, counts, strict=True)]
    gain = np.array([worth.kept[index][counts[index] + by] - now[index] for index, by in rows])
    return _CountChanges(owner, change, gain, budgets.limited(trials) - budgets.limited(counts))


def _edges(part: GroupPart, count: int, steps: tuple[int, ...], breakpoints: tuple[int, ...]) -> Iterator[int]:
    """Yield the indices of counts that fill a step, the next ones below and above, and of those around breakpoints."""
    last = part.counts.size - 1
    for step in steps:
        for filled in ((count - 1) // step * step, (count // step + 1) * step):
            yield int(np.clip(np.searchsorted(part.counts, filled, side="right") - 1, 0, last))
    for breakpoint in breakpoints:
        at = int(np.searchsorted(part.counts, breakpoint))
        yield from (min(at, last), max(at - 1, 0))


def _neighbors(steps: _CountChanges, budgets: Budgets, counts: Labels, total: float) -> Iterator[Labels]:
    """Yield the best counts by one change, then by two together, then by three and four."""
    yield from _best_of(_several(steps, 1), steps, budgets, counts, total)
    slack = budgets.limits - budgets.limited(counts)
    yield from _best_of(_pairs(steps, slack, budgets.limits, total), steps, budgets, counts, total)
    for size in (3, 4):
        yield from _best_of(_several(steps, size), steps, budgets, counts, total)


def _best_of(group: Labels, steps: _CountChanges, budgets: Budgets, counts: Labels, total: float) -> Iterator[Labels]:
    """Yield the counts after the best combination of changes that fits; none if no combination keeps more."""
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
    """Return the first of several changed counts, merged with others that change other parts as far as that fits."""
    found: Labels = trials[0]
    for trial in trials[1:SHORTLIST]:
        moved = trial != counts
        if not (moved & (found != counts)).any():
            both = np.where(moved, trial, found)
            found = both if budgets.fits(both) else found
    return found


def _pairs(steps: _CountChanges, slack: Numbers, limits: Numbers, total: float) -> Labels:
    """Return pairs of a wider and a narrower part that keep more: all, or the best of those that should fit."""
    wider, narrower = np.flatnonzero(steps.change > 0), np.flatnonzero(steps.change < 0)
    first, second = np.repeat(wider, narrower.size), np.tile(narrower, wider.size)
    gain = steps.gain[first] + steps.gain[second]
    wanted = (gain > EPSILON * total) & (steps.part[first] != steps.part[second])
    first, second, gain = first[wanted], second[wanted], gain[wanted]
    if first.size > EXHAUSTIVE:
        # widths of neighbors multiply, so the sum of two costs is an estimate: hence the margin; what is left is priced
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
    """Return all combinations of changes of some number of parts; none if there are too many."""
    own = [np.flatnonzero(steps.part == part) for part in np.unique(steps.part)]
    combined = np.poly([-each.size for each in own])  # elementary symmetric polynomials of the sizes
    if number > len(own) or combined[number] > EXHAUSTIVE:
        return np.zeros((0, number), dtype=np.int64)
    found = [row for some in combinations(own, number) for row in product(*some)]
    return np.array(found, dtype=np.int64)


def lagrangian_search(parts: list[GroupPart], worth: KeptScores, budgets: Budgets) -> Iterator[Labels]:
    """Yield the best counts within the budgets by Lagrange multipliers, for each budget and for blends of them.

    Kept scores are concave in each part's count, because the labels of a part are removed by their scores.
    """
    several = np.bincount(budgets.owner, minlength=budgets.asked.size)
    for weights in blends(budgets.asked.size):
        shares = 1 / several[budgets.owner]
        for _ in range(REWEIGHTS if (several[weights > 0] > 1).any() else 1):
            best = _along(parts, worth, budgets, weights[budgets.owner] * shares / budgets.limits)
            if best is None:
                break
            yield best
            # limits that are far from reached become cheaper: multiplicative weights (Plotkin, Shmoys and Tardos 1995)
            shares = shares * np.exp(RATE * (budgets.limited(best) / budgets.limits - 1))
            shares = shares / np.bincount(budgets.owner, shares)[budgets.owner]


def _along(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, direction: Numbers) -> Labels | None:
    """Return the best counts within the budgets at prices along one direction; None if no price leads to any."""
    low, high = CHEAPEST, DEAREST
    counts = np.array([part.counts[-1] for part in parts])
    best: Labels | None = None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        counts = at_price(parts, worth, budgets, worth.total * np.exp(middle) * direction, counts)
        if budgets.fits(counts):
            best = counts if best is None or worth(counts) > worth(best) else best
            high = middle
        else:
            low = middle
    return best


def blends(budgets: int) -> Iterator[Numbers]:
    """Yield shares of each of several budgets in a price, (budgets,): each alone, and pairs of them."""
    single = np.eye(budgets)
    yield from single
    for one in range(budgets):
        for other in range(one):
            shares = BLENDS.get(budgets, FEWER)
            yield from (share * single[one] + (1 - share) * single[other] for share in shares)


def at_price(parts: list[GroupPart], worth: KeptScores, budgets: Budgets, price: Numbers, counts: Labels) -> Labels:
    """Return counts that no change of one part improves at a price, unless the sweeps are used up."""
    counts = counts.copy()
    for _ in range(SWEEPS):
        before = counts.copy()
        for index, part in enumerate(parts):
            if part.counts.size > 1:
                wanted = part.counts if budgets.smooth else _spread(part, budgets.breakpoints[index])
                cost = _cost_at(wanted, index, counts, budgets, price)
                counts[index] = wanted[int(np.argmax(worth.kept[index][wanted] - cost))]
        if np.array_equal(before, counts):
            break
    return counts


def _spread(part: GroupPart, breakpoints: tuple[int, ...]) -> Labels:
    """Return at most `MOST` counts in equal steps, the last included, and the counts on both sides of breakpoints."""
    every = -(-part.counts.size // MOST)
    also = np.searchsorted(part.counts, breakpoints)
    also = np.clip(np.concatenate([also, also - 1]), 0, part.counts.size - 1)
    return np.union1d(part.counts[::-1][::every], part.counts[also])


def _cost_at(wanted: Labels, index: int, counts: Labels, budgets: Budgets, price: Numbers) -> Numbers:
    """Return the cost of each count of one part at a price; interpolated where costs are smooth, as it is quadratic."""
    points = wanted if wanted.size < 3 or not budgets.smooth else wanted[[0, wanted.size // 2, -1]]
    trials = np.repeat(counts[None], points.size, axis=0)
    trials[:, index] = points
    cost: Numbers = budgets.limited(trials) @ price
    return cost if points.size == wanted.size else _parabola(points, cost, wanted)


def _parabola(points: Labels, values: Numbers, at: Labels) -> Numbers:
    """Return the values of the parabola through three points, by Newton's divided differences."""
    (a, b, c), (u, v, w) = points.astype(float), values
    first, second = (v - u) / (b - a), (w - v) / (c - b)
    result: Numbers = u + (at - a) * (first + (at - b) * (second - first) / (c - a))
    return result

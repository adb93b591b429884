"""Local search over widths: steps of a few groups at a time, taken while they keep more within the budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels import Labels
from prunekit.planning.budgets.limits import Budgets
from prunekit.planning.select import Part, Scores
from prunekit.planning.terms import Numbers

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
class Worth:
    """What counts keep: the sum of the scores.

    Attributes:
        kept: for each part (size + 1,) the sum of its first so many scores.
        total: the sum of all scores, without their signs.
    """

    kept: tuple[Numbers, ...]
    total: float

    @classmethod
    def of(cls, parts: list[Part], scores: Scores) -> Worth:
        """Of parts; a label with an infinite score is worth more than all others together."""
        own = [scores[part.labels] for part in parts]
        finite = np.concatenate(own)
        most = float(np.abs(finite[np.isfinite(finite)]).sum()) + 1.0
        bounded = [np.nan_to_num(values, posinf=most, neginf=-most) for values in own]
        kept = tuple(np.concatenate([[0.0], np.cumsum(values)]) for values in bounded)
        return cls(kept, float(sum(np.abs(values).sum() for values in bounded)))

    def __call__(self, counts: Labels) -> float:
        """The sum of what counts (parts,) keep."""
        return float(sum(values[count] for values, count in zip(self.kept, counts, strict=True)))


@dataclass(frozen=True, eq=False)
class _Steps:
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


def improved(parts: list[Part], worth: Worth, budgets: Budgets, counts: Labels) -> Labels:
    """Counts from which no step of one part, and no two at a time, keep more within the budgets.

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


def are_few(parts: list[Part]) -> bool:
    """Whether there are so few widths to choose from that more can be tried of them."""
    return sum(part.counts.size for part in parts) <= FEW


def _steps(parts: list[Part], worth: Worth, budgets: Budgets, counts: Labels) -> _Steps:
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
    return _Steps(owner, change, gain, budgets.limited(trials) - budgets.limited(counts))


def _edges(part: Part, count: int, steps: tuple[int, ...], turns: tuple[int, ...]) -> Iterator[int]:
    """Where in a part's counts the next ones below and above lie that fill a step of its own width; and all turns."""
    last = part.counts.size - 1
    for step in steps:
        for filled in ((count - 1) // step * step, (count // step + 1) * step):
            yield int(np.clip(np.searchsorted(part.counts, filled, side="right") - 1, 0, last))
    for turn in turns:
        at = int(np.searchsorted(part.counts, turn))
        yield from (min(at, last), max(at - 1, 0))


def _neighbors(steps: _Steps, budgets: Budgets, counts: Labels, total: float) -> Iterator[Labels]:
    """The best counts by one step; else by two at a time; else by three or four."""
    yield from _best_of(_several(steps, 1), steps, budgets, counts, total)
    slack = budgets.limits - budgets.limited(counts)
    yield from _best_of(_pairs(steps, slack, budgets.limits, total), steps, budgets, counts, total)
    for size in (3, 4):
        yield from _best_of(_several(steps, size), steps, budgets, counts, total)


def _best_of(group: Labels, steps: _Steps, budgets: Budgets, counts: Labels, total: float) -> Iterator[Labels]:
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


def _pairs(steps: _Steps, slack: Numbers, limits: Numbers, total: float) -> Labels:
    """One part wider and another narrower that together keep more: all, or the best of those that should fit."""
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


def _several(steps: _Steps, number: int) -> Labels:
    """Steps of so many different parts, where there are few enough combinations."""
    own = [np.flatnonzero(steps.part == part) for part in np.unique(steps.part)]
    combined = np.poly([-each.size for each in own])  # elementary symmetric polynomials of the sizes
    if number > len(own) or combined[number] > EXHAUSTIVE:
        return np.zeros((0, number), dtype=np.int64)
    found = [row for some in combinations(own, number) for row in product(*some)]
    return np.array(found, dtype=np.int64)

"""What a choice of widths keeps, of which budgets leave as much as they can: scores, or multiply-accumulates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.planning.costs import CostModel, cost_model
from prunekit.planning.select import Part, Scores
from prunekit.planning.terms import Numbers, terms_of

EPSILON = 1e-12
"""Of all that could be kept: a smaller gain is rounding."""


class Worth(Protocol):
    """What counts keep."""

    @property
    def total(self) -> float:
        """The most that could be kept."""

    def __call__(self, counts: Labels) -> float:
        """What counts (parts,) keep."""

    def along(self, counts: Labels, index: int, wanted: Labels) -> Numbers:
        """What is kept with each of the `wanted` (n,) counts of one part, but for what no count of it changes."""

    def better(self, trials: Labels, counts: Labels) -> Labels:
        """Of trials (n, parts), sorted by the sum of what their parts gain alone, those that do gain, best first."""


@dataclass(frozen=True, eq=False)
class ScoresKept:
    """The sum of the scores of what is kept: what parts gain alone adds up.

    Attributes:
        kept: for each part (size + 1,) the sum of its first so many scores.
        total: the sum of all scores, without their signs.
    """

    kept: tuple[Numbers, ...]
    total: float

    @classmethod
    def of(cls, parts: list[Part], scores: Scores) -> ScoresKept:
        """Of parts; a label with an infinite score is worth more than all others together."""
        own = [scores[part.labels] for part in parts]
        finite = np.concatenate(own)
        most = float(np.abs(finite[np.isfinite(finite)]).sum()) + 1.0
        bounded = [np.nan_to_num(values, posinf=most, neginf=-most) for values in own]
        kept = tuple(np.concatenate([[0.0], np.cumsum(values)]) for values in bounded)
        return cls(kept, float(sum(np.abs(values).sum() for values in bounded)))

    def __call__(self, counts: Labels) -> float:
        return float(sum(values[count] for values, count in zip(self.kept, counts, strict=True)))

    def along(self, counts: Labels, index: int, wanted: Labels) -> Numbers:
        result: Numbers = self.kept[index][wanted]
        return result

    def better(self, trials: Labels, counts: Labels) -> Labels:
        return trials


@dataclass(frozen=True, eq=False)
class MacsKept:
    """The multiply-accumulates that are left: neighbours' widths multiply, so what parts gain alone does not add up.

    Attributes:
        model: counts to multiply-accumulates.
        total: of the dense model.
    """

    model: CostModel
    total: float

    @classmethod
    def of(cls, parts: list[Part], channel_map: ChannelMap) -> MacsKept:
        """Of parts, whatever the scores of their labels are."""
        model = cost_model(channel_map, parts, [terms_of(channel_map, parts, "macs")])
        return cls(model, float(model(np.array([part.labels.size for part in parts]))[0]))

    def __call__(self, counts: Labels) -> float:
        return float(self.model(counts)[0])

    def along(self, counts: Labels, index: int, wanted: Labels) -> Numbers:
        def macs(at: Labels) -> Numbers:
            return self.model(replaced(counts, index, at))[:, 0]

        return parabolic(wanted, macs)

    def better(self, trials: Labels, counts: Labels) -> Labels:
        gain = self.model(trials)[:, 0] - self(counts)
        order = np.argsort(-gain, kind="stable")
        result: Labels = trials[order[gain[order] > EPSILON * self.total]]
        return result


def replaced(counts: Labels, index: int, wanted: Labels) -> Labels:
    """Counts (parts,) with each of the `wanted` (n,) in place of one part's: (n, parts)."""
    trials = np.repeat(counts[None], wanted.size, axis=0)
    trials[:, index] = wanted
    return trials


def parabolic(at: Labels, values: Callable[[Labels], Numbers]) -> Numbers:
    """Values of a function of one part's counts, where it is a polynomial: of degree two, as a width meets itself once.

    Taken from three of them where there are more, by Newton's divided differences.
    """
    if at.size <= 3:
        return values(at)
    (a, b, c), (u, v, w) = at[[0, at.size // 2, -1]].astype(float), values(at[[0, at.size // 2, -1]])
    first, second = (v - u) / (b - a), (w - v) / (c - b)
    result: Numbers = u + (at - a) * (first + (at - b) * (second - first) / (c - a))
    return result

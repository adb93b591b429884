"""Statistics of one activation, per channel, and their numerically stable merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Side = Literal["input", "output"]


class StatsKey(NamedTuple):
    """The key of an activation: a module's input or output, in its `call`-th call (from 0) of one forward pass."""

    module: str
    side: Side
    call: int

    def __str__(self) -> str:
        return f"{self.side} of {self.module or 'the model'}" + (f", call {self.call}" if self.call else "")


@dataclass(frozen=True, eq=False)
class LayerStats:
    """Statistics of one activation, per channel; every array has shape (channels,).

    NaN and Inf are counted in `non_finite` and left out of everything else. A channel that showed no finite value
    has `count` 0, moments 0, `min` +inf and `max` -inf.
    """

    count: IntArray  # finite values, over all batches, calls and positions
    mean: FloatArray
    squared_deviations: FloatArray  # sum of (x - mean)^2, which merging needs in place of the variance
    absolute_sum: FloatArray
    min: FloatArray
    max: FloatArray
    zeros: IntArray  # values that are exactly 0
    non_finite: IntArray  # values that are NaN or Inf
    first_non_finite: IntArray  # the forward pass, from 1, in which the channel first had one; 0 if in none

    def __post_init__(self) -> None:
        for field in fields(self):
            getattr(self, field.name).setflags(write=False)

    @classmethod
    def empty(cls, channels: int) -> LayerStats:
        """Return the statistics of no values: the neutral element of `combine`."""
        rows = np.zeros((len(ARRAYS), channels))
        rows[ARRAYS.index("min")], rows[ARRAYS.index("max")] = np.inf, -np.inf
        return cls.from_rows(rows)

    @classmethod
    def from_rows(cls, rows: FloatArray) -> LayerStats:
        """Return statistics from (arrays, channels), in the order of the fields."""
        return cls(*(row.astype(np.int64) if name in COUNTS else row for name, row in zip(ARRAYS, rows, strict=True)))

    @property
    def rows(self) -> FloatArray:
        """The fields in their order, (arrays, channels)."""
        return np.stack([getattr(self, name) for name in ARRAYS], dtype=np.float64)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.count)

    @property
    def variance(self) -> FloatArray:
        """Population variance (divided by `count`, not by `count - 1`)."""
        return self.squared_deviations / self._divisor

    @property
    def mean_abs(self) -> FloatArray:
        """Mean of |x|."""
        return self.absolute_sum / self._divisor

    @property
    def rms(self) -> FloatArray:
        """Root of the mean of x^2."""
        return np.sqrt(self.variance + self.mean**2)

    @property
    def zero_fraction(self) -> FloatArray:
        """Share of the values that are exactly 0, in 0..1 (APoZ, Hu et al. 2016, where taken after a ReLU)."""
        return self.zeros / self._divisor

    @property
    def constant(self) -> npt.NDArray[np.bool_]:
        """Channels with more than one value, all of them equal: they carry no information."""
        found: npt.NDArray[np.bool_] = (self.count > 1) & (self.min == self.max)
        return found

    @property
    def _divisor(self) -> IntArray:
        return np.maximum(self.count, 1)


ARRAYS = tuple(field.name for field in fields(LayerStats))
COUNTS = {"count", "zeros", "non_finite", "first_non_finite"}
"""The arrays that hold integers."""


def combine(parts: Sequence[LayerStats]) -> LayerStats:
    """Return the statistics of all parts together, as if one pass had seen every value (Chan, Golub & LeVeque 1983)."""
    return LayerStats.from_rows(combine_rows([part.rows for part in parts]))


def combine_rows(parts: Sequence[FloatArray]) -> FloatArray:
    """Return the rows of all parts together, each (arrays, channels); as `combine`."""
    counts, means, deviations, absolute, lows, highs, zeros, bad, first_bad = np.stack(parts, axis=1)
    count = counts.sum(0)
    base = np.take_along_axis(means, counts.argmax(0)[None], 0)[0]
    shift = means - base  # differences keep the digits that a large mean costs
    mean = base + (counts / np.maximum(count, 1) * shift).sum(0)
    between = (counts * (means - mean) ** 2).sum(0)
    low, high = lows.min(0), highs.max(0)
    constant = low == high
    first = np.where(first_bad > 0, first_bad, np.inf).min(0)
    return np.stack(
        (
            count,
            np.where(constant, low, mean),  # equal means, weighted, need not sum to exactly themselves
            np.where(constant, 0.0, deviations.sum(0) + between),
            absolute.sum(0),
            low,
            high,
            zeros.sum(0),
            bad.sum(0),
            np.where(first == np.inf, 0, first),
        )
    )

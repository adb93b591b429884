"""Per-channel statistics of one activation, and their stable merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class StatsKey(NamedTuple):
    """Which activation: a module's input or output, in its `call`-th call (from 0) of one forward pass."""

    module: str
    side: Literal["input", "output"]
    call: int

    def __str__(self) -> str:
        return f"{self.side} of {self.module or 'the model'}" + (f", call {self.call}" if self.call else "")


@dataclass(frozen=True, eq=False)
class LayerStats:
    """Statistics of one activation, per channel; every array has shape (channels,).

    NaN and Inf are counted in `non_finite` and left out of everything else. A channel that showed no finite value
    has `count` 0, moments 0, `min` +inf and `max` -inf.
    """

    count: IntArray
    """Finite values seen, over all batches, calls and positions."""
    mean: FloatArray
    squared_deviations: FloatArray
    """Sum of (x - mean)^2: what merging needs in place of the variance."""
    absolute_sum: FloatArray
    min: FloatArray
    max: FloatArray
    zeros: IntArray
    """Values that are exactly 0."""
    non_finite: IntArray
    """Values that are NaN or Inf."""

    def __post_init__(self) -> None:
        for field in fields(self):
            getattr(self, field.name).setflags(write=False)

    @classmethod
    def empty(cls, channels: int) -> LayerStats:
        """What is known before the first value: the neutral element of `combine`."""
        counts, sums = np.zeros(channels, np.int64), np.zeros(channels)
        return cls(counts, sums, sums, sums, np.full(channels, np.inf), np.full(channels, -np.inf), counts, counts)

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
        """Channels that showed more than one value, all of them equal: they carry nothing."""
        found: npt.NDArray[np.bool_] = (self.count > 1) & (self.min == self.max)
        return found

    @property
    def _divisor(self) -> IntArray:
        return np.maximum(self.count, 1)


ARRAYS = tuple(field.name for field in fields(LayerStats))


def combine(parts: Sequence[LayerStats]) -> LayerStats:
    """Statistics of all parts together, as if one pass had seen every value (Chan, Golub & LeVeque 1983).

    Args:
        parts: at least one; all with the same number of channels.
    """
    stacked = {name: np.stack([getattr(part, name) for part in parts]) for name in ARRAYS}  # each (parts, channels)
    count = stacked["count"].sum(0)
    weight = stacked["count"] / np.maximum(count, 1)
    base = np.take_along_axis(stacked["mean"], stacked["count"].argmax(0)[None], 0)[0]
    mean = base + (weight * (stacked["mean"] - base)).sum(0)  # differences keep the digits that a large mean costs
    between = (stacked["count"] * (stacked["mean"] - mean) ** 2).sum(0)
    low, high = stacked["min"].min(0), stacked["max"].max(0)
    constant = low == high
    return LayerStats(
        count=count,
        mean=np.where(constant, low, mean),  # equal means, weighted, need not sum to exactly themselves
        squared_deviations=np.where(constant, 0.0, stacked["squared_deviations"].sum(0) + between),
        absolute_sum=stacked["absolute_sum"].sum(0),
        min=low,
        max=high,
        zeros=stacked["zeros"].sum(0),
        non_finite=stacked["non_finite"].sum(0),
    )

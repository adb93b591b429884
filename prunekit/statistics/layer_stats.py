"""Per-channel statistics of one activation, and their stable merge.

How the magnitudes of an activation are distributed: a histogram whose buckets are exact and merge exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prunekit.errors import UsageError
from prunekit.utils.tensors import as_it_lies

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
    first_non_finite: IntArray
    """In which forward pass, from 1, the channel first showed one of them; 0 where in none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            getattr(self, field.name).setflags(write=False)

    @classmethod
    def empty(cls, channels: int) -> LayerStats:
        """Return what is known before the first value: the neutral element of `combine`."""
        rows = np.zeros((len(ARRAYS), channels))
        rows[ARRAYS.index("min")], rows[ARRAYS.index("max")] = np.inf, -np.inf
        return cls.from_rows(rows)

    @classmethod
    def from_rows(cls, rows: FloatArray) -> LayerStats:
        """Return statistics from (arrays, channels), in the order of the fields."""
        return cls(*(row.astype(np.int64) if name in COUNTS else row for name, row in zip(ARRAYS, rows, strict=True)))

    @property
    def rows(self) -> FloatArray:
        """(arrays, channels) The fields in their order."""
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
        """Channels that showed more than one value, all of them equal: they carry nothing."""
        found: npt.NDArray[np.bool_] = (self.count > 1) & (self.min == self.max)
        return found

    @property
    def _divisor(self) -> IntArray:
        return np.maximum(self.count, 1)


@dataclass(frozen=True, eq=False)
class ChannelSums:
    """Sums per channel, of as many values each."""

    count: int
    total: FloatArray
    """(channels,)"""

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            getattr(self, field.name).setflags(write=False)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.total)

    @property
    def mean(self) -> FloatArray:
        """(channels,)"""
        return self.total / max(self.count, 1)


ARRAYS = tuple(field.name for field in fields(LayerStats))
COUNTS = {"count", "zeros", "non_finite", "first_non_finite"}
"""Those that are integers."""


def combine(parts: Sequence[LayerStats]) -> LayerStats:
    """Return the statistics of all parts together, as if one pass had seen every value (Chan, Golub & LeVeque 1983).

    Args:
        parts: at least one; all with the same number of channels.
    """
    return LayerStats.from_rows(combine_rows([part.rows for part in parts]))


def combine_rows(parts: Sequence[FloatArray]) -> FloatArray:
    """Return the same for rows, each (arrays, channels)."""
    counts, means, deviations, absolute, lows, highs, zeros, bad, first_bad = np.stack(parts, axis=1)
    count = counts.sum(0)
    base = np.take_along_axis(means, counts.argmax(0)[None], 0)[0]
    shift = means - base  # differences keep the digits that a large mean costs
    mean = base + (counts / np.maximum(count, 1) * shift).sum(0)
    between = (counts * (means - mean) ** 2).sum(0)
    low, high = lows.min(0), highs.max(0)
    constant = low == high
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
            _earliest(first_bad),
        )
    )


def _earliest(passes: FloatArray) -> FloatArray:
    first: FloatArray = np.where(passes > 0, passes, np.inf).min(0)
    return np.where(first == np.inf, 0, first)


SHIFT = 16
"""Bits of a float32 below its bucket: the exponent and the upper 7 bits of the mantissa stay."""
FINITE = 0x7F80
"""Buckets of finite values; those of Inf and NaN follow."""
BUCKETS = 0x8000
CPU_BLOCK = 2**18
"""Values counted at a time on the CPU: their bit patterns stay in the cache."""
DEVICE_BLOCK = 2**24
SMALLEST = 2.0**-149
"""The smallest float32 above 0."""

EDGES = (np.arange(FINITE + 1, dtype=np.uint32) << SHIFT).view(np.float32).astype(np.float64)
EDGES[1], EDGES[FINITE] = 0.0, 2.0**128
EDGES = EDGES[1:]
"""(FINITE,) Lower edges of the buckets from 1 on, and the end of the last. Bucket 0 holds the zeros alone."""


class MagnitudeSketch:
    """Quantiles of |x| over any number of tensors, in 256 KiB, with every value counted.

    A bucket is the upper half of |x| as float32: its edges are at most 1/128 apart, relative to the lower one (below
    1.2e-38: 9.2e-41 apart), so a threshold found here is that near to the exact one. Like DDSketch (Masson et al.
    2019), whose buckets grow by the logarithm, but found without computing one. Zeros have a bucket of their own, Inf
    and NaN are counted apart, and float64 beyond the range of float32 counts at its ends. Counts add, so merged
    sketches equal one over all the values.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(BUCKETS, dtype=torch.int64)

    def add(self, values: Tensor) -> Self:
        """Count every value of a floating-point tensor of any shape, on its device; the tensor is only read.

        Raises:
            UsageError: the values are not floating point.
        """
        if not values.is_floating_point():
            raise UsageError(f"a magnitude sketch counts floating-point values, got {values.dtype}")
        if self._counts.device != values.device:
            self._counts = self._counts.to(values.device)
        flat = as_it_lies(values)
        for block in torch.split(flat, CPU_BLOCK if flat.device.type == "cpu" else DEVICE_BLOCK):
            self._counts += _count(block)
        return self

    def merge(self, other: MagnitudeSketch) -> MagnitudeSketch:
        """Return a new sketch of the values of both."""
        merged = MagnitudeSketch()
        merged._counts = self._counts + other._counts.to(self._counts.device)
        return merged

    @property
    def count(self) -> int:
        """Finite values, zeros included."""
        return int(self._counts[:FINITE].sum())

    @property
    def non_finite(self) -> int:
        """Values that are Inf or NaN."""
        return int(self._counts[FINITE:].sum())

    def quantile(self, share: float) -> float:
        """Return the threshold t for which the share of finite values with |x| < t is as near `share` as the buckets
        allow.

        Args:
            share: 0..1.

        Returns:
            t, interpolated within its bucket; 0.0 where the zeros alone reach `share`; for share 1 a t above all.

        Raises:
            UsageError: `share` is out of range, or no finite value has been counted.
        """
        if not 0 <= share <= 1:
            raise UsageError(f"quantile: expected a share from 0 to 1, got {share}")
        below = self._below()
        target = share * below[-1]
        index = int(np.searchsorted(below, target))
        if index == 0:
            return 0.0
        part = (target - below[index - 1]) / (below[index] - below[index - 1])
        return float(EDGES[index - 1] + part * (EDGES[index] - EDGES[index - 1]))

    def _below(self) -> IntArray:
        """(FINITE,) How many values lie below each edge; zeros count as below the first."""
        below: IntArray = self._counts[:FINITE].cpu().numpy().cumsum()
        if below[-1] == 0:
            raise UsageError("the sketch has counted no finite value: run the model on calibration data first")
        return below


def _count(block: Tensor) -> Tensor:
    """(BUCKETS,) How many of the values fall in each bucket."""
    bits = _truncated(block).view(torch.int32) & 0x7FFFFFFF  # without the sign
    nonzero = bits.clamp(max=1).sum()
    counts = torch.bincount(bits >> SHIFT, minlength=BUCKETS)
    tiny = nonzero - counts[1:].sum()  # subnormals that share their upper bits with zero
    counts[0] -= tiny
    counts[1] += tiny
    return counts


def _truncated(values: Tensor) -> Tensor:
    """Return the values as float32, float64 rounded towards zero: never up into the next bucket or to Inf, nor down
    to 0.
    """
    if values.dtype != torch.float64:
        return values.float()
    magnitude = values.abs()
    rounded = magnitude.float()
    lower = torch.where(rounded > magnitude, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
    return torch.maximum(lower, (magnitude > 0) * SMALLEST)

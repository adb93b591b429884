"""Reductions of an activation to statistics per channel: in one pass over it, in two where a large mean costs digits.

`values` are (samples, channels, positions), contiguous; or (samples, channels) where channels are innermost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prunekit.distributed.shared_work import shared_count, shared_mean, shared_sum
from prunekit.statistics.layer_stats import ARRAYS, FloatArray, LayerStats
from prunekit.utils.tensors import accumulation_dtype

CPU_BLOCK = 2**19
"""Values reduced at a time on the CPU: larger blocks leave the cache, smaller ones are dominated by Python."""
DEVICE_BLOCK = 2**24
"""On an accelerator launches cost more than memory traffic; this bounds the float64 copy to 128 MiB."""

EXACT = 2**24
"""The largest number up to which float32 holds every integer."""
CANCELLATION = 1e-4
"""Below this share of the second moment a variance from raw moments loses more than four digits."""
DEVIATIONS = ARRAYS.index("squared_deviations")


def summarize(activation: Tensor, axis: int) -> FloatArray:
    """Return statistics of one floating-point activation per channel, the fields of `LayerStats`, (arrays, channels).

    They are accumulated in float64; in float32 on MPS, which has no float64.
    """
    values = _channels_second(activation.detach(), axis)
    if values.numel() == 0:
        return LayerStats.empty(values.shape[1]).rows
    rows = statistics(eager_sums(values), values.numel() // values.shape[1]).numpy()
    if rows[-1].any():
        doubtful = np.flatnonzero(rows[-1])
        rows[:-1, doubtful] = _measure_twice(values[:, torch.from_numpy(doubtful).to(values.device)])
    return rows[:-1]


def statistics(sums: Sums, count: int) -> Tensor:
    """Return the fields of `LayerStats`, and last whether a second pass is needed, (arrays + 1, channels).

    It is needed where NaN or Inf got into the sums, and where a large mean cost the variance its digits.
    """
    total, squares, absolute, zeros, bad, low, high = sums
    finite = count - bad
    mean = total / finite.clamp(min=1)
    deviations = squares - mean * total
    constant = low == high
    doubtful = ~total.isfinite() | (~constant & (deviations < CANCELLATION * squares))
    mean, deviations = torch.where(constant, low, mean), torch.where(constant, 0.0, deviations)
    first_bad = (bad > 0).double()
    return torch.stack((finite, mean, deviations, absolute, low, high, zeros, bad, first_bad, doubtful.double()))


def _measure_twice(values: Tensor) -> FloatArray:
    """Return statistics of finite values, (arrays, channels), with the variance from a second pass around the mean."""
    sums = eager_sums(values, finite_only=True)
    *rows, _ = statistics(sums, values.numel() // values.shape[1]).numpy()
    mean, low, high = (rows[ARRAYS.index(name)] for name in ("mean", "min", "max"))
    centered = centered_squares(values, mean).cpu().double().numpy()
    rows[DEVIATIONS] = np.where(low == high, 0.0, centered)
    return np.stack(rows)


def _channels_second(activation: Tensor, axis: int) -> Tensor:
    """Return (samples, channels, positions), contiguous; or (samples, channels) where channels are innermost."""
    channels, last = activation.shape[axis], activation.movedim(axis, -1)
    if channels > 1 and last.is_contiguous():  # Linear, LayerNorm, and images in channels_last memory format
        return last.reshape(-1, channels)
    samples = activation.shape[:axis].numel()
    return activation.reshape(samples, channels, -1 if activation.numel() else 0).contiguous()


class Sums(NamedTuple):
    """Raw sums per channel, each of shape (channels,), in float64."""

    sum: Tensor
    squares: Tensor
    absolute: Tensor
    zeros: Tensor
    non_finite: Tensor
    min: Tensor
    max: Tensor


def eager_sums(values: Tensor, *, finite_only: bool = False) -> Sums:
    """Return the sums of values, on the CPU.

    With `finite_only` NaN and Inf are counted and left out; else they are not counted, and sums with them not finite.
    """
    dim = values.ndim - 2
    blocks = _blocks(values)
    wide = torch.empty_like(blocks[0], dtype=accumulation_dtype(values.device))
    flags = torch.empty_like(blocks[0], dtype=torch.float32)
    reduce = _reduce_finite if finite_only else _reduce
    parts = [reduce(block, wide[: len(block)].copy_(block), flags[: len(block)], dim) for block in blocks]
    joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    joined = joined.view(len(Sums._fields), -1, values.shape[1])  # (sums, samples or blocks, channels)
    totals = torch.cat((joined[:-2].sum(1), joined[-2:-1].amin(1), joined[-1:].amax(1)))
    return Sums(*totals.cpu().double())  # one copy, thus one synchronization, per activation


def centered_squares(values: Tensor, mean: FloatArray) -> Tensor:
    """Return the sums of (x - mean)^2 over finite values, (channels,): the second pass of the two-pass variance."""
    dim, channels = values.ndim - 2, values.shape[1]
    center = torch.from_numpy(mean).to(values.device, accumulation_dtype(values.device))
    if dim == 1:
        center = center.repeat(len(values)).unsqueeze(1)  # (samples * channels, 1)
    parts, start = [], 0
    for block in _blocks(values):
        part = block.to(center.dtype) - (center[start : start + len(block)] if dim == 1 else center)
        parts.append(part.masked_fill_(~part.isfinite(), 0).square_().sum(dim))
        start += len(block)
    return torch.cat(parts).view(-1, channels).sum(0)


class VarianceSum:
    """Mean and variance of each channel over rows that are added in parts (Chan, Golub and LeVeque 1983)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean, self.squares = torch.zeros(()), torch.zeros(())  # (channels,) after the first part

    def add_rows(self, values: Tensor) -> None:
        """Add rows, (N, channels)."""
        mean = values.mean(0)
        self.add(len(values), mean, (values - mean).square().sum(0))

    def add(self, count: int, mean: Tensor, squares: Tensor) -> None:
        """Add the mean of some rows and the sum of their squared deviations from it, (channels,) each."""
        total, apart = self.count + count, mean - self.mean.to(mean)
        between = apart.square() * (self.count * count / total)
        self.mean = self.mean.to(mean) + apart * (count / total)
        self.count, self.squares = total, self.squares.to(mean) + (squares + between)

    def share(self, zeros: Tensor) -> None:
        """Add up the rows of all processes that share the work; `zeros`, (channels,), are the mean of no rows."""
        mean = self.mean if self.count else zeros
        whole = shared_mean(mean, self.count)
        squares = self.squares + (mean - whole).square() * self.count
        self.count, self.mean, self.squares = shared_count(self.count), whole, shared_sum(squares)

    def variance(self) -> Tensor:
        """Return the unbiased variance, (channels,)."""
        return self.squares / max(1, self.count - 1)


def _blocks(values: Tensor) -> tuple[Tensor, ...]:
    """Split (samples * channels, positions), to be reduced along 1, or (samples, channels), along 0, into blocks."""
    matrix = values.flatten(0, -2)
    size = CPU_BLOCK if values.device.type == "cpu" else DEVICE_BLOCK
    return torch.split(matrix, max(1, size // matrix.shape[1]))


def _reduce(block: Tensor, wide: Tensor, flags: Tensor, dim: int) -> Tensor:
    """Return the sums of one block; `wide`, its float64 copy, and `flags` are overwritten."""
    low, high = block.amin(dim).to(wide.dtype), block.amax(dim).to(wide.dtype)
    total, squares = wide.sum(dim), _squares(wide, dim)
    on_cpu = block.device.type == "cpu"  # elsewhere, reading a value stalls the queue and costs more than it saves
    absolute = total if on_cpu and low.amin() >= 0 else wide.abs_().sum(dim)
    return torch.stack((total, squares, absolute, _zeros(block, flags, dim, wide), torch.zeros_like(low), low, high))


def _reduce_finite(block: Tensor, wide: Tensor, flags: Tensor, dim: int) -> Tensor:
    bad = ~wide.isfinite()
    wide.masked_fill_(bad, 0)
    low, high = wide.masked_fill(bad, torch.inf).amin(dim), wide.masked_fill(bad, -torch.inf).amax(dim)
    total, squares, absolute = wide.sum(dim), _squares(wide, dim), wide.abs_().sum(dim)
    missing = bad.sum(dim).to(wide.dtype)
    return torch.stack((total, squares, absolute, _zeros(block, flags, dim, wide), missing, low, high))


def _squares(wide: Tensor, dim: int) -> Tensor:
    if dim == 1:  # the innermost axis: vectorized, and faster than squares written out and summed
        norms: Tensor = torch.linalg.vector_norm(wide, 2, dim)
        return norms.square()
    return wide.square().sum(dim)


def _zeros(block: Tensor, flags: Tensor, dim: int, like: Tensor) -> Tensor:
    # Sums of booleans and integers are not vectorized (five times slower): only where float32 would miscount.
    found = torch.eq(block, 0, out=flags)
    return found.sum(dim, dtype=None if block.shape[dim] <= EXACT else torch.int64).to(like.dtype)

"""From one activation to its per-channel statistics, in few passes over the memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prunekit.calibration.layer_stats import FloatArray, LayerStats

CPU_BLOCK = 2**18
"""Values reduced at a time on the CPU: in float64 they stay in the cache between the reductions."""
DEVICE_BLOCK = 2**24
"""On an accelerator launches cost more than memory traffic; this bounds the float64 copy to 128 MiB."""
CANCELLATION = 1e-4
"""Below this share of the second moment a variance taken from raw moments loses more than four digits."""


class Planes(NamedTuple):
    """An activation as a matrix that is reduced along `dim`: (samples * channels, positions) with `dim` 1, or
    (samples, channels) with `dim` 0 where the channels lie innermost in memory."""

    matrix: Tensor
    dim: int
    channels: int


class Sums(NamedTuple):
    """Raw sums per channel, each of shape (channels,)."""

    sum: FloatArray
    squares: FloatArray
    absolute: FloatArray
    zeros: FloatArray
    non_finite: FloatArray
    min: FloatArray
    max: FloatArray


def summarise(activation: Tensor, axis: int) -> LayerStats:
    """Per-channel statistics of one activation, accumulated in float64 (float32 on MPS, which has no float64).

    Args:
        activation: floating point, any shape; it is only read.
        axis: which axis holds the channels.
    """
    planes = _planes(activation.detach(), axis)
    if planes.matrix.numel() == 0:
        return LayerStats.empty(planes.channels)
    sums = _sums(planes, finite_only=False)
    if not np.isfinite(sums.sum).all():
        sums = _sums(planes, finite_only=True)
    return _finish(planes, sums)


def _finish(planes: Planes, sums: Sums) -> LayerStats:
    count = planes.matrix.numel() // planes.channels - sums.non_finite
    mean = sums.sum / np.maximum(count, 1)
    deviations = sums.squares - mean * sums.sum
    constant = sums.min == sums.max
    if (~constant & (deviations < CANCELLATION * sums.squares)).any():
        deviations = _centred_squares(planes, mean)
    return LayerStats(
        count=count.astype(np.int64),
        mean=np.where(constant, sums.min, mean),
        squared_deviations=np.where(constant, 0.0, deviations),
        absolute_sum=sums.absolute,
        min=sums.min,
        max=sums.max,
        zeros=sums.zeros.astype(np.int64),
        non_finite=sums.non_finite.astype(np.int64),
    )


def _planes(activation: Tensor, axis: int) -> Planes:
    channels = activation.shape[axis]
    last = activation.movedim(axis, -1)
    if last.is_contiguous():  # Linear, LayerNorm, and images in channels_last memory format
        return Planes(last.reshape(-1, channels), 0, channels)
    outer = activation.shape[:axis].numel() * channels
    return Planes(activation.reshape(outer, -1), 1, channels)


def _blocks(planes: Planes) -> tuple[Tensor, ...]:
    size = CPU_BLOCK if planes.matrix.device.type == "cpu" else DEVICE_BLOCK
    return torch.split(planes.matrix, max(1, size // planes.matrix.shape[1]))


def _accumulator(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _sums(planes: Planes, *, finite_only: bool) -> Sums:
    blocks = _blocks(planes)
    wide = torch.empty_like(blocks[0], dtype=_accumulator(planes.matrix.device))
    flags = torch.empty_like(blocks[0], dtype=torch.float32)
    reduce = _reduce_finite if finite_only else _reduce
    parts = [reduce(block, wide[: len(block)].copy_(block), flags[: len(block)], planes.dim) for block in blocks]
    joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    joined = joined.view(len(Sums._fields), -1, planes.channels)  # (sums, samples or blocks, channels)
    totals = torch.cat((joined[:-2].sum(1), joined[-2:-1].amin(1), joined[-1:].amax(1)))
    return Sums(*totals.cpu().double().numpy())  # one copy, thus one synchronisation, per activation


def _reduce(block: Tensor, wide: Tensor, flags: Tensor, dim: int) -> Tensor:
    """Sums of one block, in the order of `Sums`; `wide`, its float64 copy, and `flags` are overwritten."""
    low, high = block.amin(dim).to(wide.dtype), block.amax(dim).to(wide.dtype)
    total, squares = wide.sum(dim), _squares(wide, dim)
    on_cpu = block.device.type == "cpu"  # elsewhere, looking at a value stalls the queue and costs more than it saves
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
    if dim == 1:  # the innermost axis: vectorised, and faster than squares written out and summed
        norms: Tensor = torch.linalg.vector_norm(wide, 2, dim)
        return norms.square()
    return wide.square().sum(dim)


def _zeros(block: Tensor, flags: Tensor, dim: int, like: Tensor) -> Tensor:
    # Sums of booleans are not vectorised (five times slower); float32 counts exactly up to 2^24 values a plane.
    return torch.eq(block, 0, out=flags).sum(dim).to(like.dtype)


def _centred_squares(planes: Planes, mean: FloatArray) -> FloatArray:
    """Second pass of the two-pass variance, for channels whose mean is large beside their deviation."""
    matrix, dim, channels = planes
    dtype = _accumulator(matrix.device)
    centre = torch.from_numpy(mean).to(matrix.device, dtype)
    if dim == 1:
        centre = centre.repeat(matrix.shape[0] // channels).unsqueeze(1)  # (samples * channels, 1)
    parts, start = [], 0
    for block in _blocks(planes):
        part = block.to(dtype) - (centre[start : start + len(block)] if dim == 1 else centre)
        parts.append(part.masked_fill_(~part.isfinite(), 0).square_().sum(dim))
        start += len(block)
    squares: FloatArray = torch.cat(parts).view(-1, channels).sum(0).cpu().double().numpy()
    return squares

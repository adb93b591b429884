"""The Gram matrix of one activation: products of its channels, summed over everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STRIP = 128
"""Rows of a symmetric product computed at a time, from the diagonal on: the other half is its mirror image."""
DOUBTFUL = 1e-2
"""Below this share of the second moment, float32 products leave a variance fewer than four digits."""


@dataclass(frozen=True, eq=False)
class Products:
    """Sums over the positions of an activation, around a shift."""

    count: int
    """Positions: samples, times places or tokens."""
    total: Tensor
    """(channels,) float64."""
    blocks: Tensor
    """(groups, channels / groups, channels / groups), in the precision of the products."""

    @property
    def doubtful(self) -> bool:
        """Whether some channel's mean is so large that its variance has lost its digits."""
        if self.blocks.dtype == torch.float64 or self.count == 0:
            return False
        second = self.blocks.diagonal(dim1=1, dim2=2).flatten().double() / self.count
        return bool((second - (self.total / self.count).square() < DOUBTFUL * second).any())


def products(activation: Tensor, axis: int, groups: int, shift: Tensor | None = None) -> Products:
    """Sums of the channels and of their products with each other, within each group.

    Args:
        activation: floating point, any shape; computed in its precision, in float32 for anything below.
        axis: which axis holds the channels.
        groups: neighbouring channels that are multiplied with each other only.
        shift: (channels,), subtracted first.
    """
    channels = activation.shape[axis]
    wide = activation.to(torch.promote_types(activation.dtype, torch.float32))
    first = wide.movedim(axis, 0)
    count = activation.numel() // max(channels, 1)
    if count == 0:
        blocks = wide.new_zeros(groups, channels // groups, channels // groups)
        return Products(0, blocks.new_zeros(channels, dtype=_accumulator(wide)), blocks)
    samples = wide.movedim(axis, 1) if wide.ndim > 2 else None
    if samples is not None and samples.is_contiguous():
        maps = samples.flatten(2)  # (samples, channels, positions)
        maps = maps if shift is None else maps - shift.to(wide.dtype)[:, None]
        return Products(count, maps.sum(2).sum(0, dtype=_accumulator(wide)), _of_maps(maps, groups))
    matrix = first.flatten(1)  # (channels, positions)
    matrix = matrix if shift is None else matrix - shift.to(wide.dtype)[:, None]
    return Products(count, matrix.sum(1, dtype=_accumulator(wide)), _of_matrix(matrix, groups))


def _of_maps(maps: Tensor, groups: int) -> Tensor:
    samples, channels, positions = maps.shape
    if groups == channels:
        return maps.square().sum((0, 2)).view(-1, 1, 1)
    few = positions < channels // groups  # many small products cost more than laying the samples side by side
    if few or (groups == 1 and channels > STRIP and maps.device.type != "cpu"):
        return _of_matrix(maps.transpose(0, 1).flatten(1), groups)
    if groups == 1 and channels > STRIP:
        return _symmetric(maps.unbind())
    parts = maps.view(samples * groups, -1, positions)
    return torch.bmm(parts, parts.mT).view(samples, groups, -1, channels // groups).sum(0)


def _of_matrix(matrix: Tensor, groups: int) -> Tensor:
    """The same for (channels, positions)."""
    if groups == 1:
        return _symmetric([matrix])
    parts = matrix.reshape(groups, -1, matrix.shape[1])
    return parts.square().sum(2)[..., None] if parts.shape[1] == 1 else torch.bmm(parts, parts.mT)


def _symmetric(matrices: Sequence[Tensor]) -> Tensor:
    """(1, n, n) Sum of the products of matrices, (n, positions) each, with their transposes."""
    size = len(matrices[0])
    gram = matrices[0].new_zeros(1, size, size)
    for start in range(0, size, STRIP):
        strip = gram[0, start : start + STRIP, start:]
        for matrix in matrices:
            strip.addmm_(matrix[start : start + STRIP], matrix[start:].T)
        gram[0, start + STRIP :, start : start + STRIP] = strip[:, STRIP:].T
    return gram


def _accumulator(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64

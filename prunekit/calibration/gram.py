"""The Gram matrix of one activation: products of its channels, summed over everything else, or a sample of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.calibration.patches import sampled_rows

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
    """(groups, channels / groups, channels / groups), in the precision of the products; below the diagonal's strips
    nothing is written, see `mirrored`."""

    @property
    def doubtful(self) -> bool:
        """Whether some channel's mean is so large that its variance has lost its digits."""
        if self.blocks.dtype == torch.float64 or self.count == 0:
            return False
        second = self.blocks.diagonal(dim1=1, dim2=2).flatten().double() / self.count
        return bool((second - (self.total / self.count).square() < DOUBTFUL * second).any())

    def add_(self, other: Products) -> Products:
        """Both together; the blocks are added in place, as a second matrix of this size may not fit in."""
        for strip in strips(self.blocks.shape[1]):
            self.blocks[strip].add_(other.blocks[strip])
        return Products(self.count + other.count, self.total + other.total, self.blocks)


Strip = tuple[slice, slice, slice]


def strips(size: int) -> Iterator[Strip]:
    """Where the upper half of every block of a size is written, strip by strip."""
    for start in range(0, size, STRIP):
        yield slice(None), slice(start, start + STRIP), slice(start, None)


def mirrored(blocks: Tensor) -> Tensor:
    """Fills in what lies below the strips, in place."""
    for every, rows, _ in strips(blocks.shape[1]):
        behind = slice(rows.stop, None)
        blocks[every, behind, rows] = blocks[every, rows, behind].mT
    return blocks


class Sampling:
    """Which positions of an activation count.

    Args:
        rows: how many of all that one batch has, at most; None: all.
        seed: of the batch.
    """

    def __init__(self, rows: int | None = None, seed: int = 0) -> None:
        self._rows, self._seed = rows, seed
        self._drawn: dict[tuple[int, int], Tensor] = {}

    def of(self, total: int, samples: int = 1) -> Tensor | None:
        """Positions among `total`, ascending, at random, the same in each of some samples; None: all of them."""
        if self._rows is None or total * samples <= self._rows:
            return None
        count = max(1, self._rows // samples)
        if (total, count) not in self._drawn:
            self._drawn[total, count] = sampled_rows(total, count, self._seed)
        return self._drawn[total, count]


ALL = Sampling()
"""Every position counts."""


def products(
    activation: Tensor,
    axis: int,
    groups: int,
    shift: Tensor | None = None,
    sampling: Sampling = ALL,
    spare: Tensor | None = None,
) -> Products:
    """Sums of the channels and of their products with each other, within each group.

    Args:
        activation: floating point, any shape; computed in its precision, in float32 for anything below.
        axis: which axis holds the channels.
        groups: neighboring channels that are multiplied with each other only.
        shift: (channels,), subtracted first.
        sampling: of the positions.
        spare: blocks of an earlier batch, which may be overwritten: taking memory anew costs as much as filling it.
    """
    values = _sampled(activation, axis, sampling)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    samples, channels, positions = values.shape
    count = samples * positions
    if count == 0:
        blocks = values.new_zeros(groups, channels // groups, channels // groups)
        return Products(0, blocks.new_zeros(channels, dtype=_accumulator(values)), blocks)
    if shift is not None:
        values = values - shift.to(values.dtype)[:, None]
    return Products(count, _totals(values), _blocks(values, groups, spare))


def _sampled(activation: Tensor, axis: int, sampling: Sampling) -> Tensor:
    """(samples, channels, positions), or where channels lie innermost (1, channels, positions), a view of rows."""
    maps = activation.movedim(axis, 1) if activation.ndim > 2 else None
    if maps is not None and maps.is_contiguous():
        maps = maps.flatten(2)
        chosen = sampling.of(maps.shape[2], len(maps))
        return maps if chosen is None else maps.gather(2, chosen.to(maps.device).expand(*maps.shape[:2], -1))
    rows = activation.movedim(axis, -1).flatten(0, -2)  # (positions, channels)
    chosen = sampling.of(len(rows))
    return (rows if chosen is None else rows.index_select(0, chosen.to(rows.device))).T[None]


def _totals(values: Tensor) -> Tensor:
    if values.stride(1) == 1 and len(values) == 1:  # rows
        return values[0].T.sum(0, dtype=_accumulator(values))
    return values.sum(2).sum(0, dtype=_accumulator(values))


def _blocks(values: Tensor, groups: int, spare: Tensor | None) -> Tensor:
    samples, channels, positions = values.shape
    if groups == channels:
        norms: Tensor = torch.linalg.vector_norm(values, dim=(0, 2))
        return norms.square().view(-1, 1, 1)
    large = groups == 1 and channels > STRIP
    if samples > 1 and (positions < 4 * channels // groups or (large and values.device.type != "cpu")):
        values = values.transpose(0, 1).flatten(1)[None]  # many small products cost more than laying them side by side
        samples, positions = 1, values.shape[2]
    if large:
        return _symmetric(values.unbind(), spare)
    parts = values.reshape(samples * groups, -1, positions)
    return torch.bmm(parts, parts.mT).view(samples, groups, -1, channels // groups).sum(0)


def _symmetric(matrices: Sequence[Tensor], spare: Tensor | None) -> Tensor:
    """(1, n, n) Sum of the products of matrices, (n, positions) each, with their transposes: the strips of it."""
    size = len(matrices[0])
    fits = spare is not None and spare.dtype == matrices[0].dtype and spare.shape[1] == size
    gram = spare if spare is not None and fits else matrices[0].new_empty(1, size, size)
    for strip in strips(size):
        rows, part = strip[1], gram[strip][0]
        torch.mm(matrices[0][rows], matrices[0][rows.start :].T, out=part)
        for matrix in matrices[1:]:
            part.addmm_(matrix[rows], matrix[rows.start :].T)
    return gram


def _accumulator(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64

"""Second moments of layers' inputs: the C x C Gram matrix of an input's channels, and their means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.hooks.wrappers import unwrapped
from prunekit.settings.calibration import MOMENTS_LIMIT_MIB
from prunekit.statistics.layer_stats import ChannelSums, FloatArray
from prunekit.statistics.patches import sample_rows
from prunekit.statistics.watch import Consumer, ConsumerHooks, find_consumers
from prunekit.utils.globs import matching
from prunekit.utils.tensors import accumulation_dtype, gather

MIB = 2**20
RAISED = 10
"""Factor on the ridge of a Gram matrix of fewer positions than channels: its inverse is arbitrary along directions that
no position showed."""
STRIP = 128
"""Rows of a symmetric product computed at a time, from the diagonal on: the other half is its transpose."""
DOUBTFUL = 1e-2
"""Below this share of the second moment, a variance from float32 products has fewer than four digits."""


@dataclass(frozen=True, eq=False)
class InputMoments(ChannelSums):
    """First and second moments of the channels of a consumer's input, over all samples, places and tokens.

    `count` is the number of positions: samples, times places or tokens, times calls. Sums are in float64, so that parts
    of a data set add up to the whole. Of a grouped convolution only products within a group are stored, of a depthwise
    one the squares.
    """

    blocks: FloatArray
    """(groups, channels / groups, channels / groups) Sums of products, not centered."""

    @property
    def groups(self) -> int:
        """Number of groups of channels; 1: the consumer reads all of them together."""
        return len(self.blocks)

    @property
    def rms(self) -> FloatArray:
        """Root of the mean of x^2, (channels,)."""
        squares: FloatArray = self.blocks.diagonal(axis1=1, axis2=2).reshape(-1) / max(self.count, 1)
        return np.sqrt(squares)

    @property
    def gram(self) -> FloatArray:
        """Sum of x x^T over all positions, (channels, channels); 0 between groups."""
        return _dense(self.blocks)

    @property
    def covariance(self) -> FloatArray:
        """Population covariance (divided by `count`), (channels, channels); 0 between groups."""
        mean = self.mean.reshape(self.groups, -1)
        return _dense(self.blocks / max(self.count, 1) - mean[:, :, None] * mean[:, None, :])

    @property
    def finite(self) -> bool:
        """True if no NaN or Inf got in."""
        return bool(np.isfinite(self.total).all() and np.isfinite(self.blocks).all())

    def rank(self) -> int:
        """Return the numerical rank of the Gram matrix at the precision of float32; at most `count` for each group.

        Below `channels` some channels are sums of others on the calibration data, or dead, and there is no inverse.
        """
        scale = np.sqrt(self.blocks.diagonal(axis1=1, axis2=2))
        scale = np.where(scale > 0, scale, 1)
        alike = self.blocks / (scale[:, :, None] * scale[:, None, :])
        tolerance = alike.shape[1] * float(np.finfo(np.float32).eps)
        ranks = np.linalg.matrix_rank(alike, rtol=tolerance, hermitian=True)
        return int(np.minimum(ranks, self.count).sum())

    @property
    def too_few(self) -> bool:
        """True if there were fewer positions than channels in a group, so that there is no inverse."""
        return self.count < self.channels // self.groups


def _dense(blocks: FloatArray) -> FloatArray:
    groups, size, _ = blocks.shape
    dense: npt.NDArray[np.float64] = np.zeros((groups, size, groups, size))
    dense[np.arange(groups), :, np.arange(groups)] = blocks
    return dense.reshape(groups * size, groups * size)


@dataclass(frozen=True, eq=False)
class MomentSums:
    """Sums of an activation and of its products over positions, around a shift, on the activation's device."""

    count: int
    """Positions: samples, times places or tokens."""
    total: Tensor
    """(channels,) float64."""
    blocks: Tensor
    """(groups, channels / groups, channels / groups), in the precision of the products; undefined below the strips, see
    `mirror_strips`."""

    @property
    def doubtful(self) -> bool:
        """True if the mean of a channel is so large that its variance has lost its digits."""
        if self.blocks.dtype == torch.float64 or self.count == 0:
            return False
        second = self.blocks.diagonal(dim1=1, dim2=2).flatten().double() / self.count
        return bool((second - (self.total / self.count).square() < DOUBTFUL * second).any())

    def add_(self, other: MomentSums) -> MomentSums:
        """Return the sums of both; the blocks are added in place, as a second matrix may not fit in memory."""
        for strip in strips(self.blocks.shape[1]):
            self.blocks[strip].add_(other.blocks[strip])
        return MomentSums(self.count + other.count, self.total + other.total, self.blocks)


Strip = tuple[slice, slice, slice]


def strips(size: int) -> Iterator[Strip]:
    """Yield the strips that make up the upper half of every block of a size."""
    for start in range(0, size, STRIP):
        yield slice(None), slice(start, start + STRIP), slice(start, None)


def mirror_strips(blocks: Tensor) -> Tensor:
    """Fill in the entries below the strips, in place."""
    for every, rows, _ in strips(blocks.shape[1]):
        behind = slice(rows.stop, None)
        blocks[every, behind, rows] = blocks[every, rows, behind].mT
    return blocks


class PositionSampling:
    """A random choice of an activation's positions.

    Args:
        rows: the most positions of one batch; None: all.
        seed: of the batch.
    """

    def __init__(self, rows: int | None = None, seed: int = 0) -> None:
        self._rows, self._seed = rows, seed
        self._drawn: dict[tuple[int, int], Tensor] = {}

    def positions(self, total: int, samples: int = 1) -> Tensor | None:
        """Return positions among `total`, ascending, the same in each of some samples; None: all of them."""
        if self._rows is None or total * samples <= self._rows:
            return None
        count = max(1, self._rows // samples)
        if (total, count) not in self._drawn:
            self._drawn[total, count] = sample_rows(total, count, self._seed)
        return self._drawn[total, count]


ALL = PositionSampling()
"""The choice of all positions."""


def products(
    activation: Tensor,
    axis: int,
    groups: int,
    shift: Tensor | None = None,
    sampling: PositionSampling = ALL,
    spare: Tensor | None = None,
) -> MomentSums:
    """Return the sums of the channels and of their products with each other, within each group.

    Args:
        activation: floating point, any shape; computed in its precision, in float32 for anything below.
    """
    values = _sampled(activation, axis, sampling)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    samples, channels, positions = values.shape
    count = samples * positions
    if count == 0:
        blocks = values.new_zeros(groups, channels // groups, channels // groups)
        return MomentSums(0, blocks.new_zeros(channels, dtype=accumulation_dtype(values.device)), blocks)
    if shift is not None:
        values = values - shift.to(values.dtype)[:, None]
    return MomentSums(count, _totals(values), _blocks(values, groups, spare))


def _sampled(activation: Tensor, axis: int, sampling: PositionSampling) -> Tensor:
    """Return (samples, channels, positions), or (1, channels, positions), a view, where channels are innermost."""
    maps = activation.movedim(axis, 1) if activation.ndim > 2 else None
    if maps is not None and maps.is_contiguous():
        maps = maps.flatten(2)
        chosen = sampling.positions(maps.shape[2], len(maps))
        return maps if chosen is None else maps.gather(2, chosen.to(maps.device).expand(*maps.shape[:2], -1))
    rows = activation.movedim(axis, -1).flatten(0, -2)  # (positions, channels)
    chosen = sampling.positions(len(rows))
    return (rows if chosen is None else rows.index_select(0, chosen.to(rows.device))).T[None]


def _totals(values: Tensor) -> Tensor:
    if values.stride(1) == 1 and len(values) == 1:  # rows
        return values[0].T.sum(0, dtype=accumulation_dtype(values.device))
    return values.sum(2).sum(0, dtype=accumulation_dtype(values.device))


def _blocks(values: Tensor, groups: int, spare: Tensor | None) -> Tensor:
    samples, channels, positions = values.shape
    if groups == channels:
        norms: Tensor = torch.linalg.vector_norm(values, dim=(0, 2))
        return norms.square().view(-1, 1, 1)
    large = groups == 1 and channels > STRIP
    if samples > 1 and (positions < 4 * channels // groups or (large and values.device.type != "cpu")):
        values = values.transpose(0, 1).flatten(1)[None]  # many small products cost more than one concatenation
        samples, positions = 1, values.shape[2]
    if large:
        return _symmetric(values.unbind(), spare)
    parts = values.reshape(samples * groups, -1, positions)
    return torch.bmm(parts, parts.mT).view(samples, groups, -1, channels // groups).sum(0)


def _symmetric(matrices: Sequence[Tensor], spare: Tensor | None) -> Tensor:
    """Return the strips of the summed products of matrices (n, positions) with their transposes, (1, n, n)."""
    size = len(matrices[0])
    fits = spare is not None and spare.dtype == matrices[0].dtype and spare.shape[1] == size
    gram = spare if spare is not None and fits else matrices[0].new_empty(1, size, size)
    for strip in strips(size):
        rows, part = strip[1], gram[strip][0]
        torch.mm(matrices[0][rows], matrices[0][rows.start :].T, out=part)
        for matrix in matrices[1:]:
            part.addmm_(matrix[rows], matrix[rows.start :].T)
    return gram


class MomentsCollector(ConsumerHooks):
    """Collects the Gram matrix and the mean of every consumer's input, as a context manager of hooks.

    A consumer is a layer that multiplies its input with a weight of the model, whatever its module. Every forward pass
    inside the `with` counts; a layer that is called more than once sums over its calls. Of an input with more than
    `positions` places or tokens for each image, that many are drawn at random, others for each batch and the same for
    the same batches: neighboring places have nearly the same values, and products of all of them would cost more than
    the forward pass. `InputMoments.count` is how many were drawn.

    Products are computed in the activation's precision, float32 at least, and summed in float64; where a large mean
    would cost a variance its digits they are computed around the first batch's mean.

    Args:
        model: the model, not compiled.
        images: a few samples on the model's device, on which it runs once, so that the layers and the memory are known.
        ignore: globs over paths of consumers to leave out.
        limit_mib: the most memory of the sums, in MiB.
        positions: of each image, at most; None: all of them.

    Raises:
        UsageError: the sums need more memory; names the largest. Or a glob matches no consumer.
        ModelError: the model is compiled.
    """

    _running: dict[str, MomentSums]

    def __init__(
        self,
        model: nn.Module,
        images: Any,
        *,
        ignore: Sequence[str] = (),
        limit_mib: int = MOMENTS_LIMIT_MIB,
        positions: int | None = None,
    ) -> None:
        model = unwrapped(model, offloaded=True, compiled=False)
        super().__init__(model)
        self.consumers = find_consumers(model, images)
        self._left_out = {path for glob in ignore for path in matching(glob, self.consumers, "moments_ignore")}
        wide = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        found = {path: consumer for path, consumer in self.consumers.items() if path not in self._left_out}
        self.bytes = {path: _bytes(consumer, wide) for path, consumer in found.items()}
        self._require_room(limit_mib)
        self.positions = positions
        self._sampling = PositionSampling()
        self._sums: dict[str, MomentSums] = {}
        self._shifts: dict[str, Tensor | None] = {}
        self._spare: dict[str, Tensor] = {}

    @property
    def memory(self) -> str:
        """The memory that the sums take, and the positions that they are of, in words; known from the start."""
        if not self.bytes:
            return "no layer reads channels through a weight"
        path, largest = max(self.bytes.items(), key=lambda item: item[1])
        sampled = "all positions" if self.positions is None else f"at most {self.positions} positions of each image"
        return (
            f"Gram matrices of {len(self.bytes)} layers' inputs, over {sampled}, take "
            f"{sum(self.bytes.values()) / MIB:.1f} MiB, the largest {largest / MIB:.1f} MiB ({path or 'the model'}, "
            f"{self.consumers[path].channels} channels)"
        )

    def moments(self) -> dict[str, InputMoments]:
        """Return the moments so far, by the consumer's path, in the order in which they first ran.

        Raises:
            UsageError: the model has not run inside the `with`.
        """
        self.require_passes()
        return {path: _unshifted(sums, self._shifts[path]) for path, sums in self._sums.items()}

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self.inside:
            rows = None if self.positions is None else self.positions * _images(arguments, named)
            self._sampling = PositionSampling(rows, self.number)
        super()._enter(module, arguments, named)

    def on_input(self, consumer: Consumer, values: Tensor, axis: int) -> None:
        """Add the products of an input to the running pass."""
        if consumer.path in self._left_out:
            return
        found = self._products(consumer, values, (axis, consumer.groups))
        known = self._running.get(consumer.path)
        self._running[consumer.path] = found if known is None else _added(known, found)

    def finish_pass(self) -> None:
        """Add the sums of the finished pass."""
        for path, found in self._running.items():
            known = self._sums.get(path)
            own = replace(found, blocks=found.blocks.to(found.total.dtype, copy=True)) if known is None else None
            self._sums[path] = own or self._sums[path].add_(found)
        once = {id(found.blocks): (path, found.blocks) for path, found in self._running.items()}  # some share them
        self._spare = dict(once.values())
        self.start_pass()

    def _products(self, consumer: Consumer, values: Tensor, how: tuple[int, int]) -> MomentSums:
        """Return the products of an input, from the cache where another layer read the same tensor."""
        known: tuple[MomentSums, Tensor | None] | None = self._cache.get(values, how)
        if known is not None and self._shifts.setdefault(consumer.path, known[1]) is known[1]:
            return known[0]
        found = self._computed(consumer.path, values, how)
        self._cache.put(values, how, (found, self._shifts[consumer.path]))
        return found

    def _computed(self, path: str, values: Tensor, how: tuple[int, int]) -> MomentSums:
        """Return products around 0, or around the first batch's mean if around 0 they would be too inexact."""
        values, axis = self.without_padding(values, how[0])
        how = axis, how[1]
        if path not in self._shifts:
            first = products(values, *how, sampling=self._sampling)
            self._shifts[path] = first.total / first.count if first.doubtful else None
            if not first.doubtful:
                return first
        return products(values, *how, self._shifts[path], self._sampling, self._spare.pop(path, None))

    def _require_room(self, limit_mib: int) -> None:
        total = sum(self.bytes.values()) / MIB
        if total <= limit_mib:
            return
        path, largest = max(self.bytes.items(), key=lambda item: item[1])
        raise UsageError(
            f"moments: the Gram matrices of {len(self.bytes)} layers' inputs take {total:,.0f} MiB, more than the "
            f"limit of {limit_mib:,} MiB; the largest is that of {path!r}: {self.consumers[path].channels:,} channels, "
            f"{largest / MIB:,.0f} MiB. Leave it out with moments_ignore ([{path}]), or raise moments_limit_mib; both "
            "are keys of calibration in a recipe and arguments of calibrate"
        )


def _images(arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    """Return the number of samples: of a list, as detection models take, or of the first tensor's first axis."""
    if arguments and isinstance(arguments[0], (list, tuple)):
        return len(arguments[0])
    first = next(iter(gather((arguments, named))), None)
    return 1 if first is None or not first.dim() else len(first)


def _bytes(consumer: Consumer, wide: bool) -> int:
    """Return the memory of the sums in float64, and of the running pass in the model's precision."""
    return int(consumer.channels**2 // consumer.groups * (8 + (8 if wide else 4)))


def _added(left: MomentSums, right: MomentSums) -> MomentSums:
    return MomentSums(left.count + right.count, left.total + right.total, left.blocks + right.blocks)


def _unshifted(sums: MomentSums, shift: Tensor | None) -> InputMoments:
    """Return the moments around 0 from sums around a shift."""
    total, blocks = sums.total.cpu().double(), mirror_strips(sums.blocks.cpu().double())
    if shift is not None:
        mean = shift.cpu().double().view(len(blocks), -1)
        parts = total.view(len(blocks), -1)
        cross = parts[:, :, None] * mean[:, None, :]
        blocks = blocks + cross + cross.mT + sums.count * mean[:, :, None] * mean[:, None, :]
        total = total + sums.count * mean.flatten()
    return InputMoments(sums.count, total.numpy().copy(), blocks.numpy().copy())

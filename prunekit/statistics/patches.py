"""Patches that convolutions and linear layers read: unfolded at sampled positions, and their Gram matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prunekit.utils.inputs import Counted
from prunekit.utils.tensors import is_finite

CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
BLOCK = 4096
"""Rows whose products are summed at a time."""
HALVED = 512
"""Columns from which on their products with each other are computed half by half."""


@dataclass(frozen=True)
class PatchGeometry:
    """The geometry of a convolution or a linear layer; a row is one position of one sample of its output."""

    # kernel, stride, padding, dilation: one entry for each spatial axis; none for a linear layer
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1  # of the convolution

    @property
    def taps(self) -> int:
        """Number of values that a row reads of each input channel."""
        return prod(self.kernel)

    @property
    def middle(self) -> int:
        """The tap at the center of the kernel, counted in order; the first if there is no center."""
        return self.taps // 2 if all(size % 2 for size in self.kernel) else 0

    def rows(self, output: Tensor) -> int:
        """Return the number of rows of an output."""
        return prod(self.positions(output))

    def counted(self, positions: Sequence[int], counted: Counted | None) -> Tensor | None:
        """Return the rows of an output that are not padding, (N,), ascending; None if none is padding.

        `positions` is the shape of its rows: (B, T, ...) of tokens or of a convolution along them.
        """
        mask = None if counted is None or len(self.kernel) > 1 else counted.of(positions)
        if mask is None:
            return None
        return mask.flatten().cpu().repeat_interleave(prod(positions[mask.dim() :])).nonzero().flatten()

    def positions(self, output: Tensor) -> tuple[int, ...]:
        """Return the shape of an output's rows."""
        return (len(output), *output.shape[2:]) if self.kernel else tuple(output.shape[:-1])

    def positions_of(self, inputs: Tensor) -> tuple[int, ...]:
        """Return the shape of the rows of the output for an input."""
        return (len(inputs), *self.spatial(inputs)) if self.kernel else tuple(inputs.shape[:-1])

    def spatial(self, inputs: Tensor) -> tuple[int, ...]:
        """Return the spatial sizes of the output for an input."""
        return self.spatial_of(tuple(inputs.shape[2:]))

    def spatial_of(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial sizes of the output for those of an input."""
        if not self.kernel:
            return ()
        axes = zip(sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * pad - step * (k - 1) - 1) // stride + 1 for n, k, stride, pad, step in axes)

    def rows_of(self, inputs: Tensor) -> int:
        """Return the number of rows of the output for an input."""
        return prod(self.positions_of(inputs))

    def places(self, rows: Tensor, spatial: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the positions of the input that each row reads, (N, taps), as rows of it; and whether they exist."""
        found = (rows // prod(spatial))[:, None].expand(-1, self.taps)
        there = torch.ones_like(found, dtype=torch.bool)
        if not self.kernel:
            return rows[:, None], there
        taps = torch.unravel_index(torch.arange(self.taps, device=rows.device), self.kernel)
        starts = torch.unravel_index(rows % prod(spatial), spatial)
        for i, size in enumerate(sizes):
            at = starts[i][:, None] * self.stride[i] - self.padding[i] + taps[i] * self.dilation[i]
            there &= (at >= 0) & (at < size)
            found = found * size + at.clamp(0, size - 1)
        return found, there

    def outputs(self, output: Tensor, rows: Tensor) -> Tensor:
        """Return some rows of a tensor shaped like the output, (N, channels)."""
        if not self.kernel:
            return output.reshape(-1, output.shape[-1]).index_select(0, rows)
        positions = output.shape[2:].numel()
        return output.flatten(2)[rows // positions, :, rows % positions]

    def channels(self, inputs: Tensor, index: Tensor) -> Tensor:
        """Return some channels of an input, ascending; all of them without a copy."""
        axis = 1 if self.kernel else inputs.dim() - 1
        if len(index) == inputs.shape[axis]:
            return inputs
        return inputs[:, index] if self.kernel else inputs.index_select(axis, index)  # indexing takes six times as long

    def centers(self, inputs: Tensor, rows: Tensor, spatial: tuple[int, ...]) -> Tensor:
        """Return the input at the middle tap of each row, (N, channels); `spatial` are the output's sizes."""
        return self.patches(inputs, rows, spatial)[:, self.middle :: self.taps]

    def patches(self, inputs: Tensor, rows: Tensor, spatial: tuple[int, ...]) -> Tensor:
        """Return the patches of rows, (N, channels * taps), channel by channel; `spatial` are the output's sizes."""
        if not self.kernel:
            return inputs.reshape(-1, inputs.shape[-1]).index_select(0, rows)
        if any(self.padding):
            inputs = F.pad(inputs, [size for size in reversed(self.padding) for _ in range(2)])
        outer, inner = inputs.stride()[:2], inputs.stride()[2:]
        steps = [step * size for step, size in zip(inner, self.stride, strict=True)]
        taps = [step * size for step, size in zip(inner, self.dilation, strict=True)]
        windows = inputs.as_strided((*inputs.shape[:2], *spatial, *self.kernel), (*outer, *steps, *taps))
        positions, index = prod(spatial), list[Tensor]()
        rest = rows % positions
        for size in reversed(spatial):
            index.insert(0, rest % size)
            rest = rest // size
        where: Any = (rows // positions, slice(None), *index)
        return windows[where].flatten(1)


def geometry_of(name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> PatchGeometry | None:
    """Return the geometry of a call of a linear layer, or of `conv1d` to `conv3d`; None if it is not supported."""
    if name not in CONVOLUTIONS:
        return PatchGeometry()
    axes = CONVOLUTIONS[name]
    values = [
        args[i] if len(args) > i else named.get(key, default)
        for i, key, default in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1), (6, "groups", 1))
    ]
    if args[0].dim() != axes + 2 or isinstance(values[1], str):
        return None
    stride, padding, dilation = (_each(value, axes) for value in values[:3])
    return PatchGeometry(tuple(args[1].shape[2:]), stride, padding, dilation, int(values[3]))


def _each(value: int | tuple[int, ...], axes: int) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (int(value),)
    return sizes if len(sizes) == axes else sizes * axes


def gram_bytes(columns: int) -> int:
    """Return the memory of a Gram matrix of that many columns and one constant, in float64."""
    return 8 * (columns + 1) ** 2


def with_constant(inputs: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return inputs (N, d) with a last column of ones, (N, d + 1), and rows multiplied by factors (N,), if any."""
    wide = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)
    if factors is None:
        return wide
    return wide * factors.to(wide.dtype if wide.dtype.itemsize > 2 else torch.float32)[:, None]


def gram(inputs: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return the mean products of all columns of (N, d) and a constant one, (d + 1, d + 1), see `mean_products`.

    Rows are multiplied by `factors`, (N,), if there are some.
    """
    wide = with_constant(inputs, factors)
    return mean_products(wide, wide)


@dataclass(frozen=True, eq=False)
class FewRows:
    """Rows of what a layer reads, fewer than its columns, so that products of rows are smaller than those of columns.

    With X the rows over the root of their number N, less their share of the constant, X^T X without it is their Gram
    matrix, and (X^T X + r)^-1 X^T = X^T (X X^T + r)^-1; so (X^T X + r)^-1 = (1 - X^T (X X^T + r)^-1 X) / r (Woodbury
    1950).
    """

    read: Tensor  # (N, d) X
    constant: Tensor  # (N, 1) over that root, or (N, 0) without a bias
    shares: Tensor  # (1, d) or (0, d) that share of each column, as a factor of the constant

    @classmethod
    def of(cls, read: Tensor, constant: Tensor) -> FewRows:
        """Return rows (N, d) with the constant of each, (N, 1), or (N, 0) without a bias."""
        read, constant = read / len(read) ** 0.5, constant / len(read) ** 0.5
        shares = torch.linalg.lstsq(constant, read).solution if constant.numel() else read[:0]
        return cls(read - constant @ shares, constant, shares)

    def products(self, ridge: float = 0.0, columns: slice = slice(None)) -> Tensor:
        """Return X X^T + r of some columns, (N, N) float64."""
        some = self.read[:, columns].T
        found = mean_products(some, some).mul_(len(some))
        found.diagonal().add_(ridge)
        return found

    def weights(self, outputs: Tensor, factor: Tensor) -> Tensor:
        """Return the least-squares weights for outputs (N, o), the constant's last, by the factor of products."""
        outputs = outputs / len(outputs) ** 0.5
        own = torch.linalg.lstsq(self.constant, outputs).solution if len(self.shares) else outputs[:0]
        sums = torch.cholesky_solve((outputs - self.constant @ own).double(), factor)
        found = self.read.T @ sums.to(self.read.dtype)
        return torch.cat([found, own - self.shares @ found]).double()


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Return the solution for a symmetric matrix, or a stack of them, positive definite up to rounding: by Cholesky.

    That takes half the time of an LU decomposition, whose row swaps (DLASWP) oneMKL at times refuses with threads.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    solved: Tensor = torch.linalg.solve(matrix, right) if bool(failed.any()) else torch.cholesky_solve(right, factor)
    return solved


def mean_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the mean over rows of the products of columns, (N, d), (N, o) -> (d, o), summed in float64 by blocks.

    Within a block float32 values are multiplied and summed as float32, in half the time of float64: over `BLOCK` rows
    that is as exact as the values themselves.
    """
    kind = summing_type(left)
    parts = zip(torch.split(left, BLOCK), torch.split(right, BLOCK), strict=True)
    same = left is right
    products = (_own_products(one.to(kind)) if same else one.to(kind).T @ other.to(kind) for one, other in parts)
    total = next(products).double()
    for more in products:
        total += more
    if kind == torch.float32 and not is_finite(total):  # squares of 1e19 exceed float32
        return mean_products(left.double(), right.double())
    return total.div_(len(left))


def _own_products(values: Tensor) -> Tensor:
    """Return the products of columns with each other, summed over rows; those of two halves are computed only once."""
    half = values.shape[1] // 2
    if 2 * half < HALVED:
        return values.T @ values
    first, second = values[:, :half], values[:, half:]
    across = first.T @ second
    rows = torch.cat([_own_products(first), across], 1), torch.cat([across.T, _own_products(second)], 1)
    return torch.cat(rows)


def apply_weight(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return inputs times a weight in float64, (N, d), (d, o) -> (N, o), multiplied as by `mean_products`."""
    return product(inputs, weight).double()


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return inputs times a weight in the type of sums, (N, d), (d, o) -> (N, o)."""
    kind = summing_type(inputs)
    return inputs.to(kind) @ weight.to(kind)


def summing_type(values: Tensor) -> torch.dtype:
    """Return the type of products: float32 only where they are not rounded further, to TF32 or bfloat16."""
    plain = values.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"
    return torch.float32 if plain and values.dtype == torch.float32 else torch.float64


def sample_rows(total: int, count: int, seed: int, among: Tensor | None = None) -> Tensor:
    """Return at most `count` random rows of `total`, or of those in `among`, without repetition, ascending."""
    if among is not None:
        return among[sample_rows(len(among), count, seed)]
    generator = torch.Generator().manual_seed(seed)
    if count >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=generator)[:count].sort().values


def with_strides_of(index: Tensor, values: Tensor) -> Tensor:
    """Return an index with the strides of its values, so that views and reshapes treat both alike."""
    if index.stride() == values.stride():
        return index
    strided = torch.empty_strided(values.shape, values.stride(), dtype=index.dtype, device=index.device)
    return strided.copy_(index)

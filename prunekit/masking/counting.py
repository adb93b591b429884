"""Counts of values by module path, added up where the values are: nothing waits for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Count = Tensor | int
"""How many; on another device than the CPU a tensor without axes, which is read at the end."""
BLOCK = 2**17
"""Values counted at a time on the CPU: they stay in the cache, and their number is exact in float32."""


class Tally:
    """Shares by path: how many of how many."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}
        self._totals: dict[str, int] = {}

    def add(self, path: str, count: Count, total: int) -> None:
        """Adds `count` of `total`."""
        self._counts[path] = self._counts.get(path, 0) + count
        self._totals[path] = self._totals.get(path, 0) + total

    def counts(self) -> dict[str, int]:
        """How many so far."""
        return {path: int(count) for path, count in self._counts.items()}

    def totals(self) -> dict[str, int]:
        """Of how many."""
        return dict(self._totals)

    def shares(self) -> dict[str, float]:
        """Each count by its total, 0..1; without paths that have no total."""
        return {path: count / self._totals[path] for path, count in self.counts().items() if self._totals[path]}


def as_it_lies(tensor: Tensor) -> Tensor:
    """A tensor as a vector, in the order in which it lies in memory: no copy of a dense one."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def count_zeros(tensor: Tensor) -> Count:
    """How many values are exactly 0."""
    if tensor.device.type != "cpu":
        return tensor.numel() - torch.count_nonzero(tensor.detach())
    return sum([_count(torch.eq, block, 0) for block in torch.split(as_it_lies(tensor), BLOCK)])


def count_beyond(tensor: Tensor, limit: float | Tensor) -> Count:
    """How many values are above `limit` or below `-limit`; NaN is neither."""
    if tensor.device.type != "cpu":
        return torch.count_nonzero(tensor.detach().abs() > limit)
    return sum([_count(torch.gt, block.abs(), limit) for block in torch.split(as_it_lies(tensor), BLOCK)])


def _count(compare: Callable[..., Tensor], block: Tensor, number: float | Tensor) -> int:
    # Ones and zeros as float32 are made and summed several times faster than bools, or than count_nonzero.
    return int(compare(block, number, out=torch.empty_like(block, dtype=torch.float32)).sum())

"""Counts of values by module path, added up where the values are: nothing waits for a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from prunekit.layout import as_it_lies

Count = Tensor | int
"""How many; on another device than the CPU a tensor without axes, which is read at the end."""
BLOCK = 2**18
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

    def state_dict(self) -> dict[str, dict[str, int]]:
        """The counts so far."""
        return {"counts": self.counts(), "totals": self.totals()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Goes on from counts."""
        self._counts, self._totals = dict(state["counts"]), dict(state["totals"])

    def shares(self) -> dict[str, float]:
        """Each count by its total, 0..1; without paths that have no total."""
        return {path: count / self._totals[path] for path, count in self.counts().items() if self._totals[path]}


def scratch_for(values: Tensor) -> Tensor:
    """Room for one block's comparisons: made once, because to make it costs more than to compare."""
    return torch.empty(min(BLOCK, values.numel()), dtype=torch.promote_types(values.dtype, torch.float32))


def count_zeros(tensor: Tensor) -> Count:
    """How many values are exactly 0."""
    if tensor.device.type != "cpu":
        return tensor.numel() - torch.count_nonzero(tensor.detach())
    flat = as_it_lies(tensor)
    scratch = scratch_for(flat)
    # Ones and zeros as float32 are made and summed several times faster than bools, or than count_nonzero.
    return sum([int(torch.eq(block, 0, out=scratch[: len(block)]).sum()) for block in torch.split(flat, BLOCK)])


def count_beyond(values: Tensor, limit: float, scratch: Tensor) -> int:
    """How many of a block's values, (n,) with n at most `BLOCK`, are above `limit` or below `-limit`; not NaN."""
    room = scratch[: len(values)]
    magnitudes = torch.abs(values, out=room) if values.dtype == room.dtype else room.copy_(values).abs_()
    return int(torch.gt(magnitudes, limit, out=room).sum())

"""What is kept of a tensor in place of a copy: a function of it, or one of those here by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from prunekit.errors import UsageError, nearest

Named = Literal["mean", "moments", "extremes"]
Reducer = Callable[[Tensor], Any]
"""Gets a tensor, which a later layer may overwrite; what it returns is kept."""
ByChannel = Callable[[Tensor, int], Any]
"""Likewise with the axis that holds the channels."""


def reducer_of(given: Named | Reducer | None) -> ByChannel:
    """The function that a name stands for; None copies.

    Raises:
        UsageError: there is no such name.
    """
    if given is None:
        return lambda values, axis: values
    if callable(given):
        return lambda values, axis: given(values)
    if given not in REDUCERS:
        raise UsageError(f"reduce: expected a function, or the name of one; {nearest(str(given), get_args(Named))}")
    named = REDUCERS[given]
    return lambda values, axis: named(values, axis) if values.dim() else named(values[None], 0)


def mean(values: Tensor, axis: int) -> Tensor:
    """(channels,) The mean of each channel."""
    return _wide(values).mean(_others(values, axis))


def moments(values: Tensor, axis: int) -> Tensor:
    """(2, channels) Mean and root mean square of each channel, each in one pass over the values."""
    others, wide = _others(values, axis), _wide(values)
    count = max(values.numel() // max(values.shape[axis], 1), 1)
    return torch.stack((wide.mean(others), torch.linalg.vector_norm(wide, dim=others) / count**0.5))


def extremes(values: Tensor, axis: int) -> Tensor:
    """(2, channels) Least and greatest value of each channel."""
    others = _others(values, axis)
    return torch.stack((values.amin(others), values.amax(others)))


def _others(values: Tensor, axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(values.dim()) if other != axis)


def _wide(values: Tensor) -> Tensor:
    """In a type that sums do not overflow, and that has fractions."""
    return values if values.dtype in (torch.float32, torch.float64) or values.is_complex() else values.float()


REDUCERS: dict[str, ByChannel] = {"mean": mean, "moments": moments, "extremes": extremes}

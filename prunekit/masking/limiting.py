"""A gradient held below a limit, by value or by norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from prunekit.distributed.exchange import total_of
from prunekit.distributed.shards import is_shard, local
from prunekit.layout import as_it_lies
from prunekit.masking.counting import BLOCK, Count, count_beyond, scratch_for

By = Literal["value", "norm"]
LossScale = float | Tensor | torch.amp.GradScaler | Callable[[], float | Tensor]
"""What the loss was multiplied by, or who knows it."""


def limited(gradient: Tensor, limit: float | Tensor, by: By, *, inplace: bool = False) -> tuple[Tensor | None, Count]:
    """A gradient with no value, or no l2 norm, beyond a limit; of a shard the norm is that of the whole.

    By value, Inf becomes the limit and NaN stays NaN. By norm, a gradient whose norm is not finite stays as it is.

    Args:
        gradient: changed only where `inplace` is set.
        limit: a number on the CPU; on another device also a tensor there, which nothing waits for.
        by: what is limited.
        inplace: whether the result is written into `gradient`.

    Returns:
        The result (None: `gradient` as it was), and how many values (by norm: gradients, 0 or 1) were beyond. Of a
        shard this process's part of both.
    """
    part = local(gradient)
    if by == "value":
        return _by_value(part, limit, inplace)
    # The norm of half-precision values may be beyond their range.
    wide = torch.float32 if part.dtype.itemsize < 4 else part.dtype
    norm = torch.linalg.vector_norm(as_it_lies(part), dtype=wide)
    return _by_norm(part, total_of(norm.double() ** 2).sqrt() if is_shard(gradient) else norm, limit, inplace)


def scaled(limit: float, scale: LossScale | None, device: torch.device) -> float | Tensor:
    """A limit for gradients that were multiplied by a loss scale; a number on the CPU."""
    if scale is None:
        return limit
    if isinstance(scale, torch.amp.GradScaler):
        scale = scale.scale(torch.ones((), device=device))  # `get_scale()` would wait for the device
    elif not isinstance(scale, (int, float, Tensor)):
        scale = scale()
    return limit * float(scale) if device.type == "cpu" else limit * scale


def _by_value(gradient: Tensor, limit: float | Tensor, inplace: bool) -> tuple[Tensor | None, Count]:
    if not isinstance(limit, Tensor) and limit > torch.finfo(gradient.dtype).max:
        return None, 0
    if gradient.device.type != "cpu" or gradient.requires_grad:  # a second-order gradient needs an operation with one
        beyond: Count = torch.count_nonzero(gradient.detach().abs() > limit)
        return (gradient.clamp_ if inplace else gradient.clamp)(-limit, limit), beyond  # type: ignore[arg-type]
    bound = float(limit)
    if not inplace:
        if _within(as_it_lies(gradient), bound):
            return None, 0
        gradient = gradient.clone()
    flat = as_it_lies(gradient)
    scratch, beyond = None, 0
    for block in torch.split(flat, BLOCK) if len(flat) > BLOCK else (flat,):
        if not _within(block, bound):  # what this brought into the cache is counted and clamped there
            scratch = scratch_for(flat) if scratch is None else scratch
            beyond += count_beyond(block, bound, scratch)
            block.clamp_(-bound, bound)
    if flat.data_ptr() != gradient.data_ptr():  # it lies with gaps, and `flat` was a copy
        gradient.clamp_(-bound, bound)
    return gradient, beyond


def _within(values: Tensor, limit: float) -> bool:
    """Whether no value is beyond a limit; NaN is."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return -limit <= float(low) and float(high) <= limit


def _by_norm(gradient: Tensor, norm: Tensor, limit: float | Tensor, inplace: bool) -> tuple[Tensor | None, Count]:
    beyond: Count
    factor: float | Tensor
    if gradient.device.type == "cpu":
        size = float(norm)
        if not limit < size < math.inf:
            return None, 0
        factor, beyond = float(limit) / size, 1
    else:
        needed = (norm > limit) & norm.isfinite()
        factor, beyond = torch.where(needed, limit / norm, 1.0), needed.long()
    return gradient.mul_(factor) if inplace else gradient * factor, beyond

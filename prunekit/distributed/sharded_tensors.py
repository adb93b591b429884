"""Sharded tensors: parameters, gradients and momentum of which each process has a part (DTensor)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing its module, which takes most of a second."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Return whether each process has only a part of the model's parameters."""
    return any(is_shard(parameter) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the same memory; the tensor itself if it is not sharded."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        return cast("Tensor", tensor.to_local())  # type: ignore[attr-defined]


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, from all processes, which must all call this; itself if it is not sharded."""
    return cast("Tensor", tensor.full_tensor()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded like another one; itself if that is not sharded or has another shape."""
    if not is_shard(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

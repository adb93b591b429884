"""Tensors of which each process has a part: the parameters of a sharded model, their gradients and momentum."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def is_shard(tensor: Tensor) -> bool:
    """Whether this is a DTensor; asked without an import of its module, which takes most of a second."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> bool:
    """Whether each process has only a part of the model's parameters."""
    return any(is_shard(parameter) for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory; the tensor itself where it is whole."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        return cast("Tensor", tensor.to_local())  # type: ignore[attr-defined]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A tensor put together from the parts of all processes, which must all ask; itself where it is whole."""
    return cast("Tensor", tensor.full_tensor()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def spread(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor in parts that lie where those of another do; itself where that is whole or of another shape.

    Args:
        tensor: the same in all processes; nothing is sent.
        like: on whose device the parts are.
    """
    if not is_shard(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

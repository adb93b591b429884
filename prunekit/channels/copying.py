"""A model's structure with other tensors in it: the weights are never copied, only exchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from prunekit.errors import ModelError


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, each tensor once: a tied one under its first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def with_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of a model's structure that holds `tensors` in place of its own.

    Args:
        model: left as it is; parameters stay parameters with their `requires_grad`, buffers stay buffers.
        tensors: one for each name of `named_tensors(model)`; a missing name keeps a copy of the model's tensor.

    Raises:
        ModelError: the model holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(model):
        new = tensors.get(name)
        if new is None:
            continue
        if isinstance(tensor, nn.Parameter):
            trainable = tensor.requires_grad and new.is_floating_point()
            new = nn.Parameter(new, requires_grad=trainable)
        memo[id(tensor)] = new
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied: {error}; expected a module whose attributes "
            "copy.deepcopy understands (no tensors with a grad_fn, locks or open files)"
        ) from error

"""State of a model beside the values in its tensors: classes, attributes, hooks, training flags, gradients."""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import nn

_CONTAINERS = (dict, list, set)


class ModuleState:
    """The state of a model at one moment, to go back to.

    Dictionaries, lists and sets that are attributes, and those of parameters, buffers, submodules and hooks, hold
    afterwards what they held; what was written into a tensor stays.

    Args:
        model: that the state is of.
        without: attributes that are left as they are.
    """

    def __init__(self, model: nn.Module, without: Container[str] = ()) -> None:
        self._without = without
        self._modules = [_ModuleParts.of(module, without) for module in model.modules()]

    def restore(self) -> None:
        """Go back to this state."""
        for module, kind, own, held in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            attributes = vars(module)
            for name in [name for name in attributes if name not in own and name not in self._without]:
                del attributes[name]
            attributes.update(own)
            for value, content in held:
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)


class _ModuleParts(NamedTuple):
    """A module, its class, its attributes, and those of them that are containers, with a copy each."""

    module: nn.Module
    kind: type[nn.Module]
    own: dict[str, Any]
    held: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module, without: Container[str]) -> _ModuleParts:
        own = {name: value for name, value in vars(module).items() if name not in without}
        held = [(value, copy(value)) for value in own.values() if isinstance(value, _CONTAINERS)]
        return cls(module, type(module), own, held)


class GradientState:
    """The gradients of a model's parameters, who of them has any, and the hooks on them, to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self._leaves = [
            (one, one.requires_grad, one.grad, [{*hooks} for hooks in _hooks_of(one)])
            for one in model.parameters()
            if one.is_leaf
        ]

    def restore(self) -> None:
        """Go back to this state."""
        for tensor, wanted, gradient, before in self._leaves:
            if tensor.requires_grad != wanted:
                tensor.requires_grad_(wanted)
            if tensor.grad is not gradient:
                tensor.grad = gradient
            for hooks, known in zip(_hooks_of(tensor), before, strict=True):
                for key in [key for key in hooks if key not in known]:
                    del hooks[key]


def _hooks_of(tensor: torch.Tensor) -> tuple[MutableMapping[int, Any], ...]:
    found: tuple[Mapping[int, Any] | None, ...] = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return tuple({} if hooks is None else hooks for hooks in found)  # type: ignore[misc]

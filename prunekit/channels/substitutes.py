"""Attention modules whose Python fixes their sizes, and equivalents with explicit sizes: a closed list.

The model that is masked stays as it is. The trace follows the equivalents, which compute the same from the same
parameters, and a compact model has one wherever the original class cannot express the sizes that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import nn

from prunekit.channels.copying import named_tensors
from prunekit.channels.labels import Labels

Heads = dict[str, tuple[str, int]]
"""Module path -> name of the substituted class, and the number of heads that are left."""


class SizedAttention(nn.Module):
    """What the equivalents have in common; each also is a subclass of the class it stands for.

    Attributes:
        heads: name of the attribute that holds the number of heads.
        projection: name of the linear layer behind the heads, whose input lies head by head.
        scale: what attention scores are multiplied by: that of the dense model, whatever is pruned.
    """

    heads = "num_heads"
    projection = "proj"
    scale: float

    def dense_scale(self) -> float:
        """The scale that the original computes from its dense sizes."""
        raise NotImplementedError

    def take_sizes(self) -> None:
        """Reads all sizes but the number of heads off the tensors."""

    def fits_original(self) -> bool:
        """Whether the original class can express the sizes, so that nothing need be substituted."""
        raise NotImplementedError


Class = TypeVar("Class", bound=type[SizedAttention])
SUBSTITUTES: dict[type[nn.Module], type[SizedAttention]] = {}


def substitute(original: type[nn.Module]) -> Callable[[Class], Class]:
    """Registers the equivalent of a class; of exactly that one, as a subclass may compute something else.

    Raises:
        ValueError: the class has an equivalent already.
    """

    def register(ours: Class) -> Class:
        if original in SUBSTITUTES:
            raise ValueError(f"{original.__name__} already has an equivalent: {SUBSTITUTES[original].__name__}")
        SUBSTITUTES[original] = ours
        return ours

    return register


def substitute_all(model: nn.Module) -> set[str]:
    """Puts the equivalents in place of all their originals, in place; returns where."""
    found = {path: module for path, module in model.named_modules() if type(module) in SUBSTITUTES}
    for module in found.values():
        ours = SUBSTITUTES[type(module)]
        module.__class__ = ours
        module.scale = module.dense_scale()
        module.take_sizes()
    return set(found)


def heads_of(model: nn.Module) -> Heads:
    """The number of heads of every attention module that has an equivalent or is one."""
    found = {}
    for path, module in model.named_modules():
        ours = _equivalent(module)
        if ours is not None:
            found[path] = (original_of(ours).__name__, int(getattr(module, ours.heads)))
    return found


def heads_left(model: nn.Module, kept: Mapping[str, tuple[Labels | None, ...]]) -> Heads:
    """How many heads each attention module of a dense model has left, wherever any of its sizes changes."""
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    result: Heads = {}
    for path, (name, heads) in heads_of(model).items():
        module: Any = model.get_submodule(path)
        if any(names[id(tensor)] in kept for _, tensor in named_tensors(module)):
            weight = module.get_submodule(_require(module).projection).weight
            columns = kept.get(names[id(weight)], (None, None))[1]
            left = heads if columns is None else len(np.unique(columns * heads // weight.shape[1]))
            result[path] = (name, left)
    return result


def _equivalent(module: nn.Module) -> type[SizedAttention] | None:
    return type(module) if isinstance(module, SizedAttention) else SUBSTITUTES.get(type(module))


def _require(module: nn.Module) -> type[SizedAttention]:
    ours = _equivalent(module)
    assert ours is not None
    return ours


def original_of(ours: type[SizedAttention]) -> type[nn.Module]:
    """The class that an equivalent stands for."""
    return next(original for original, equivalent in SUBSTITUTES.items() if equivalent is ours)


def set_heads(model: nn.Module, heads: Heads) -> None:
    """Gives attention modules, whose tensors are narrow already, their number of heads; substitutes where needed.

    Raises:
        KeyError: there is no such module at a path.
        ValueError: the tensors are not those of that many heads.
    """
    modules = dict(model.named_modules())
    for path, (name, count) in heads.items():
        module: Any = modules[path]
        ours = _equivalent(module)
        if ours is None or original_of(ours).__name__ != name:
            raise KeyError(path)
        columns = module.get_submodule(ours.projection).weight.shape[1]
        if count < 1 or columns % count:
            raise ValueError(f"{path}: {columns} columns of {ours.projection} are not those of {count} heads")
        _resize(module, ours, count)


def _resize(module: Any, ours: type[SizedAttention], heads: int) -> None:
    original = type(module)
    if original is not ours:
        module.__class__ = ours
        module.scale = module.dense_scale()
    setattr(module, ours.heads, heads)
    module.take_sizes()
    if original is not ours and module.fits_original():
        del module.scale
        module.__class__ = original

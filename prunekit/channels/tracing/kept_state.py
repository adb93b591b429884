"""State that a model keeps between its calls in attributes that are no buffers: hidden states, caches, last results.

A hidden state that forward writes anew loses the channels that the layers around it lose. What forward makes only where
it is missing, such as a table of positions, is left out of a compact model, whose forward makes it in its own size.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.labels import Labels
from prunekit.hooks.hook import HOOK_TABLES
from prunekit.hooks.model_copy import OWN_TABLES, WithoutHistory, has_gradients, named_tensors
from prunekit.utils.display import listed

Place = tuple[str, str, int]
"""A module path, the name of its attribute, and which of the tensors in that."""
Attribute = tuple[str, str]
"""A module path, and the name of its attribute."""


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state that a model keeps between its calls.

    Attributes:
        labels: where forward leaves a tensor for the next call -> one entry for each of its axes, as of `ChannelMap`.
        remade: attributes that forward makes where they are None.
    """

    labels: Mapping[Place, tuple[Labels | None, ...]] = field(default_factory=dict)
    remade: frozenset[Attribute] = frozenset()

    def renumbered(self, final: Labels) -> KeptState:
        """Return the same with a map's labels in place of a trace's, given the map's label of each of these."""
        numbered = {
            place: tuple(None if one is None else final[one] for one in axes) for place, axes in self.labels.items()
        }
        return KeptState({place: axes for place, axes in numbered.items() if _any_free(axes)}, self.remade)

    def in_words(self, model: nn.Module) -> str:
        """Return a sentence on what a model holds that a compact one has narrow, or not at all; empty if nothing."""
        held = {place[:2] for place in kept_tensors(model)}
        narrow = [f"{path}.{name}".lstrip(".") for path, name in sorted({place[:2] for place in self.labels} & held)]
        again = [f"{path}.{name}".lstrip(".") for path, name in sorted(self.remade & held)]
        parts = [f"the kept channels of {listed(narrow, FEW)}, which earlier calls left in the model"] if narrow else []
        parts += [f"None in {listed(again, FEW)}, which forward makes where it is missing"] if again else []
        return f"the compact model begins with {', and with '.join(parts)}" if parts else ""


NO_STATE = KeptState()
FEW = 4
"""How many attributes a sentence names."""


def _any_free(axes: tuple[Labels | None, ...]) -> bool:
    return any(one is not None and bool(one.any()) for one in axes)


def kept_tensors(model: nn.Module, *, numbers: bool = False) -> dict[Place, Tensor]:
    """Return the tensors that modules hold in attributes that are neither parameters nor buffers."""
    own = {id(tensor) for _, tensor in named_tensors(model)}
    found: dict[Place, Tensor] = {}
    for path, module in model.named_modules():
        for name, value in _attributes(module):
            for index, tensor in enumerate(_tensors(value)):
                if id(tensor) not in own and has_gradients(tensor) and (numbers or tensor.numel() > 1):
                    found[path, name, index] = tensor
    return found


def drop_remade_(model: nn.Module, state: KeptState) -> None:
    """Set attributes that forward makes where they are missing to None, in place."""
    modules = dict(model.named_modules())
    for path, name in state.remade:
        if path in modules and name in vars(modules[path]):
            setattr(modules[path], name, None)


def cut_state_(model: nn.Module, state: KeptState, keep: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Leave the kept channels of what a model keeps between its calls, in place; others stay as they are."""
    drop_remade_(model, state)
    modules = dict(model.named_modules())
    for path, name in {place[:2] for place in state.labels}:
        if path in modules and name in vars(modules[path]):

            def narrowed(index: int, tensor: Tensor, where: Attribute = (path, name)) -> Tensor:
                return _narrowed(tensor, state.labels.get((*where, index), ()), keep)

            setattr(modules[path], name, _mapped(vars(modules[path])[name], narrowed))


def give_state_(model: nn.Module, source: nn.Module, state: KeptState) -> None:
    """Give a model copies of what another one keeps between its calls, in place."""
    modules, others = dict(model.named_modules()), dict(source.named_modules())
    for path, name in {place[:2] for place in state.labels}:
        if path in modules and path in others and name in vars(others[path]):
            with WithoutHistory():
                setattr(modules[path], name, copy.deepcopy(vars(others[path])[name]))


@contextmanager
def same_state(model: nn.Module) -> Iterator[None]:
    """Give attributes that hold tensors, before or after, the values back that they had."""
    before = [(module, dict(_attributes(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, values in before:
            now = dict(_attributes(module))
            changed = [name for name in values.keys() | now.keys() if values.get(name) is not now.get(name)]
            for name in changed:
                if _tensors(values.get(name)) or _tensors(now.get(name)):
                    if name in values:
                        vars(module)[name] = values[name]
                    else:
                        delattr(module, name)


def map_state_(model: nn.Module, function: Callable[[Place, Tensor], Tensor]) -> None:
    """Apply a function to the tensors of `kept_tensors`, in place."""
    places = kept_tensors(model)
    for path, name in dict.fromkeys(place[:2] for place in places):
        module = model.get_submodule(path)

        def changed(index: int, tensor: Tensor, where: Attribute = (path, name)) -> Tensor:
            place = (*where, index)
            return function(place, tensor) if place in places else tensor

        vars(module)[name] = _mapped(vars(module)[name], changed)


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return a module's attributes that may hold tensors, without its tables."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    tables = (*OWN_TABLES, *HOOK_TABLES)
    return [(name, value) for name, value in vars(module).items() if name not in tables]


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value: itself, or those in nested containers and dataclasses."""
    found: list[Tensor] = []

    def add(_: int, tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(value, add)
    return found


def _mapped(value: Any, function: Callable[[int, Tensor], Tensor]) -> Any:
    """Return a value with a function applied to its tensors, in order; containers but tuples are changed in place."""
    numbers = iter(range(2**63))

    def walk(one: Any, depth: int) -> Any:
        if isinstance(one, Tensor):
            return function(next(numbers), one)
        if depth == _DEEPEST:
            return one
        if isinstance(one, tuple):
            items = [walk(item, depth + 1) for item in one]
            same = all(new is old for new, old in zip(items, one, strict=True))
            return one if same else type(one)(*items) if hasattr(one, "_fields") else type(one)(items)
        for key, item in _items(one):
            new = walk(item, depth + 1)
            if new is not item:
                _put(one, key, new)
        return one

    return walk(value, 0)


_DEEPEST = 6
"""How deep containers are looked into, which may hold themselves."""


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return what a container or dataclass holds, by key, index or name."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, deque)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        return [(one.name, getattr(value, one.name, None)) for one in fields(value)]
    return []


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, (dict, list, deque)):
        holder[key] = value
    else:
        object.__setattr__(holder, key, value)  # a frozen dataclass too


def _narrowed(tensor: Tensor, axes: tuple[Labels | None, ...], keep: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
    """Return the kept entries of a state, detached; itself if it is of another shape than in the trace."""
    if len(axes) != tensor.dim():
        return tensor
    result = tensor
    for axis, labels in enumerate(axes):
        if labels is not None and labels.size == tensor.shape[axis] and not keep[labels].all():
            index = torch.from_numpy(np.flatnonzero(keep[labels])).to(tensor.device)
            result = result.detach().index_select(axis, index)
    return result

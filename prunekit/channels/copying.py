"""A model's structure with other tensors in it: the weights are never copied, only exchanged."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from prunekit.errors import ModelError
from prunekit.hooks import HOOK_TABLES, is_ours

_ATOMS = (int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device)
_CONTAINERS = (dict, set, OrderedDict)
_ATOM_TYPES = frozenset({int, float, bool, str, type(None)})
_OWN_TABLES = ("_parameters", "_buffers", "_modules")


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, each tensor once: a tied one under its first name."""
    seen: set[int] = set()
    modules = list(model.named_modules())
    for table in ("_parameters", "_buffers"):
        for path, module in modules:
            for name, tensor in getattr(module, table).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{path}.{name}" if path else name), tensor


def has_gradients(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a type that autograd knows: of floating-point or of complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def owners(model: nn.Module) -> dict[int, set[str]]:
    """Paths of the modules that have a parameter or buffer, by the tensor's id."""
    paths: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            paths.setdefault(id(tensor), set()).add(path)
    return paths


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
            new = nn.Parameter(new, requires_grad=tensor.requires_grad and has_gradients(new))
        memo[id(tensor)] = new
    try:
        clone: nn.Module = _clone(model, memo)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied: {error}; expected a module whose attributes "
            "copy.deepcopy understands (no tensors with a grad_fn, locks or open files)"
        ) from error
    return clone


def _clone(value: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy`, with a short way for plain modules, which are nearly all there is in a model."""
    if isinstance(value, _ATOMS):
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    if type(value) in _CONTAINERS and not value:
        memo[id(value)] = empty = type(value)()
        return empty
    if not isinstance(value, nn.Module) or not _is_plain(type(value)):
        return copy.deepcopy(value, memo)
    twin = value.__class__.__new__(value.__class__)
    memo[id(value)] = twin
    state = {}
    for name, item in value.__getstate__().items():  # type: ignore[no-untyped-call]
        kind = type(item)
        if kind in _ATOM_TYPES or (kind is tuple and all(type(entry) in _ATOM_TYPES for entry in item)):
            state[name] = item
        elif name.startswith("_") and kind in _CONTAINERS and not item:
            state[name] = kind()  # the tables every module has, which no two share
        elif name in HOOK_TABLES and item:
            state[name] = type(item)((key, hook) for key, hook in item.items() if not is_ours(hook))
        elif name in _OWN_TABLES:
            state[name] = type(item)((key, _clone(entry, memo)) for key, entry in item.items())
        else:
            state[name] = _clone(item, memo)
    twin.__setstate__(state)  # type: ignore[no-untyped-call]
    return twin


def _is_plain(cls: type) -> bool:
    """Whether a module's class leaves copying to Python's and `nn.Module`'s default."""
    if any(hasattr(cls, name) for name in ("__deepcopy__", "__copy__", "__getnewargs__", "__slots__")):
        return False
    standard = {"__getstate__": nn.Module, "__reduce_ex__": object, "__reduce__": object}
    return all(getattr(cls, name) is getattr(base, name) for name, base in standard.items())

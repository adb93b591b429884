"""Sizes that a module's Python keeps in attributes, such as `num_heads`, or states: their values under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from prunekit.channels.map import ChannelMap, Keep, SizeAttribute
from prunekit.channels.places import Place
from prunekit.channels.rewriting import set_expressions

Values = dict[str, dict[str, Any]]
"""Module path -> attribute, or the name of an expression -> an integer, or a list or tuple of them."""


def attribute_values(model: nn.Module, channel_map: ChannelMap, keep: Keep) -> Values:
    """What the attributes that a trial settled on are under a plan; `model` is the dense one."""
    return values_of(model, channel_map.sizes, keep)


def values_of(model: nn.Module, sizes: Sequence[SizeAttribute], keep: Keep) -> Values:
    values: Values = {}
    for size in sizes:
        own = values.setdefault(size.module, {})
        old = own.get(size.name, getattr(model.get_submodule(size.module), size.name, []))
        own[size.name] = _with_element(old, size.position, size.value(keep))
    return values


def _with_element(old: Any, position: int | None, value: int | list[int]) -> Any:
    return value if position is None else type(old)([*old[:position], value, *old[position + 1 :]])


def set_attributes(model: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets attributes in place; where a name is that of an expression, see `set_expressions`.

    Raises:
        KeyError: there is no such module, or it has no such attribute of integers, or no such expression.
        ValueError: the value is not of the kind and length that is there, or larger.
    """
    modules = dict(model.named_modules())
    for path, named in values.items():
        expressions = {name: value for name, value in named.items() if Place.named(name)}
        if expressions:
            set_expressions(modules[path], expressions)
        own = modules[path].__dict__
        for name, value in named.items():
            if name not in expressions:
                own[name] = _of_kind(f"{path}.{name}", own[name], value)


def _of_kind(name: str, old: Any, value: Any) -> Any:
    if integers(old) is None:
        raise KeyError(name)
    new = type(old)(value) if isinstance(value, (list, tuple)) and type(old) is not int else value
    if type(new) is not type(old) or not _shrunk(integers(old) or [], integers(new) or []):
        raise ValueError(f"{name}: {value!r} in place of {old!r}")
    return new


def _shrunk(old: list[int], new: list[int]) -> bool:
    return len(old) == len(new) and all(b == a or 0 < b < a for a, b in zip(old, new, strict=True))


def integers(value: Any) -> list[int] | None:
    """The integers that a value consists of; None where it is anything else."""
    items = list(value) if type(value) in (list, tuple) else [value]
    return items if items and all(type(item) is int for item in items) else None

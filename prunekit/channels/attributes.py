"""Sizes that a module's Python keeps in attributes, such as `num_heads`: their values under a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from prunekit.channels.map import ChannelMap, Keep, SizeAttribute
from prunekit.channels.scale import FUSED

Values = dict[str, dict[str, Any]]
"""Module path -> attribute -> an integer, or a list or tuple of them."""


def attribute_values(model: nn.Module, channel_map: ChannelMap, keep: Keep) -> Values:
    """What the attributes that a trial settled on are under a plan; `model` is the dense one."""
    return values_of(model, channel_map.sizes, keep)


def values_of(model: nn.Module, sizes: Sequence[SizeAttribute], keep: Keep) -> Values:
    values: Values = {}
    for size in sizes:
        own = values.setdefault(size.module, {})
        old = own.get(size.name, getattr(model.get_submodule(size.module), size.name))
        kept = size.kept(keep)
        own[size.name] = (
            old and kept == len(size.labels) if size.name == FUSED else _with_element(old, size.position, kept)
        )
    return values


def _with_element(old: Any, position: int | None, value: int) -> Any:
    return value if position is None else type(old)([*old[:position], value, *old[position + 1 :]])


def set_attributes(model: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets attributes in place: integers, and whether timm's attention is fused.

    Raises:
        KeyError: there is no such module, or it has no such attribute of integers.
        ValueError: the value is not of the kind and length that is there, or larger.
    """
    modules = dict(model.named_modules())
    for path, named in values.items():
        own = modules[path].__dict__
        for name, value in named.items():
            old = own[name]
            if name == FUSED and type(old) is type(value) is bool:
                own[name] = value
                continue
            if integers(old) is None:
                raise KeyError(f"{path}.{name}")
            new = type(old)(value) if isinstance(value, (list, tuple)) and type(old) is not int else value
            if type(new) is not type(old) or not _shrunk(integers(old) or [], integers(new) or []):
                raise ValueError(f"{path}.{name}: {value!r} in place of {old!r}")
            own[name] = new


def _shrunk(old: list[int], new: list[int]) -> bool:
    return len(old) == len(new) and all(b == a or 0 < b < a for a, b in zip(old, new, strict=True))


def integers(value: Any) -> list[int] | None:
    """The integers that a value consists of; None where it is anything else."""
    items = list(value) if type(value) in (list, tuple) else [value]
    return items if items and all(type(item) is int for item in items) else None

"""What a key of a recipe may hold, in words, read from the type annotations of the settings."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from prunekit.errors import cut_short
from prunekit.recipe.document import KeyPath
from prunekit.registry import Beside, field_hints
from prunekit.settings import checked
from prunekit.settings.job import JobSettings


def hint_at(path: KeyPath) -> Any:
    """Type annotation of the key at `path` of a recipe; `Any` where nothing is known about it."""
    hint: Any = JobSettings
    for key in path:
        hint = next((inner for part in _parts(hint) if (inner := _inner(part, key)) is not Any), Any)
    return hint


def _parts(hint: Any) -> tuple[Any, ...]:
    """The annotations that a value may meet, without `None` and without constraints."""
    if get_origin(hint) is Annotated:
        return _parts(get_args(hint)[0])
    if get_origin(hint) in (types.UnionType, Union):
        return tuple(inner for part in get_args(hint) if part is not type(None) for inner in _parts(part))
    return (hint,)


def _inner(hint: Any, key: str | int) -> Any:
    if is_dataclass(hint):
        beside = beside_of(hint)
        if beside is not None and beside.knows(key) and key not in own_keys(hint):
            return beside.annotation(str(key)) | None
        return own_keys(hint).get(str(key), Any)
    if get_origin(hint) is tuple:
        return get_args(hint)[0]
    return get_args(hint)[1] if get_origin(hint) is dict else Any


def own_keys(settings: Any) -> dict[str, Any]:
    """Annotations of the fields of settings that are keys of a recipe."""
    return {name: hint for name, hint in field_hints(settings).items() if not _marks(hint)}


def beside_of(settings: Any) -> Beside | None:
    """The further keys that settings have, where they have any."""
    return next((mark for hint in field_hints(settings).values() for mark in _marks(hint)), None)


def _marks(hint: Any) -> list[Beside]:
    return [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Beside)]


def _keys(settings: Any) -> list[str]:
    beside = beside_of(settings)
    return list(dict.fromkeys([*own_keys(settings), *(beside.registry.names if beside else ())]))


def is_open_mapping(path: KeyPath) -> bool:
    """Whether a key below `path` is a name of its own, dots and all."""
    parts = _parts(hint_at(path))
    return any(get_origin(part) is dict or (is_dataclass(part) and beside_of(part) is not None) for part in parts)


def allows(path: KeyPath, key: str) -> bool:
    """Whether settings at `path` have a key: one of theirs, or one that stands beside them."""
    marks = [beside_of(part) for part in _parts(hint_at(path)) if is_dataclass(part)]
    return key in (keys_of(path) or ()) or any(mark is not None and mark.knows(key) for mark in marks)


def keys_of(path: KeyPath) -> list[str] | None:
    """Keys allowed below `path`; None when they are not listed."""
    listed = [part for part in _parts(hint_at(path)) if is_dataclass(part)]
    return [key for part in listed for key in _keys(part)] if listed else None


def choices(path: KeyPath) -> tuple[str, ...]:
    """The allowed values of the key at `path`, where they are listed."""
    return tuple(
        str(value) for part in _parts(hint_at(path)) if get_origin(part) is Literal for value in get_args(part)
    )


def written(location: KeyPath, values: Any) -> KeyPath:
    """The key path of what is wrong in a recipe's values: pydantic also names which part of a union it tried."""
    path: KeyPath = ()
    for key in location:
        if isinstance(values, Mapping) and (key in values or key in (keys_of(path) or ())):
            path, values = (*path, key), values.get(str(key))
        elif isinstance(values, list) and isinstance(key, int):
            path, values = (*path, key), values[key]
    return path


def describe(hint: Any, *, brief: bool = False) -> str:
    """What an annotation allows, e.g. "a number above 0 and of at most 1, or null".

    Args:
        brief: whether a mapping's keys are left out.
    """
    return checked.describe(hint, checked.IN_YAML, None if brief else _keys)


def show(value: Any) -> str:
    """A value as an error message shows it: short, and text told from numbers by its quotes."""
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return cut_short(repr(value) if isinstance(value, str) else json.dumps(value))

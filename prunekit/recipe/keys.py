"""The keys of a recipe and what they may hold, in words, read from the annotations of the settings."""

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from prunekit.errors import cut_short
from prunekit.recipe.yaml_positions import KeyPath
from prunekit.settings import validation as checked
from prunekit.settings.job import JobSettings
from prunekit.utils.registry import RegisteredKeys, field_hints


def hint_at(path: KeyPath) -> Any:
    """Return the type annotation of the key at `path` of a recipe; `Any` if none is known."""
    hint: Any = JobSettings
    for key in path:
        hint = next((inner for part in _parts(hint) if (inner := _inner(part, key)) is not Any), Any)
    return hint


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of an annotation, without `None` and without constraints."""
    return tuple(part for part in checked.alternatives(hint) if part is not type(None))


def settings_in(hint: Any) -> list[Any]:
    """Return the types of settings that a key may hold as a mapping."""
    return [part for part in _parts(hint) if is_dataclass(part)]


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
    """Return the annotations of the settings' fields that are keys of a recipe."""
    return {name: hint for name, hint in field_hints(settings).items() if not _marks(hint)}


def beside_of(settings: Any) -> RegisteredKeys | None:
    """Return the further keys of settings that a registry names; None if they have none."""
    return next((mark for hint in field_hints(settings).values() for mark in _marks(hint)), None)


def _marks(hint: Any) -> list[RegisteredKeys]:
    return [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, RegisteredKeys)]


def _keys(settings: Any) -> list[str]:
    beside = beside_of(settings)
    return list(dict.fromkeys([*own_keys(settings), *(beside.registry.names if beside else ())]))


def is_open_mapping(path: KeyPath) -> bool:
    """Return whether a key below `path` is a free name, which may contain dots."""
    parts = _parts(hint_at(path))
    return any(get_origin(part) is dict or (is_dataclass(part) and beside_of(part) is not None) for part in parts)


def allows(path: KeyPath, key: str) -> bool:
    """Return whether settings at `path` have a key: a field, or a name of a registry."""
    marks = [beside_of(part) for part in settings_in(hint_at(path))]
    return key in (keys_of(path) or ()) or any(mark is not None and mark.knows(key) for mark in marks)


def keys_of(path: KeyPath) -> list[str] | None:
    """Return the keys that are allowed below `path`; None if any key is."""
    listed = settings_in(hint_at(path))
    return [key for part in listed for key in _keys(part)] if listed else None


def choices(path: KeyPath) -> tuple[str, ...]:
    """Return the allowed values of the key at `path`; empty if they are not listed."""
    return tuple(
        str(value) for part in _parts(hint_at(path)) if get_origin(part) is Literal for value in get_args(part)
    )


def key_path(location: KeyPath, values: Any) -> KeyPath:
    """Return the key path of a pydantic error location, which also names alternatives of unions."""
    path: KeyPath = ()
    for key in location:
        if isinstance(values, Mapping) and (key in values or key in (keys_of(path) or ())):
            path, values = (*path, key), values.get(str(key))
        elif isinstance(values, list) and isinstance(key, int):
            path, values = (*path, key), values[key]
    return path


def describe(hint: Any, *, brief: bool = False) -> str:
    """Return what an annotation allows, e.g. "a number above 0 and of at most 1, or null"; `brief` omits keys."""
    return checked.describe(hint, checked.IN_YAML, None if brief else _keys)


def show(value: Any) -> str:
    """Return a value for an error message: short, and with quotes around text."""
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return cut_short(repr(value) if isinstance(value, str) else json.dumps(value))


def split_key(key: str) -> KeyPath:
    """Return the key path of a dotted key."""
    path: tuple[str, ...] = ()
    while key:
        if is_open_mapping(path):
            return (*path, key)
        head, dot, key = key.partition(".")
        path = (*path, head, "") if dot and not key else (*path, head)
    return path or ("",)

"""Overrides of a recipe: `key=value` on the command line, or values by key, applied to its document."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from prunekit.errors import UsageError
from prunekit.recipe.keys import is_open_mapping
from prunekit.recipe.yaml_positions import Document, KeyPath, Origin, Problem, parse
from prunekit.settings.job import yaml_value

Overrides = Sequence[str] | Mapping[str, Any]
"""`a.b=value` each, the value in YAML, where later ones win; or values by dotted key."""
MOST_PARTS = 32
"""Parts of a key: how deep an override may reach."""


def apply_override(document: Document, override: str) -> Document:
    """Return a new document with one override applied.

    Args:
        override: `a.b=value`; the value is YAML (`null` unsets a key), and below a mapping with free keys, such as
            `prune.ratios`, the rest of the key is one name, which may contain dots.
    """
    origin = Origin(f"override {override!r}")
    key, equals, text = override.partition("=")
    path = split_key(key.strip())
    if not equals or not all(path):
        return _with_problem(document, Problem(origin, (), "expected key=value, such as prune.budget.macs=0.4"))
    if len(path) > MOST_PARTS:
        return _with_problem(document, Problem(origin, (), f"expected a key of at most {MOST_PARTS} parts"))
    value = parse(text, origin)
    if value.problems:
        return _with_problem(document, *(Problem(origin, path, problem.text) for problem in value.problems))
    return _put(document, path, value)


def as_texts(overrides: Overrides) -> list[str]:
    """Return overrides as `key=value`; raise UsageError if a recipe cannot hold a value."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    try:
        return [f"{key}={json.dumps(yaml_value(value, key), ensure_ascii=False)}" for key, value in overrides.items()]
    except RecursionError as error:
        raise UsageError("overrides: expected plain values, got lists or mappings that are very deep") from error


def split_key(key: str) -> KeyPath:
    """Return the key path of a dotted key."""
    path: tuple[str, ...] = ()
    while key:
        if is_open_mapping(path):
            return (*path, key)
        head, dot, key = key.partition(".")
        path = (*path, head, "") if dot and not key else (*path, head)
    return path or ("",)


def _put(document: Document, path: KeyPath, value: Document) -> Document:
    values = copy.deepcopy(document.values)
    target: Any = values
    created: dict[KeyPath, Origin] = {}
    for depth, key in enumerate(path[:-1], start=1):
        if target.get(key) is None:
            target[key] = {}
            created[path[:depth]] = value.places[()]
        if not isinstance(target[key], dict):
            return _with_problem(document, _not_a_mapping(value.places[()], path[:depth], path))
        target = target[key]
    target[path[-1]] = value.values
    return Document(
        values,
        _replaced(document.keys, path, {(): value.places[()], **value.keys}),
        _replaced({**document.places, **created}, path, value.places),
        document.problems,
    )


def _replaced(
    origins: Mapping[KeyPath, Origin], path: KeyPath, new: Mapping[KeyPath, Origin]
) -> Mapping[KeyPath, Origin]:
    """Return the origins with everything at and below `path` replaced by that of the override."""
    kept = {key: origin for key, origin in origins.items() if key[: len(path)] != path}
    return kept | {(*path, *key): origin for key, origin in new.items()}


def _not_a_mapping(origin: Origin, parent: KeyPath, path: KeyPath) -> Problem:
    name = ".".join(map(str, parent))
    return Problem(origin, path, f"expected {name} to be a mapping, but it holds a value; set {name} itself")


def _with_problem(document: Document, *problems: Problem) -> Document:
    return Document(document.values, document.keys, document.places, (*document.problems, *problems))

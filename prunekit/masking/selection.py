"""One number for each of some modules: for all alike, or by glob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from prunekit.errors import UsageError
from prunekit.globs import globs, matching
from prunekit.hooks import called_leaves


def module_paths(model: nn.Module) -> list[str]:
    """Paths of all modules but the model itself, in the order of `named_modules()`."""
    return [path for path, _ in model.named_modules() if path]


def leaf_paths(model: nn.Module) -> list[str]:
    """Paths of the modules without children that are ever called."""
    return list(called_leaves(model))


def one_of(value: str, choices: tuple[str, ...], key: str) -> None:
    """Checks a choice.

    Raises:
        UsageError: it is none of those that there are.
    """
    if value not in choices:
        raise UsageError(f"{key}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def paths_matching(model: nn.Module, patterns: Iterable[str], key: str) -> list[str]:
    """Module paths that one of the globs matches, in the order of `named_modules()`.

    Raises:
        UsageError: a glob matches nothing; the message begins with `key`.
    """
    paths = module_paths(model)
    found = {path for pattern in globs(patterns, key, model) for path in matching(pattern, paths, key)}
    return [path for path in paths if path in found]


def numbers_by_path(
    numbers: float | Mapping[str, float], key: str, *, paths: Iterable[str], alike: Iterable[str]
) -> dict[str, float]:
    """Module path -> number, in the order of `paths`.

    Args:
        numbers: one for all, or glob -> number, where the last glob that matches a path decides.
        key: what the numbers are; messages begin with it.
        paths: what globs may match.
        alike: the paths that one number alone is meant for.

    Raises:
        UsageError: a number is negative or is none, or a glob matches nothing.
    """
    if not isinstance(numbers, Mapping):
        return dict.fromkeys(alike, _checked(numbers, key))
    paths = list(paths)
    chosen: dict[str, float] = {}
    for pattern, number in numbers.items():
        chosen |= dict.fromkeys(matching(pattern, paths, key), _checked(number, f"{key} of {pattern!r}"))
    return {path: chosen[path] for path in paths if path in chosen}


def _checked(number: float, key: str) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
        raise UsageError(f"{key}: expected a number of at least 0, got {number!r}")
    return float(number)

"""Globs over module paths."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from prunekit.errors import UsageError, nearest


def globs(given: Any, key: str, model: nn.Module | None = None) -> tuple[str, ...]:
    """Return globs over module paths as a tuple, given as one string or several."""
    several = (given,) if isinstance(given, (str, type, nn.Module)) or not isinstance(given, Iterable) else tuple(given)
    for one in several:
        if not isinstance(one, str):
            found = [] if model is None else [path for path, module in model.named_modules() if module is one]
            what = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise UsageError(
                f"{key}: expected globs over module paths, such as 'layer1.*', got {what}"
                + (f", whose path is {found[0]!r}" if found else "")
            )
    return several


def matching(
    pattern: str, paths: Iterable[str], key: str, error: type[UsageError] = UsageError, what: str = "module path"
) -> list[str]:
    """Return the paths that a glob matches; `*` also stands for dots, and every path matches itself."""
    paths = list(paths)
    found = [path for path in paths if path == pattern or fnmatchcase(path, pattern)]
    if not found:
        raise error(f"{key}: {pattern!r} matches no {what}; {nearest(pattern, paths)}")
    return found

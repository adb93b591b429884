"""Module paths by glob."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from prunekit.errors import UsageError, nearest


def matching(
    pattern: str, paths: Iterable[str], key: str, error: type[UsageError] = UsageError, what: str = "module path"
) -> list[str]:
    """The paths that a glob matches; `*` also stands for dots, and a path matches itself whatever is in it.

    Args:
        pattern: as in `fnmatch`.
        paths: what there is.
        key: what the pattern was given for; the message begins with it.
        error: what is raised.
        what: what the paths are, for the message.

    Raises:
        UsageError: no path matches; the message gives near spellings.
    """
    paths = list(paths)
    found = [path for path in paths if path == pattern or fnmatchcase(path, pattern)]
    if not found:
        raise error(f"{key}: {pattern!r} matches no {what}; {nearest(pattern, paths)}")
    return found

"""Libraries that are not installed: a clear error in place of a missing module."""

from __future__ import annotations

from importlib.util import find_spec

from prunekit.errors import UsageError


class MissingExtraError(UsageError, ModuleNotFoundError):
    """A library that an integration is for is not installed; the message says how to install it."""


def require_library(library: str, extra: str) -> None:
    """Raise if a library is not installed.

    Args:
        library: name of its package, as it is imported.
        extra: of prunekit, that installs it.

    Raises:
        MissingExtraError: it is not installed; an `ImportError`, so that a program may do without.
    """
    if find_spec(library) is None:
        raise MissingExtraError(
            f"prunekit.integrations.{library} needs {library}, not installed here: pip install 'prunekit[{extra}]'",
            name=library,
        )

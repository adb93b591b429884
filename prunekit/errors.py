"""One exception family: what was expected, what came, where, and what to do next.

`exit_code` is what the command line returns: 2 for wrong usage, 1 for a run that failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class PrunekitError(Exception):
    """Root of every error that prunekit raises on purpose.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        >>> x = torch.randn(4, 8)
        >>> try:
        ...     pk.prune(model, x, macs=50)
        ... except pk.PrunekitError as error:
        ...     print(type(error).__name__, error, sep=": ")
        UsageError: macs: expected a share above 0 and at most 1, got 50
    """

    exit_code = 1


class UsageError(PrunekitError):
    """The request itself is wrong: an argument, a recipe, a name that does not exist."""

    exit_code = 2


class SettingsError(UsageError, ValueError):
    """Settings hold what they cannot; all of it is in the message. A `ValueError` too, for whoever fills them in."""


class RecipeError(UsageError):
    """A recipe has problems; all of them are in the message, one a line, with file, line and column."""


class ModelError(UsageError):
    """A model cannot be built, or cannot be used as asked (frozen, unknown name, hooks in the way)."""


class DataError(UsageError):
    """Data is missing, empty, unreadable, or its labels do not fit the classes."""


class PlanError(UsageError):
    """A plan removes nothing, names layers that do not exist, or asks for a budget that cannot be met."""


class ResumeError(UsageError):
    """What is to be resumed is of another recipe, plan or version, still runs, or has finished."""


class RunError(PrunekitError):
    """A run started correctly and failed: non-finite loss, a full disk, a broken file."""


class PeerError(RunError):
    """Another process of this run failed, and said why itself.

    Args:
        message: who failed, and why.
        exit_code: that of the process that failed.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NonFiniteError(RunError):
    """NaN or Inf where a finite number was needed; the message names the layer."""


class MemoryShortageError(RunError):
    """A batch does not fit into memory; the message names its size and how the largest that does is found."""


class VerificationError(RunError):
    """Masked and compact model disagree; the message names the operator and the module path."""


class NotMeasuredError(UsageError):
    """Nothing was to be measured, and what was measured before is not enough."""


class ArtifactError(RunError):
    """A file or folder that prunekit wrote earlier is damaged, incomplete or of another version."""


def require_kind(key: str, given: Any, kind: type | tuple[type, ...], instead: str) -> None:
    """Checks that an argument is of a type.

    Args:
        key: name of the argument; the message begins with it.
        given: None is let through, for arguments that may be left out.
        instead: what was expected, and the call that makes one.

    Raises:
        UsageError: it is of another type.
    """
    if given is not None and not isinstance(given, kind):
        got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise UsageError(f"{key}: expected {instead}; got {got}")


def reason_of(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def cut_short(text: str) -> str:
    """Return a text of at most 60 characters: of a longer one the beginning."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(name: str, allowed: Iterable[str], *, count: int = 3) -> str:
    """Say which allowed names look most like `name`: "did you mean 'a' or 'b'?", or lists a few."""
    allowed = sorted(set(allowed))
    close = get_close_matches(name, allowed, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    shown = ", ".join(repr(match) for match in allowed[:12])
    return f"expected one of {shown}" + (", ..." if len(allowed) > 12 else "")

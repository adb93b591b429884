"""One exception family: what was expected, what came, where, and what to do next.

The command line returns `exit_code`: 2 for wrong usage, 1 for a run that failed.
"""

import errno
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

SHORTAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate memory",
    "std::bad_alloc",
    "alloc_failed",
)
"""Parts of what allocators say, in lower case: of torch, the system, CUDA's libraries, zlib and ONNX Runtime."""
SHORTAGE_ENDINGS = (
    "could not create a primitive",
    "could not create a memory object",
    "failed to map segment from shared object",
)
"""Messages of oneDNN, and of the loader of shared libraries, for want of memory, without more words behind them."""


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
        UsageError: macs: expected a share above 0 and at most 1, got 50; did you mean 0.5?
    """

    exit_code = 1


class UsageError(PrunekitError):
    """The request itself is wrong: an argument, a recipe, a name that does not exist."""

    exit_code = 2


class SettingsError(UsageError, ValueError):
    """Settings have invalid values; all of them are in the message. It is also a `ValueError`."""


class RecipeError(UsageError):
    """A recipe has problems; all of them are in the message, one a line, with file, line and column."""


class ModelError(UsageError):
    """A model cannot be built, or cannot be used as asked (frozen, unknown name, hooks in the way)."""


class DataError(UsageError):
    """Data is missing, empty, unreadable, or its labels do not fit the classes."""


class PlanError(UsageError):
    """A plan removes nothing, names layers that do not exist, or asks for a budget that cannot be met."""


class ResumeError(UsageError):
    """A run cannot be resumed: it has another recipe, plan or version, still runs, or has finished."""


class RunError(PrunekitError):
    """A run started correctly and failed: non-finite loss, a full disk, a broken file."""


class PeerError(RunError):
    """Another process of this run failed, and reported the reason itself.

    Args:
        message: which process failed, and why.
        exit_code: of the process that failed.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NonFiniteError(RunError):
    """NaN or Inf where a finite number was needed; the message names the layer."""


class MemoryShortageError(RunError):
    """A batch does not fit into memory; the message has its size, and what takes less."""


class VerificationError(RunError):
    """Masked and compact model disagree; the message names the operator and the module path."""


class NotMeasuredError(UsageError):
    """A measurement is missing, and measuring was not allowed."""


class TimesNeededError(RunError):
    """Another machine has to time a kit before a call can go on; the message says where it is and what to do."""


class ArtifactError(RunError):
    """A file or folder that prunekit wrote earlier is damaged, incomplete or of another version."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory, on the CPU or on a device."""
    torch = sys.modules.get("torch")  # not imported here: for that, memory may be too short
    kinds = (MemoryError, MemoryShortageError, *(() if torch is None else (torch.OutOfMemoryError,)))
    if isinstance(error, kinds):
        return True
    if isinstance(error, OSError):  # Pillow says "out of memory" of damaged images, without a number
        return error.errno == errno.ENOMEM
    text = "" if isinstance(error, PrunekitError) else str(error).strip().lower()
    return text.endswith(SHORTAGE_ENDINGS) or any(part in text for part in SHORTAGES)


def reraise_shortage(error: BaseException) -> None:
    """Raise an error again if it says that memory is short, so that no other cause is reported."""
    if is_shortage(error):
        raise error


def shortage_message(error: BaseException) -> str:
    """Return a message for users about an error for want of memory."""
    said = str(error).strip().partition("\n")[0]
    detail = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"out of memory ({detail}); free some, or take less: smaller batches, smaller images, or a smaller model"


def require_kind(key: str, given: Any, kind: type | tuple[type, ...], instead: str) -> None:
    """Raise if an argument is of another type."""
    if given is not None and not isinstance(given, kind):
        got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise UsageError(f"{key}: expected {instead}; got {got}")


def reason_of(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; in TorchScript the line that tells what failed."""
    lines = [printable(line) for line in str(error).splitlines()] or [""]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): \S", line)]
    return raised[-1] if raised and is_of_torchscript(error) else f"{type(error).__name__}: {lines[0]}"


@contextmanager
def raised_as(
    kind: type[PrunekitError],
    before: str,
    after: str = "",
    reason: Callable[[Exception], str] = reason_of,
    passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Raise what a library's or a user's code raises inside as an error of prunekit: `before`, the reason, `after`.

    Errors that are `passing`, and those that say that memory is short, are raised as they are.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:  # of classes that nobody can list
        reraise_shortage(error)
        raise kind(f"{before}{reason(error)}{after}") from error


def with_type(error: BaseException) -> str:
    """Return the type of an error and its whole message."""
    return f"{type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(text: str) -> str:
    """Return a text with all signs escaped that cannot be printed, which libraries take over from a damaged file."""
    return text if text.isprintable() else "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def is_of_torchscript(error: BaseException) -> bool:
    """Return whether an error was raised in a scripted or traced module or function, which torch has no class for."""
    return str(error).startswith("The following operation failed in the TorchScript interpreter")


def cut_short(text: str) -> str:
    """Return a text of at most 60 characters, cut off if it is longer."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def share_meant(value: object) -> str:
    """Return the share that a percentage stands for, as "; did you mean 0.5?"; empty for what is none."""
    percent = isinstance(value, (int, float)) and not isinstance(value, bool) and 5 <= value <= 100
    return f"; did you mean {value / 100:g}?" if percent else ""  # type: ignore[operator]


def nearest(name: str, allowed: Iterable[str], *, count: int = 3) -> str:
    """Return the allowed names that are most like a name, as "did you mean 'a' or 'b'?", or a list of some."""
    allowed = sorted(set(allowed))
    close = get_close_matches(name, allowed, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    shown = ", ".join(repr(match) for match in allowed[:12])
    return f"expected one of {shown}" + (", ..." if len(allowed) > 12 else "")

"""One process fails, all do, and one of them says why."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from prunekit.distributed.group import rank, size
from prunekit.errors import PeerError, RunError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

INTERRUPTED = 130
TOLD_S = 5.0
"""How long another process may take to say why it failed."""
GONE = ("by peer", "remote process exit")
"""What gloo and NCCL say where a process they talk to is no more."""
LOST = (
    "another process has ended without a word: killed, out of memory, or its machine is gone; a run that keeps "
    "checkpoints goes on with --resume"
)


def store() -> Store:
    """The small values that all processes of the group see."""
    return PrefixStore("prunekit", _get_default_store())


@contextmanager
def one_for_all(*passing: type[BaseException]) -> Iterator[None]:
    """Tells the other processes when this one fails; where another failed first, raises `PeerError` with its reason.

    A process that waits for another in an exchange fails because that is gone; it is not the one to say why.

    Args:
        passing: exceptions that are no failures.
    """
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        if size() == 1 or isinstance(error, PeerError):
            raise
        told = RunError(LOST) if isinstance(error, RuntimeError) and any(text in str(error) for text in GONE) else error
        failed = _claim(told)
        if isinstance(error, KeyboardInterrupt) and failed is not None and failed.exit_code == INTERRUPTED:
            raise  # a launcher interrupts all of them
        if failed is None and told is error:
            raise
        raise failed or told from error


def require_no_failure() -> None:
    """Looks whether a process has failed.

    Raises:
        PeerError: one has.
    """
    found = _failure(store(), 0.0) if store().check(["failed"]) else None
    if found is not None:
        raise found[1]


def _claim(error: BaseException) -> PeerError | None:
    """Notes the first failure of the group; None where it is this process's, else the other's."""
    try:
        shared = store()
        if shared.add("failed", 1) == 1:
            text = str(error) or type(error).__name__
            code = getattr(error, "exit_code", INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
            told = rank(), code, f"process {rank()} of {size()} failed: {text}"
            shared.set("failure", json.dumps(told))
            return None
        found = _failure(shared, TOLD_S)
    except (RuntimeError, ValueError):  # torch: the store has gone with the process that held it
        return PeerError("process 0 has ended", 1)
    if found is None:
        return PeerError("another process failed and did not say why", 1)
    return None if found[0] == rank() else found[1]


def _failure(shared: Store, seconds: float) -> tuple[int, PeerError] | None:
    """Who failed first, and how; None where it has not said so within some seconds."""
    end = time.monotonic() + seconds
    while not shared.check(["failure"]):
        if time.monotonic() >= end:
            return None
        time.sleep(0.01)
    number, code, text = json.loads(shared.get("failure"))
    return number, PeerError(text, code)

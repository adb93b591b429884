"""Processes that are killed: forked after the imports, so that each costs what it does and no more."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import pytest
import torch
from process_group import PRELOADED

from prunekit.utils import files


def forked(task: Callable[[], object], kill_after_s: float | None = None) -> int:
    """Runs a task in a process of its own; returns the signal that ended it, 0 for none.

    The process is forked from a server that has imported what it needs and computed nothing: a process in which
    autograd has started threads, as some tests do, cannot be forked.

    Args:
        task: can be pickled; what it prints when it fails is shown, and fails the test.
        kill_after_s: seconds until it is killed, if it is not done by then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_without_waiting, args=(task,))
    process.start()
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        process.kill()
    process.join()
    assert process.exitcode is not None
    assert process.exitcode <= 0, "the child failed"
    return -process.exitcode


def _without_waiting(task: Callable[[], object]) -> None:
    """What a killed process has written is there without waiting for the disk."""
    torch.set_num_threads(1)
    with patched() as patch:
        patch.setattr(files, "sync", lambda path: None)
        task()


def die() -> None:
    """Kills this process as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly:
    """Counts the moments at which calls begin and end, and kills the process at one of them.

    Args:
        at: which moment, counted from 1; 0 for never.
    """

    def __init__(self, at: int) -> None:
        self.at, self.moments = at, 0

    def moment(self) -> None:
        """One of them has come."""
        self.moments += 1
        if self.moments == self.at:
            die()

    def around(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Makes begin and end of a function's calls such moments."""
        function = getattr(owner, name)

        @wraps(function)
        def deadly(*args: Any, **named: Any) -> Any:
            self.moment()
            result = function(*args, **named)
            self.moment()
            return result

        patch.setattr(owner, name, deadly)


def patched() -> AbstractContextManager[pytest.MonkeyPatch]:
    """A place for patches in a child."""
    return pytest.MonkeyPatch.context()

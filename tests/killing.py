"""Processes that are killed: forked after the imports, so that each costs what it does and no more."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import pytest


def forked(task: Callable[[], object], kill_after_s: float | None = None) -> int:
    """Runs a task in a child; returns the signal that ended it, 0 for none.

    Args:
        task: what it prints when it fails is shown, and fails the test.
        kill_after_s: seconds until it is killed, if it is not done by then.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            task()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


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

"""One model in a process of its own: its row comes in parts, and what takes too long does not take the rest along."""

from __future__ import annotations

import math
import multiprocessing
import resource
import signal
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

FORK = multiprocessing.get_context("fork")
"""A child has all modules already: importing them takes longer than most models do."""


def in_process(parts: Callable[[], Iterable[dict[str, Any]]], limit: float) -> tuple[dict[str, Any], str]:
    """The row that comes of all parts, and why there are no more of them; empty where they are complete.

    Args:
        parts: yields parts of the row in the other process, which runs on one thread.
        limit: seconds of processor time for each part, and a tenth of what it may take by the clock.
    """
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        _allow(limit)
        for part in parts():
            sender.send(part)
            _allow(limit)

    process = FORK.Process(target=run)
    process.start()
    sender.close()
    row: dict[str, Any] = {}
    try:
        while receiver.poll(10 * limit):
            row |= receiver.recv()
        problem = f"not done after {10 * limit:g} s"
    except EOFError:  # the process has ended
        process.join()
        late = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        problem = f"not done after {limit:g} s" if late else f"ended with exit status {process.exitcode}"
        problem = problem if process.exitcode else ""
    process.kill()
    process.join()
    return row, problem


def _allow(seconds: float) -> None:
    """Lets this process run for some more seconds of processor time."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), resource.RLIM_INFINITY))

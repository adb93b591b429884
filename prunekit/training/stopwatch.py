"""Seconds that a device spends on one thing, without waiting for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up what is timed on a device; on CUDA by events that are read once they have passed.

    Args:
        device: where it runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Times what runs inside."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        self._read(wait=False)

    @property
    def seconds(self) -> float:
        """The sum so far; waits for what still runs."""
        self._read(wait=True)
        return self._seconds

    def add(self, seconds: float) -> None:
        """Adds what was timed elsewhere, as in the run that this one goes on with."""
        self._seconds += seconds

    def _read(self, *, wait: bool) -> None:
        while self._pending and (wait or self._pending[0][1].query()):  # type: ignore[no-untyped-call]
            begin, end = self._pending.popleft()
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3

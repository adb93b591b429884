"""Timing one forward at a time, on the clock that is right for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from prunekit.context import paused_garbage_collection
from prunekit.measure.effort import current_effort

WINDOW = 5  # calls in each of the two windows that the warm-up compares
TOLERANCE = 0.05
WARM_UP_MS = 3000.0
STEADY_S = {"cuda": 1.0}
"""A GPU raises its clock over tenths of a second once it has work: calls that agree before agree on a slow clock."""


class Timer:
    """Calling it runs one forward and gives its time in milliseconds."""

    def __init__(self, forward: Callable[[], object], device: torch.device) -> None:
        self.forward, self.device = forward, device

    def __call__(self) -> float:
        return self._events() if self.device.type == "cuda" else self._clock()

    def _clock(self) -> float:
        start = time.perf_counter_ns()
        self.forward()
        if self.device.type == "mps":
            torch.mps.synchronize()
        return (time.perf_counter_ns() - start) / 1e6

    def _events(self) -> float:
        with torch.cuda.device(self.device):
            start, end = _event(), _event()
            torch.cuda.synchronize()
            start.record()
            self.forward()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def warm_up(run: Callable[[], float], kind: str = "cpu") -> int:
    """Runs until the median time of five calls is within 5 % of the five before, for at most 3 seconds and as many
    calls as the effort allows.

    Args:
        kind: of device, as `torch.device.type` has it. It has work until its clock is steady before any call counts.

    Returns:
        How many calls it took.
    """
    over, calls = time.perf_counter() + STEADY_S.get(kind, 0.0), 0
    while time.perf_counter() < over:
        run()
        calls += 1
    times: list[float] = []
    most = current_effort().warm_up_calls
    while len(times) < most and sum(times) < WARM_UP_MS:
        times.append(run())
        before, now = times[-2 * WINDOW : -WINDOW], times[-WINDOW:]
        if len(before) == WINDOW and abs(np.median(now) - np.median(before)) <= TOLERANCE * np.median(before):
            break
    return calls + len(times)


def alternate(
    runs: Sequence[Callable[[], float]], rounds: int, moves: Sequence[Callable[[], object]] = ()
) -> np.ndarray[Any, Any]:
    """Runs each once a round, the order turned round every time, with the garbage collector off.

    Args:
        moves: are called before every other round, in order: they lay out models anew, and make them warm again.

    Returns:
        Milliseconds, (runs, rounds).
    """
    times = np.empty((len(runs), rounds))
    with paused_garbage_collection():
        for turn in range(rounds):
            if turn % 2 == 0:
                for move in moves:
                    move()
            order = range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs)))
            for index in order:
                times[index, turn] = runs[index]()
    return times

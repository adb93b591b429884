"""Two ways of running a model timed beside each other, and what the difference supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prunekit.measure.evidence import Estimate, Times, paired_ratio
from prunekit.measure.timing import Timer, alternate

Run = Callable[[], object]
ROUNDS, FEWER_ROUNDS, LONG_MS = 9, 5, 400.0
"""How often each way is timed; less often where a round of all of them takes longer."""
CALLS_BEFORE, BEFORE_MS = 3, 200.0
"""Calls of each way before it is timed; fewer where they take longer."""


@dataclass(frozen=True)
class Beside:
    """A model as it is and run another way.

    Attributes:
        now_ms, other_ms: medians.
        gain: now over other: above 1 the other way is faster.
    """

    now_ms: float
    other_ms: float
    gain: Estimate

    @property
    def saved_ms(self) -> float:
        """What the other way saves; 0 where the interval of the gain does not lie above 1."""
        return max(0.0, self.now_ms - self.other_ms) if self.gain.low > 1 else 0.0


def alternately(runs: Sequence[Run], device: torch.device) -> Times:
    """Milliseconds (runs, rounds) of several ways of running what is warm already, after a few calls of each."""
    with torch.no_grad():
        timers = [Timer(run, device) for run in runs]
        round_ms = sum(ready(one) for one in timers)
        return alternate(timers, ROUNDS if round_ms <= LONG_MS else FEWER_ROUNDS)


def ready(run: Callable[[], float]) -> float:
    """Calls a few times what other models have warmed the process up for; the milliseconds of the last call."""
    times: list[float] = []
    while len(times) < CALLS_BEFORE and sum(times) < BEFORE_MS:
        times.append(run())
    return times[-1]


def beside(now: Run, other: Run, device: torch.device) -> Beside:
    """Times two ways alternately."""
    times = alternately([now, other], device)
    return compared(times[0], times[1])


def compared(now: Times, other: Times) -> Beside:
    """What (N,) paired times of two ways say."""
    return Beside(float(np.median(now)), float(np.median(other)), paired_ratio(now, other))

"""Timing one forward at a time, on the clock that is right for the device.

What repeated times support: a median, its interval, and the reasons to doubt it. Pure functions of the samples.

Two ways of running a model timed beside each other, and what the difference supports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from prunekit.measure.effort import current_effort
from prunekit.utils.context import paused_garbage_collection
from prunekit.utils.display import plural

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
    """Run until the median time of five calls is within 5 % of the five before, for at most 3 seconds and as many
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
    """Run each once a round, the order turned round every time, with the garbage collector off.

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


Times = np.ndarray[Any, Any]
RESAMPLES = 2000
WIDTH = 0.10
"""Widest 95 % interval, as a share of the median, of a figure that is called stable."""
DRIFT = 0.05
"""Most that the medians of the first and the second half may differ by, where their intervals do not overlap."""
HELD_BACK = 0.05
"""Largest share of time slices in which a process was stopped that a median does not feel."""
SLACK = 0.25
"""Cores: what a machine's own housekeeping takes, and what its counters of CPU time are wrong by."""


class Estimate(NamedTuple):
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Of the interval, as a share of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class Contention:
    """What else ran while a model was timed on the CPU.

    Attributes:
        threads: that the model was given.
        cores: logical cores that this process may use.
        others: cores that other processes kept busy meanwhile.
        quota: cores that the process's container is given.
        held_back: share of the time slices in which this quota was used up, and the process stopped.
    """

    threads: int
    cores: int
    others: float
    quota: float = math.inf
    held_back: float = 0.0

    @property
    def free(self) -> float:
        """Cores that were left, as far as counters of CPU time can tell."""
        left = self.cores - self.others + SLACK
        return min(left, self.quota, self.threads - 1) if self.stopped else left

    @property
    def oversubscribed(self) -> bool:
        """Whether threads had to wait for a core, which voids a measurement."""
        return self.threads > self.free

    @property
    def stopped(self) -> bool:
        """Whether a quota stopped the process too often for a median not to feel it."""
        return self.held_back > HELD_BACK

    def __str__(self) -> str:
        if self.stopped:
            share, given = 100 * self.held_back, f"{self.quota:.3g} core{'s'[: self.quota != 1]}"
            return f"{self.threads} on a CPU quota of {given}, which was used up in {share:.0f} % of the time slices"
        return f"{self.threads} on {self.cores} cores, of which other processes kept {self.others:.1f} busy"


def median_interval(values: Times) -> Estimate:
    """Return the median of (N,) values, and its 95 % percentile bootstrap interval (Efron 1979), fixed seed."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5)).tolist()
    return Estimate(float(np.median(values)), low, high)


def paired_ratio(reference: Times, other: Times) -> Estimate:
    """Return the median of `reference / other` over pairs, with its interval.

    Args:
        reference: (N,) times.
        other: (N,) times, each taken right beside the one in `reference`.
    """
    return median_interval(reference / other)


def doubts(values: Times, contention: Contention | None) -> list[str]:
    """Return why a median does not support a claim, each with what would settle it; empty where it does.

    Args:
        values: (N,) times or ratios, in the order in which they were taken.
        contention: what else ran; None where it does not matter.
    """
    void = oversubscribed(contention)
    found = [void] if void else [_wide(values), _drift(values)]  # what is void needs no other reason
    return [reason for reason in found if reason]


def oversubscribed(found: Contention | None) -> str:
    """That threads had to wait for a core, with what would settle it; empty where they had not."""
    if found is None or not found.oversubscribed:
        return ""
    fewer = math.floor(found.free)
    other = "a larger quota (docker run --cpus, Kubernetes' limits.cpu)" if found.stopped else "an idle machine"
    cure = f"at most {plural(fewer, 'thread')} here, or {other}" if fewer >= 1 else other
    return f"threads oversubscribed, which voids a measurement: {found}; to settle it: {cure}"


def _wide(values: Times) -> str:
    estimate = median_interval(values)
    if estimate.width <= WIDTH:
        return ""
    enough = math.ceil(len(values) * (estimate.width / WIDTH) ** 2 / 10) * 10
    return (
        f"the 95 % interval is {100 * estimate.width:.0f} % of the median wide, at most {100 * WIDTH:.0f} % is stable; "
        f"to settle it: about {enough} repeats at this noise, or an idle machine"
    )


def _drift(values: Times) -> str:
    first, second = (median_interval(half) for half in np.array_split(values, 2))
    change = second.median / first.median - 1
    if abs(change) <= DRIFT or (first.low <= second.high and second.low <= first.high):
        return ""
    return (
        f"the median of the second half is {100 * change:+.0f} % off that of the first, as clock or load changed; to "
        "settle it: the same again once both are steady"
    )


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
    """Return milliseconds (runs, rounds) of several ways of running what is warm already, after a few calls of each."""
    with torch.no_grad():
        timers = [Timer(run, device) for run in runs]
        round_ms = sum(ready(one) for one in timers)
        return alternate(timers, ROUNDS if round_ms <= LONG_MS else FEWER_ROUNDS)


def ready(run: Callable[[], float]) -> float:
    """Call a few times what other models have warmed the process up for; the milliseconds of the last call."""
    times: list[float] = []
    while len(times) < CALLS_BEFORE and sum(times) < BEFORE_MS:
        times.append(run())
    return times[-1]


def beside(now: Run, other: Run, device: torch.device) -> Beside:
    """Time two ways alternately."""
    times = alternately([now, other], device)
    return compared(times[0], times[1])


def compared(now: Times, other: Times) -> Beside:
    """Return what (N,) paired times of two ways say."""
    return Beside(float(np.median(now)), float(np.median(other)), paired_ratio(now, other))

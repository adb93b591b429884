"""Timing of forward passes: one model, several that take turns, and what their times support.

A figure is a median with its interval, and the reasons to doubt it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from prunekit.backends.session import Timer
from prunekit.measure.measurement_effort import current_effort
from prunekit.utils.context import paused_garbage_collection
from prunekit.utils.display import plural

Times = np.ndarray[Any, Any]
WINDOW = 5  # calls in each of the two windows that the warm-up compares
TOLERANCE = 0.05
WARM_UP_MS = 3000.0
STEADY_S = {"cuda": 1.0}
"""A GPU raises its clock over tenths of a second once it has work: calls that agree before agree on a slow clock."""


def warm_up(run: Callable[[], float], kind: str = "cpu") -> int:
    """Run until the times are stable, and return the number of calls.

    They are once the median of five calls is within 5 % of the five before; 3 seconds and the calls that the effort
    allows are the limit.

    A GPU (`kind` is the type of the device) first gets work until its clock is steady.
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
    runs: Sequence[Callable[[], float]],
    rounds: int,
    moves: Sequence[Callable[[], object]] = (),
    *,
    limit_s: float = math.inf,
) -> Times:
    """Return the milliseconds (runs, rounds) of runs that take turns, in reversed order every other round.

    The garbage collector is off meanwhile. `moves` are called in order before every other round: they move the weights
    of models, and warm the models up again. After `limit_s` seconds no round begins, but for the first `FEWER_ROUNDS`.
    """
    times, over = np.empty((len(runs), rounds)), time.perf_counter() + limit_s
    with paused_garbage_collection():
        for turn in range(rounds):
            if turn % 2 == 0:
                for move in moves:
                    move()
            order = range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs)))
            for index in order:
                times[index, turn] = runs[index]()
            if turn + 1 >= FEWER_ROUNDS and time.perf_counter() >= over:
                return times[:, : turn + 1]
    return times


ROUNDS, FEWER_ROUNDS, LONG_MS = 9, 5, 400.0
"""Number of rounds; fewer if a round takes longer than `LONG_MS`."""
CALLS_BEFORE, BEFORE_MS = 3, 200.0
"""Number of calls before a run is timed; fewer if they take longer than `BEFORE_MS`."""


@dataclass(frozen=True)
class PairedTiming:
    """A model timed as it is and run another way, alternately."""

    # now_ms, other_ms: medians
    now_ms: float
    other_ms: float
    gain: Estimate  # now over other: above 1 the other way is faster

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the other way saves; 0 unless the interval of the gain lies above 1."""
        return max(0.0, self.now_ms - self.other_ms) if self.gain.low > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.other_ms:.3g} ms in place of {self.now_ms:.3g} ms: {self.gain.factor}"


def time_paired(now: Callable[[], object], other: Callable[[], object], device: torch.device) -> PairedTiming:
    """Time a model as it is and another way of running it."""
    times = time_runs([now, other], device)
    medians = np.median(times, axis=1)
    return PairedTiming(float(medians[0]), float(medians[1]), paired_ratio(times[0], times[1]))


def time_runs(runs: Sequence[Callable[[], object]], device: torch.device) -> Times:
    """Return milliseconds (runs, rounds) of runs that take turns, after a few calls of each."""
    with torch.no_grad():
        timers = [Timer(run, device) for run in runs]
        round_ms = sum(warm_up_briefly(one) for one in timers)
        return alternate(timers, ROUNDS if round_ms <= LONG_MS else FEWER_ROUNDS)


def warm_up_briefly(run: Callable[[], float]) -> float:
    """Run a few times, in a process that other models have warmed up; return the milliseconds of the last call."""
    times: list[float] = []
    while len(times) < CALLS_BEFORE and sum(times) < BEFORE_MS:
        times.append(run())
    return times[-1]


RESAMPLES = 2000


class Estimate(NamedTuple):
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Width of the interval, as a share of the median."""
        return (self.high - self.low) / self.median

    @property
    def factor(self) -> str:
        """A ratio of times as text, e.g. "1.25× [1.20, 1.31]"."""
        return f"{self.median:.2f}× [{self.low:.2f}, {self.high:.2f}]"


def median_interval(values: Times) -> Estimate:
    """Return the median of (N,) values, and its 95 % percentile bootstrap interval (Efron 1979), fixed seed."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5)).tolist()
    return Estimate(float(np.median(values)), low, high)


def paired_ratio(reference: Times, other: Times) -> Estimate:
    """Return the median of `reference / other` over pairs of times, both (N,), taken one right after the other."""
    return median_interval(reference / other)


WIDTH = 0.10
"""Widest 95 % interval of a stable figure, as a share of its median."""
DRIFT = 0.05
"""Largest difference of the medians of the first and the second half whose intervals do not overlap."""
THROTTLED = 0.05
"""Largest share of periods with throttling that does not affect a median."""
SLACK = 0.25
"""Cores that the system's own housekeeping takes, and by which counters of CPU time are wrong."""


@dataclass(frozen=True)
class Contention:
    """Contention for the CPU while a model was timed."""

    threads: int  # of the model
    cores: int  # logical cores that this process may use
    others: float  # cores that other processes kept busy
    quota: float = math.inf  # cores that the process's container may keep busy
    throttled: float = 0.0  # share of the quota's periods in which it was used up, and the process stopped

    @property
    def free(self) -> float:
        """Cores that were left for the model, as far as counters of CPU time tell."""
        left = self.cores - self.others + SLACK
        return min(left, self.quota, self.threads - 1) if self.often_throttled else left

    @property
    def oversubscribed(self) -> bool:
        """True if threads had to wait for a core, which voids a measurement."""
        return self.threads > self.free

    @property
    def often_throttled(self) -> bool:
        """True if the quota stopped the process so often that a median is affected."""
        return self.throttled > THROTTLED

    def __str__(self) -> str:
        if self.often_throttled:
            share, given = 100 * self.throttled, f"{self.quota:.3g} core{'s'[: self.quota != 1]}"
            return f"{self.threads} on a CPU quota of {given}, which was used up in {share:.0f} % of the time slices"
        return f"{self.threads} on {self.cores} cores, of which other processes kept {self.others:.1f} busy"


def doubts(values: Times, contention: Contention | None) -> list[str]:
    """Return why the median of (N,) times or ratios, as they were taken, supports no claim, each with a remedy."""
    void = oversubscribed(contention)
    found = [void] if void else [_wide(values), _drift(values)]  # a void measurement needs no other reason
    return [reason for reason in found if reason]


def oversubscribed(found: Contention | None) -> str:
    """Return a message that threads had to wait for a core, with a remedy; empty if they had not."""
    if found is None or not found.oversubscribed:
        return ""
    fewer = math.floor(found.free)
    other = "a larger quota (docker run --cpus, Kubernetes' limits.cpu)" if found.often_throttled else "an idle machine"
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

"""What repeated times support: a median, its interval, and the reasons to doubt it. Pure functions of the samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prunekit.numbers import plural

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
    """Median of (N,) values, and its 95 % percentile bootstrap interval (Efron 1979), fixed seed."""
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5)).tolist()
    return Estimate(float(np.median(values)), low, high)


def paired_ratio(reference: Times, other: Times) -> Estimate:
    """Median of `reference / other` over pairs, with its interval.

    Args:
        reference: (N,) times.
        other: (N,) times, each taken right beside the one in `reference`.
    """
    return median_interval(reference / other)


def doubts(values: Times, contention: Contention | None) -> list[str]:
    """Why a median does not support a claim, each with what would settle it; empty where it does.

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

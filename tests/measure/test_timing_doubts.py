"""What made-up times support: intervals, drift, and threads that had no core."""

from __future__ import annotations

import re

import numpy as np
import pytest

from prunekit.measure.latency.timing import WIDTH, Contention, doubts, median_interval, paired_ratio

RNG = np.random.default_rng(0)
QUIET = 10 * RNG.normal(1, 0.01, 40)
"""Milliseconds with one percent of noise."""
IDLE = Contention(threads=1, cores=2, others=0.1)


def test_quiet_times_support_a_claim() -> None:
    assert doubts(QUIET, IDLE) == []
    assert doubts(QUIET, None) == []


def test_the_interval_covers_the_true_median_in_most_repetitions() -> None:
    draws = [RNG.lognormal(0, 0.2, 30) for _ in range(200)]
    covered = [low <= 1 <= high for _, low, high in map(median_interval, draws)]
    assert np.mean(covered) > 0.88


def test_a_wide_interval_is_unstable_and_says_how_many_repeats_settle_it() -> None:
    noisy = 10 * RNG.lognormal(0, 0.4, 30)
    (reason,) = doubts(noisy, IDLE)
    enough = int(re.search(r"about (\d+) repeats", reason)[1])  # type: ignore[index]
    assert f"{100 * median_interval(noisy).width:.0f} % of the median wide" in reason
    more = 10 * RNG.lognormal(0, 0.4, enough)
    assert median_interval(more).width < 2 * WIDTH < median_interval(noisy).width


def test_a_slower_second_half_is_drift_but_not_of_the_ratio() -> None:
    throttled = QUIET * np.where(np.arange(40) < 20, 1, 1.08)
    (reason,) = doubts(throttled, IDLE)
    assert re.search(r"second half is \+[78] % off", reason)
    ratio = paired_ratio(2 * throttled, throttled)
    assert ratio == pytest.approx((2, 2, 2))
    assert doubts(2 * throttled / throttled, IDLE) == []


def test_noise_alone_is_no_drift() -> None:
    noisy = [10 * RNG.lognormal(0, 0.3, 30) for _ in range(50)]
    assert sum("second half" in " ".join(doubts(times, None)) for times in noisy) <= 5


@pytest.mark.parametrize(
    ("threads", "cores", "others", "cure"),
    [
        (2, 2, 1.0, "at most 1 thread here, or an idle machine"),
        (8, 4, 0.0, "at most 4 threads here"),
        (1, 2, 1.9, "to settle it: an idle machine"),
        (2, 2, 0.1, ""),
        (1, 2, 1.0, ""),
        (4, 16, 11.0, ""),
    ],
)
def test_threads_need_a_free_core_each(threads: int, cores: int, others: float, cure: str) -> None:
    found = doubts(QUIET, Contention(threads, cores, others))
    assert len(found) == bool(cure)
    noisy = doubts(QUIET * RNG.lognormal(0, 1, 40), Contention(threads, cores, others))
    assert (noisy == found) == bool(cure)  # what is void needs no other reason
    assert not found or (found[0].startswith("threads oversubscribed, which voids") and cure in found[0])


@pytest.mark.parametrize(
    ("threads", "quota", "throttled", "said"),
    [
        (
            4,
            2.0,
            0.6,
            "4 on a CPU quota of 2 cores, which was used up in 60 % of the time slices; to settle it: at most 2",
        ),
        (2, 2.0, 0.3, "to settle it: at most 1 thread here, or a larger quota"),
        (
            1,
            0.5,
            0.9,
            "1 on a CPU quota of 0.5 cores, which was used up in 90 % of the time slices; to settle it: a larger",
        ),
        (
            1,
            1.0,
            0.2,
            "1 on a CPU quota of 1 core, which was used up in 20 % of the time slices; to settle it: a larger",
        ),
        (2, 2.0, 0.04, ""),
        (16, 2.0, 0.0, ""),
    ],
)
def test_a_quota_that_is_used_up_voids_what_is_timed(threads: int, quota: float, throttled: float, said: str) -> None:
    found = doubts(QUIET, Contention(threads, 64, 30.0, quota, throttled))
    assert len(found) == bool(said)
    assert not found or (found[0].startswith("threads oversubscribed, which voids") and said in found[0])

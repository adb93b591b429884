"""What is aimed at next, and which attempt is the best. No model, no time."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from made_up_timings import took

from prunekit.pruning.latency.latency_target import GOAL, NEAR, Attempt, distance, mean_excess, next_share


def test_of_attempts_those_within_the_tolerance_come_first_and_of_these_those_that_are_not_slower() -> None:
    best_first = [0.99, 0.985, 1.0, 0.975, 0.9701, 1.004, 1.0299, 0.9699, 0.95, 1.0301, 1.05]
    assert sorted(sorted(best_first), key=distance) == best_first


@settings(max_examples=200)
@given(st.floats(0.5, 2.0), st.floats(-0.4, 0.4), st.floats(-0.3, 0.3))
def test_the_search_ends_at_the_goal_for_any_smooth_machine(first: float, slope: float, bend: float) -> None:
    def excess(share: float) -> float:
        at = math.log(share)
        return math.exp(math.log(first) + (1 + slope) * at + bend * math.tanh(at))

    attempts: list[Attempt] = []
    share = 1.0
    for number in range(8):
        attempts.append(Attempt(number, share, 1.0, 1.0, excess(share), took(2.0)))
        if abs(mean_excess(attempts, number) - GOAL) <= NEAR:
            return
        share = next_share(attempts)
    pytest.fail(str([(one.share, one.excess) for one in attempts]))


def tried(*points: tuple[float, float]) -> list[Attempt]:
    """Attempts for some shares, with what each took."""
    return [Attempt(number, share, 1.0, 1.0, excess, took(2.0)) for number, (share, excess) in enumerate(points)]


def test_where_kernels_change_the_search_goes_on_beyond_what_was_tried() -> None:
    """As resnet34 in eager was measured: wider plans were faster, until they were not."""
    found = next_share(tried((1.0, 0.963), (1.031, 0.879), (1.155, 1.039), (1.055, 0.890)))
    assert 1.055 < found < 1.155


@given(
    st.floats(0.2, 0.98), st.floats(1.0, 5.0), st.dictionaries(st.floats(0.21, 4.9), st.floats(0.2, 5.0), max_size=6)
)
def test_what_is_tried_next_lies_between_neighbors_on_either_side_of_the_goal(
    fast: float, slow: float, between: dict[float, float]
) -> None:
    took_for = {0.2: fast, **between, 5.0: slow}
    sides = {share: excess > GOAL for share, excess in took_for.items()}
    assert not sides[0.2]
    assert sides[5.0]
    assume(all(abs(excess / GOAL - 1) > 1e-6 for excess in took_for.values()))
    found = next_share(tried(*took_for.items()))
    low = max(share for share in sides if share <= found * (1 + 1e-9))
    high = min(share for share in sides if share >= found * (1 - 1e-9))
    assert (not sides[low] and sides[high]) or low >= high  # these as near to each other as rounding goes

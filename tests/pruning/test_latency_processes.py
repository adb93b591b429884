"""Several processes that measure a plan: how many, what counts of them, and what they support."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from made_up_timings import DENSE_MS, took
from torch import nn

from prunekit.backends.session import inputs_of
from prunekit.measure.measurement_effort import Effort, effort_of
from prunekit.pruning import latency_budget_search
from prunekit.pruning.latency.device_clock import Timing
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings


@pytest.fixture(autouse=True)
def _one_try() -> Iterator[None]:
    """However unstable: in processes of their own, as many as by default."""
    with effort_of(Effort(tries=1)):
        yield


def test_the_median_process_counts_and_the_interval_holds_all() -> None:
    found = latency_budget_search._median([took(1.9), took(2.3), replace(took(2.0), stable=False, doubts=("wide",))])
    assert (found.ms, found.speedup) == (DENSE_MS / 2.0, 2.0)
    assert (found.speedup_low, found.speedup_high) == (1.9 * 0.99, 2.3 * 1.01)
    assert found.stable
    assert not found.doubts
    noisy = latency_budget_search._median([replace(took(2.0), stable=False, doubts=("wide",))] * 2 + [took(2.0)])
    assert not noisy.stable
    assert noisy.doubts == ("wide",)


def test_processes_that_never_agree_support_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    processes_say(monkeypatch, map(took, itertools.cycle([2.0, 2.4, 1.7])))
    none = nn.Identity()
    found = latency_budget_search.time_pair(
        none, none, inputs_of((1,)), PruneSettings(BudgetSettings(speedup=2.0)), 1, 15
    )
    assert not found.stable
    assert found.doubts[0].startswith("15 processes differ: the 95 % interval of their median is ")


@pytest.mark.slow
def test_a_model_that_no_other_process_can_have_is_said() -> None:
    class Local(nn.Linear):  # of a function: pickle does not find it
        pass

    wanted = PruneSettings(BudgetSettings(speedup=2.0), target=Target(block=1))
    with effort_of(Effort(processes=1, tries=1)):
        timing = latency_budget_search.time_pair(Local(4, 4), Local(4, 2), inputs_of((4,)), wanted, 5, 1)
    (note,) = timing.notes
    assert note.startswith("eager: timed in this process, not in one of its own")


def processes_say(monkeypatch: pytest.MonkeyPatch, figures: Iterator[Timing]) -> None:
    """In the place of processes that measure, each once."""
    monkeypatch.setattr(
        latency_budget_search, "prepared_latency", lambda *_: nullcontext(lambda rounds, limit_s: next(figures))
    )
    monkeypatch.setattr(latency_budget_search, "as_timing", lambda found: found)


@pytest.mark.parametrize(
    ("speedups", "latency_ms", "most", "processes"),
    [
        ((2.0, 2.01, 2.0), None, 7, 3),
        ((2.0, 2.2, 2.0, 2.0, 2.0, 2.0, 2.0), None, 7, 7),
        ((2.0, 2.02, 2.0, 2.02), None, 7, 4),
        ((2.0, 2.04, 2.0, 2.02, 2.0, 2.0), None, 7, 6),
        ((2.0, 2.2) * 5, None, 7, 7),
        ((2.0, 2.2) * 8, None, 15, 15),
        ((2.0, 2.01, 2.0), 50.0, 15, 3),
    ],
)
def test_processes_that_disagree_are_joined_by_more(
    speedups: tuple[float, ...], latency_ms: float | None, most: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, none = iter(speedups), nn.Identity()
    processes_say(monkeypatch, map(took, left))
    budget = BudgetSettings(latency_ms=latency_ms) if latency_ms else BudgetSettings(speedup=2.0)
    found = latency_budget_search.time_pair(none, none, inputs_of((1,)), PruneSettings(budget), 1, most)
    assert len(speedups) - len(list(left)) == processes
    assert found.speedup == np.median(speedups[:processes])


@pytest.mark.parametrize("processes", [3, 5, 8, 15])
def test_the_interval_over_processes_holds_the_true_speedup(processes: int) -> None:
    """In 95 of 100 draws, as it says; by the normal distribution in place of Student's it would in 85 where n is 3."""
    draws = 2.0 * (1 + 0.02 * np.random.default_rng(0).standard_normal((2000, processes)))
    held = 0
    for speedups in draws:
        within = latency_budget_search._uncertainty(
            [took(one) for one in speedups], PruneSettings(BudgetSettings(speedup=2.0))
        )
        held += abs(np.median(speedups) - 2.0) <= within * np.median(speedups)
    assert 0.93 < held / len(draws) < 0.985


def test_of_a_budget_in_milliseconds_milliseconds_are_what_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([replace(took(2.0), ms=ms) for ms in (50.0, 55.0, 50.0, 50.0, 55.0, 50.0, 55.0)])
    processes_say(monkeypatch, figures)
    none = nn.Identity()
    latency_budget_search.time_pair(none, none, inputs_of((1,)), PruneSettings(BudgetSettings(latency_ms=50.0)), 1, 7)
    assert not list(figures)


class BusyMachine:
    """A clock that goes on by what each process takes, whose figures never agree."""

    def __init__(self, process_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.process_s, self.processes = 0.0, process_s, 0
        self.limits: list[float] = []
        draw = np.random.default_rng(0)

        def measured(rounds: int, limit_s: float) -> Timing:
            self.limits.append(limit_s)
            self.now += self.process_s
            self.processes += 1
            noisy = took(float(2.0 * np.exp(0.3 * draw.standard_normal())))
            return replace(noisy, stable=False, doubts=("the 95 % interval is 40 % of the median wide",))

        monkeypatch.setattr(latency_budget_search, "prepared_latency", lambda *_: nullcontext(measured))
        monkeypatch.setattr(latency_budget_search, "as_timing", lambda found: found)
        monkeypatch.setattr(latency_budget_search, "perf_counter", lambda: self.now)


@pytest.mark.parametrize(("process_s", "processes"), [(20.0, 5), (40.0, 3), (1000.0, 1)])
def test_no_process_begins_after_the_limit_but_the_first(
    process_s: float, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, none, said = BusyMachine(process_s, monkeypatch), nn.Identity(), list[str]()
    with effort_of(Effort()):
        found = latency_budget_search.time_pair(
            none, none, inputs_of((1,)), PruneSettings(BudgetSettings(speedup=2.0)), 1, 15, limit_s=100, log=said.append
        )
    assert machine.processes == found.processes == processes
    assert machine.limits[0] == 100
    assert not found.stable
    assert found.doubts[-1].startswith(f"measured in {processes} process")
    assert "target.limit_s, 600 s for all measurements, left no time for more" in found.doubts[-1]
    assert said[0] == "latency: timing both models in process 1 of 3 to 15, at most 100 s more"


def test_a_second_try_that_has_no_time_replaces_no_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, none, said = BusyMachine(20.0, monkeypatch), nn.Identity(), list[str]()
    with effort_of(Effort()):
        settings = PruneSettings(BudgetSettings(speedup=2.0))
        found = latency_budget_search.time_pair(
            none, none, inputs_of((1,)), settings, 1, 7, limit_s=170, log=said.append
        )
    assert len(said) == machine.processes + 1
    assert said[7:9] == [
        "latency: both models are timed again, with twice the rounds: the 95 % interval is 40 % of the median wide",
        "latency: timing both models in process 1 of 3 to 7, at most 30 s more",
    ]
    assert (machine.processes, found.processes) == (9, 7)
    assert not found.stable

"""Profiles of models whose own Python has a say in which widths they can have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from made_up_timings import time_by_macs
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from prunekit.channels.trace import trace
from prunekit.errors import RunError
from prunekit.measure.latency_profile import network_timing
from prunekit.measure.latency_profile.network_timing import LayerTimes, PreparedNetwork, read_times
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork
from prunekit.measure.measurement_effort import Effort, effort_of
from prunekit.planning.budgets.cost_model import Span
from prunekit.planning.budgets.latency_table import LatencyTable, LatencyTerm, LayerLatency
from prunekit.pruning.latency import profiling
from prunekit.pruning.latency.profiling import Profile, profile
from prunekit.report.pages.profile_page import fitted
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings

WANTED = PruneSettings(BudgetSettings(speedup=1.5), target=Target(block=1))


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_networks_have_the_sizes_that_only_a_trial_finds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example = VisionTransformer(32, 8, 2, 2, 32, 64).eval(), (torch.randn(1, 3, 32, 32),)
    nn.init.normal_(model.heads[0].weight, std=0.02)  # zeros, else: every class would be worth the same
    chart = trace(model, example)
    assert not any(size.name == "hidden_dim" for size in chart.sizes)
    lines = list[str]()
    found = profile(model, example, settings=WANTED, cache=tmp_path, log=lines.append)
    runtime = WANTED.target.runtime
    assert lines[0] == f"profile: 10 networks of all widths, timed in {runtime} with the dense one beside each"
    assert len(lines) == 11
    assert "hidden_dim" in {size.name for size in found.channel_map.sizes}
    widths = [size.value(sample.keep) for size in found.channel_map.sizes for sample in found.samples]
    assert len(found.samples) == 10
    assert len(set(map(str, widths))) > 5
    assert {fit["module"] for fit in found.fits(model)} >= {"conv_proj", "heads.head"}


class OneAtATime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ValueError("one at a time")
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


@pytest.mark.usefixtures("little_effort")
def test_a_network_that_does_not_run_is_named(tmp_path: Path) -> None:
    model, example, target = OneAtATime().eval(), (torch.randn(1, 8),), replace(WANTED.target, batch=2)
    with pytest.raises(RunError, match=r"dense: does not run in eager: ValueError: one at a time"):
        profile(model, example, target=target, settings=WANTED, cache=tmp_path, log=lambda text: None)


def test_where_kernels_change_is_told_and_drawn() -> None:
    """Also where a layer takes nothing beyond, so that only the end of what it takes before says so."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    chart = trace(model, (torch.randn(1, 8),))
    inputs = chart.traced.trace.labels["2.weight"][1]
    assert inputs is not None
    before, beyond = Span(inputs, 0, 20), Span(inputs, 20, np.inf)
    terms = LatencyTerm(0.03, (inputs,), (8,), (before,)), LatencyTerm(0.01, (inputs,), (8,), (beyond,))
    layers = LayerLatency("0", 0.1, terms[:1]), LayerLatency("2", 0.2, terms)
    table, dense = LatencyTable({}, layers, 0.0, 1.0, 1.0), np.ones(chart.n_labels, dtype=bool)
    narrow = dense.copy()
    narrow[chart.traced.final[inputs][12:]] = False
    samples = [
        TimedNetwork(
            keep, LayerTimes(1.0, 1.0, {layer.module: layer.at(keep[chart.traced.final]) for layer in layers}, 0.0)
        )
        for keep in (dense, narrow)
    ]
    found = Profile(chart, table, (), tuple(samples), (), 1.0)
    assert {row["module"]: (row["changes_at"], row["steps"]) for row in found.rows()} == {
        "2": ("20", "8"),
        "0": ("20", "8"),
    }
    fits = {fit["module"]: fit for fit in json.loads(json.dumps(found.fits(model), allow_nan=False))}
    assert [term["spans"] for term in fits["2"]["terms"]] == [[[0, 0, 20]], [[0, 20, None]]]
    kept = np.array([[32.0], [20.0], [19.0], [8.0]])
    assert fitted(fits["2"], kept) == pytest.approx([0.2 + 0.32, 0.2 + 0.24, 0.2 + 0.72, 0.2 + 0.24])
    assert [row["ms"] for row in fits["2"]["measured"]] == pytest.approx(fitted(fits["2"], np.array([[32.0], [12.0]])))


@pytest.mark.parametrize(("seconds", "measured"), [(0.0, 10), (14.5, 15), (100.0, 20)])
def test_networks_are_measured_until_the_limit_and_ten_in_any_case(
    seconds: float, measured: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a clock on which each network takes a second."""
    time_by_macs(monkeypatch)
    made_up, now = profiling.time_networks, [0.0]

    def timed(*arguments: Any, **named: Any) -> Iterator[LayerTimes]:
        for found in made_up(*arguments, **named):
            now[0] += 1.0
            yield found

    monkeypatch.setattr(profiling, "time_networks", timed)
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    found = profile(model, torch.randn(1, 8), networks=20, limit_s=seconds, cache=tmp_path)
    assert len(found.samples) == measured
    assert [note for note in found.notes if "20 networks were measured" in note] == (
        []
        if measured == 20
        else [
            f"{measured} of 20 networks were measured in the {seconds:.0f} s that they may take; a larger "
            "target.limit_s, or an idle machine, makes predictions better"
        ]
    )


class BusyMachine:
    """In the place of the process that measures: doubts the first times of some networks, and the second of others.

    The first measurement of a network takes 8 ms, the second 4, beside 10 of the dense one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, once: str, twice: str = "") -> None:
        self.doubtful = dict.fromkeys(once.split(), 1) | dict.fromkeys(twice.split(), math.inf)
        self.asked: list[str] = []
        monkeypatch.setattr(network_timing, "WorkerProcess", lambda timer, folder: nullcontext(self))

    def profile(self, cache: Path, lines: list[str], **more: Any) -> Profile:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(6)))
        with effort_of(Effort()):
            return profile(model, torch.randn(1, 128), networks=10, cache=cache, log=lines.append, **more)

    def ask(self, network: PreparedNetwork) -> LayerTimes:
        name = network.name.split()[2]  # profile: network 3 of 10, ...
        self.asked.append(name)
        times = self.asked.count(name)
        doubts = ("a neighbor",) if times <= self.doubtful.get(name, 0) else ()
        return LayerTimes(8.0 / times, 10.0, {f"{index}.0": 1.0 / times for index in range(6)}, 0.0, doubts)


@pytest.mark.slow
def test_doubtful_networks_are_timed_a_second_time_in_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine, lines = BusyMachine(monkeypatch, once="3 5", twice="4"), list[str]()
    found = machine.profile(tmp_path, lines)
    assert machine.asked == [str(number) for number in [*range(1, 11), 3, 4, 5]]
    assert lines[11] == "profile: 3 of 10 networks are timed a second time, as their times are doubtful: a neighbor"
    assert len(lines) == 15
    # What is sure is taken alone, and of what is not the mean.
    assert [sample.times.whole_ms for sample in found.samples] == pytest.approx([8, 8, 4, 6, 4, *[8] * 5])
    assert found.doubts == ["a neighbor"]
    assert found.notes[-1].startswith("of 10 networks 1 was timed on a machine too noisy to trust that figure; when")
    cached = machine.profile(tmp_path, lines)
    assert len(machine.asked) == 13  # a third time only where that is asked for
    assert [one.times for one in cached.samples] == [one.times for one in found.samples]
    machine.doubtful.clear()
    again = machine.profile(tmp_path, lines, again=True)
    assert machine.asked[13:] == ["4"]
    assert again.doubts == []


@pytest.mark.slow
def test_an_interrupted_second_pass_goes_on_in_the_next_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a clock on which each network takes a second: the limit allows one of the second pass."""
    machine, lines = BusyMachine(monkeypatch, once="3 5 7"), list[str]()
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: float(len(machine.asked))))
    found = machine.profile(tmp_path, lines, limit_s=11.0)
    assert machine.asked[10:] == ["3"]
    assert "a second time, in at most 1 s, as" in lines[11]
    assert len(found.doubts) == 2
    machine.profile(tmp_path, lines, limit_s=11.0)
    assert machine.asked[11:] == ["5", "7"]
    assert not any(times.doubts for times in map(read_times, tmp_path.iterdir()) if times is not None)

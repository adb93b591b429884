"""Budgets of time: what is aimed at next, what is refused, and what is delivered."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chains import Chain, random_table
from made_up_timings import DENSE_MS, took
from torch import nn

import prunekit
from prunekit.backends.session import Inputs, inputs_like
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.compaction.folded_norms import FoldedNorm
from prunekit.deploy.deployment_transform import transform_of
from prunekit.errors import NotMeasuredError, PlanError, RunError, UsageError
from prunekit.measure.latency_profile.network_timing import LayerTimes
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork
from prunekit.measure.measurement_effort import Effort, effort_of
from prunekit.planning.budgets.latency_table import LatencyTable
from prunekit.planning.plan import Plan
from prunekit.pruning import latency_budget_search
from prunekit.pruning.latency import profiled_networks
from prunekit.pruning.latency.device_clock import Timing
from prunekit.pruning.latency.latency_target import GOAL, NEAR, TOLERANCE, LatencyResult, LatencyTarget
from prunekit.pruning.latency.profiling import NetworkPrediction, Profile, profile
from prunekit.pruning.latency_budget_search import TimedPlanSearch, with_profile
from prunekit.pruning.plan_search import PlanSearch
from prunekit.settings.deployment import DeploySettings, Target
from prunekit.settings.pruning import WITHOUT_EFFECT, BudgetSettings, PruneSettings
from prunekit.utils.tensors import lies_channels_last

EXAMPLE = (torch.zeros(1, 3, 16, 16),)
ONE_BY_ONE = Target(block=1)


@cache
def net() -> tuple[nn.Module, ChannelMap, LatencyTable]:
    torch.manual_seed(0)
    model = Chain([32, 48, 32], [3, 3, 3], shortcut=True).eval()
    channel_map = trace(model, EXAMPLE)
    table = random_table(channel_map, (1,), 0)
    scale = DENSE_MS / table.at(channel_map)
    scaled = replace(table, outside=scale * table.outside, factor=scale * table.factor, dense_ms=DENSE_MS)
    return model, channel_map, scaled


class Machine:
    """Takes the time that a table says to the power of a bias, with noise: in the place of a measurement."""

    def __init__(self, bias: float, noise: float = 0.0) -> None:
        self.bias, self.noise, self.random, self.measured = bias, noise, np.random.default_rng(0), 0
        self.limits: list[float] = []

    def __call__(
        self,
        model: nn.Module,
        compact: nn.Module,
        inputs: Inputs,
        settings: PruneSettings,
        rounds: int,
        most: int,
        *,
        limit_s: float,
        log: Callable[[str], object],
    ) -> Timing:
        self.measured += 1
        self.limits.append(limit_s)
        _, channel_map, table = net()
        speedup = table.at(channel_map) / self._predicted(compact, channel_map, table)
        return took(float(speedup**self.bias * math.exp(self.noise * self.random.standard_normal())))

    def _predicted(self, compact: nn.Module, channel_map: ChannelMap, table: LatencyTable) -> float:
        keep = np.ones(channel_map.n_labels, dtype=bool)
        for group in channel_map.groups:
            name, axis = group.slots[0]
            keep[group.labels[compact.get_parameter(name).shape[axis] :]] = False
        return table.at(channel_map, keep)


def asking(wanted: PruneSettings) -> TimedPlanSearch:
    """A search by widths alone with a profile that was made up."""
    wanted = replace(wanted, depth=False)
    model, channel_map, table = net()
    profiled = Profile(channel_map, table, (), (), (), 0.0)
    target = LatencyTarget(model, channel_map, inputs_like(EXAMPLE), wanted, profiled)
    return TimedPlanSearch(model, (EXAMPLE,), wanted, channel_map, latency=target, log=lambda text: None)


def delivered_on(machine: Machine, monkeypatch: pytest.MonkeyPatch, **budget: float) -> tuple[Plan, LatencyResult]:
    monkeypatch.setattr(latency_budget_search, "time_pair", machine)
    search = asking(PruneSettings(BudgetSettings(**budget), scope="per_mac", target=ONE_BY_ONE))
    planned = search.find()
    return planned.plan, search.deliver(planned, planned.compact)


@pytest.mark.parametrize("bias", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("budget", [{"speedup": 2.0}, {"latency_ms": 6.0}, {"speedup": 1.5, "latency_ms": 5.0}])
def test_what_is_delivered_is_what_was_asked_for_however_wrong_the_prediction(
    bias: float, budget: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, found = delivered_on(Machine(bias), monkeypatch, **budget)
    assert found.within
    assert found.excess == max(
        value / found.final.speedup if k == "speedup" else found.final.ms / value for k, value in budget.items()
    )
    assert abs(found.excess - GOAL) <= NEAR
    assert not found.shortfalls
    assert plan.provenance["prune"]["budget"].items() >= budget.items()
    assert found.attempts[-1].plan == found.attempts[-2].plan  # what is taken was measured twice


def test_every_attempt_is_kept_and_noise_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1.3, noise=0.05)
    _, found = delivered_on(machine, monkeypatch, speedup=2.0)
    assert len(found.attempts) == machine.measured - 1
    assert found.summary()["attempts"][0]["share"] == 1.0


def test_on_a_busy_machine_the_search_ends_in_time_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement takes a minute and more, by a clock of its own, and no two agree."""
    machine, now = Machine(1.0, noise=0.5), [0.0]

    def busy(*arguments: Any, **named: Any) -> Timing:
        now[0] += 80.0
        return replace(machine(*arguments, **named), stable=False, doubts=("noise",))

    monkeypatch.setattr(latency_budget_search, "time_pair", busy)
    monkeypatch.setattr(latency_budget_search, "perf_counter", lambda: now[0])
    search, said = asking(PruneSettings(BudgetSettings(speedup=2.0), scope="per_mac", target=ONE_BY_ONE)), list[str]()
    search = replace(search, log=said.append)
    planned = search.find()
    limit_s = ONE_BY_ONE.limit_s
    assert machine.measured == 3  # the third begins before 0.35 * 600 s are over
    assert machine.limits == [(0.35 * limit_s - spent) / 2 for spent in (0, 80, 160)]
    found = search.deliver(planned, planned.compact)
    assert machine.limits[-1] == 0.25 * limit_s
    assert not found.final.stable
    assert any(
        "the search for a plan ended after 3 measurements: target.limit_s, 600 s" in one for one in found.shortfalls
    )
    assert any(line.startswith("latency: the search for a plan ended after 3") for line in said)


def test_what_is_slower_than_asked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = delivered_on(Machine(1.0), monkeypatch, speedup=2.0)
    slower = replace(found, final=took(1.9))
    assert slower.shortfalls == [
        "budget speedup 2.00×: delivered 5.263 ms, 1.90× the dense model's speed: 5.3 % slower than asked for"
    ]
    assert not slower.within
    barely = replace(found, final=took(1.99))
    assert barely.within
    assert "0.5 % slower than asked for" in barely.shortfalls[0]
    faster = replace(found, final=took(2.2))
    assert "9.1 % faster than asked for" in faster.shortfalls[0]
    unbound = replace(found, binding=False, final=took(2.2))
    assert unbound.within
    assert not unbound.shortfalls
    noisy = replace(found, final=replace(took(2.0), stable=False, doubts=("too wide",)))
    assert noisy.shortfalls == ["budget speedup 2.00×: the figure is unstable: too wide"]
    here = replace(found, final=replace(took(2.0), notes=("eager: timed in this process",)))
    assert here.shortfalls == ["budget speedup 2.00×: eager: timed in this process"]


def test_another_budget_may_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = delivered_on(Machine(1.0), monkeypatch, speedup=1.1, macs=0.2)
    assert not found.binding
    assert len(found.attempts) == 1
    assert found.within
    assert found.excess < 1 - TOLERANCE


def test_what_cannot_be_had_is_refused_with_the_best_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        PlanError, match=r"budget speedup 1000000.00×: the plan predicted to be fastest takes .* \(measured\)"
    ):
        delivered_on(Machine(0.8), monkeypatch, speedup=1e6)
    wanted = PruneSettings(BudgetSettings(speedup=1e6), ignore=("layers.0",), target=ONE_BY_ONE)
    with pytest.raises(PlanError, match=r"predicted to be fastest .* relax ignore"):
        asking(wanted).require_reachable()
    asking(PruneSettings(BudgetSettings(speedup=1.5), target=ONE_BY_ONE)).require_reachable()


def test_where_no_plan_is_faster_than_the_dense_model_a_speedup_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency_budget_search, "time_pair", None)
    search = asking(PruneSettings(BudgetSettings(speedup=1.1), min_channels=1000, target=ONE_BY_ONE))
    for refused in (search.require_reachable, search.predict):
        with pytest.raises(PlanError, match=r"budget speedup: at least 1.1x was asked for, .* no more than 1x"):
            refused()


def test_what_is_predicted_to_be_just_possible_is_measured_before_it_is_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, channel_map, table = net()
    most = table.at(channel_map) / table.at(channel_map, channel_map.completed(narrow(channel_map)))
    for share, machine, times in ((0.97, Machine(0.9), 1), (0.9, Machine(0.9), 0), (0.97, Machine(1.0), 1)):
        monkeypatch.setattr(latency_budget_search, "time_pair", machine)
        search = asking(PruneSettings(BudgetSettings(speedup=share * most), target=ONE_BY_ONE))
        if times and machine.bias < 1:
            with pytest.raises(PlanError, match="is predicted to be faster; raise the budget"):
                search.require_reachable()
        else:
            search.require_reachable()
        assert machine.measured == times


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ignore": ("layers.0",)}, "it contradicts ignore, without which"),
        ({"min_channels": 10}, "it contradicts min_channels, without which"),
        ({"target": Target(block=16)}, "it contradicts round_to or target.block, without which"),
    ],
)
def test_a_refusal_names_what_a_budget_of_time_contradicts(
    changed: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, channel_map, table = net()
    most = table.at(channel_map) / table.at(channel_map, channel_map.completed(narrow(channel_map)))
    monkeypatch.setattr(latency_budget_search, "time_pair", Machine(1.0))
    wanted = PruneSettings(BudgetSettings(speedup=0.94 * most), **({"target": ONE_BY_ONE} | changed))
    with pytest.raises(PlanError, match=rf"\(measured\).* is predicted to be faster \({named} .* can be had\); raise"):
        asking(wanted).require_reachable()


def test_a_wrong_prediction_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, channel_map, table = net()
    machine = Machine(1.6)
    least = table.at(channel_map) / min(table.at(channel_map, channel_map.completed(narrow(channel_map))), DENSE_MS)
    asked = least**1.3  # beyond what the table holds for possible, not beyond what is measured
    monkeypatch.setattr(latency_budget_search, "time_pair", machine)
    asking(PruneSettings(BudgetSettings(speedup=asked), target=ONE_BY_ONE)).require_reachable()
    _, found = delivered_on(machine, monkeypatch, speedup=asked)
    assert found.within


def narrow(channel_map: ChannelMap) -> Any:
    keep = np.ones(channel_map.n_labels, dtype=bool)
    for group in channel_map.groups:
        keep[group.labels[1:]] = False
    return keep


def test_widths_are_multiples_of_the_targets_block_and_of_round_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_budget_search, "time_pair", Machine(1.0))
    wanted = PruneSettings(BudgetSettings(speedup=1.5), scope="per_mac", round_to=6, target=Target(block=4))
    plan = asking(wanted).find().plan
    widths = plan.widths().values()
    assert all(kept % 12 == 0 or kept == dense for kept, dense in widths)
    assert any(kept < dense for kept, dense in widths)
    assert plan.provenance["prune"]["round_to"] == 6


@pytest.mark.parametrize(
    ("off", "doubtful", "refused"), [(1.6, 3, True), (1.6, 2, False), (1.2, 4, False), (0.7, 4, True)]
)
def test_a_table_of_doubtful_times_that_predicts_nothing_is_refused(
    off: float, doubtful: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, channel_map, table = net()
    doubts = [("a neighbor; to settle it: an idle machine",) if index < doubtful else () for index in range(4)]
    keep = np.ones(channel_map.n_labels, dtype=bool)
    samples = tuple(TimedNetwork(keep, LayerTimes(8.0, 10.0, {}, 0.0, why)) for why in doubts)
    checks = tuple(NetworkPrediction(times * 8.0, 8.0, 0.5, held_out) for times, held_out in ((1, False), (off, True)))
    profiled = Profile(channel_map, table, checks, samples, (), 0.0)
    monkeypatch.setattr(latency_budget_search, "profile", lambda *_, **__: profiled)
    search = PlanSearch(model, (EXAMPLE,), PruneSettings(BudgetSettings(speedup=1.5)), channel_map)
    assert with_profile(search).latency is not None  # by the effort of tests, which time too little to heed doubts
    with effort_of(Effort()), nullcontext() if not refused else pytest.raises(RunError) as error:
        assert with_profile(search).latency is not None
    open_ended = replace(search, settings=PruneSettings(BudgetSettings(speedup=WITHOUT_EFFECT["speedup"])))
    with effort_of(Effort()):
        assert with_profile(open_ended).latency is not None  # as of a frontier, for which nobody asked for a time
    if error is None:
        return
    with effort_of(Effort()), pytest.raises(NotMeasuredError, match="too noisy"):
        with_profile(search, measure=False)  # a dry run goes on without predictions
    said = str(error.value)
    assert f"of 4 networks {doubtful} were timed on a machine too noisy" in said
    assert f"a median error of {100 * abs(off - 1):.1f} %, at most 25.0 %" in said
    assert "The first doubt: a neighbor" in said
    for cure in ("an idle machine", "target.threads", "target.limit_s", "remeasure=True", "`prunekit profile RECIPE"):
        assert cure in said


def test_another_budget_that_cannot_be_met_is_refused_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*given: Any, **named: Any) -> None:
        raise AssertionError("nothing is to be timed")

    monkeypatch.setattr(latency_budget_search, "profile", measured)
    model, channel_map, _ = net()
    for budget, said in (
        ({"macs": 1e-6}, "budget macs: at most 1e-06"),
        ({"size_mb": 1e-9}, "budget size_mb: at most"),
    ):
        wanted = PruneSettings(BudgetSettings(speedup=1.5, **budget), scope="per_mac")
        with pytest.raises(PlanError, match=said):
            with_profile(PlanSearch(model, (EXAMPLE,), wanted, channel_map))
    whole = PruneSettings(BudgetSettings(speedup=1.5, macs=1.0), scope="per_mac")  # which all of it meets
    with pytest.raises(AssertionError, match="nothing is to be timed"):
        with_profile(PlanSearch(model, (EXAMPLE,), whole, channel_map))


@pytest.mark.parametrize(
    "other", [[torch.zeros(3, 2)] * 2, torch.zeros(3, 2), torch.tensor(1.0), nn.Identity()], ids=repr
)
def test_what_no_batches_can_be_made_of_cannot_be_timed(other: Any) -> None:
    model, channel_map, _ = net()
    wanted = PruneSettings(BudgetSettings(speedup=2.0))
    with pytest.raises(UsageError, match=r"budget speedup: .*expected tensors, each with the batch on its first"):
        with_profile(PlanSearch(model, ((*EXAMPLE, other),), wanted, channel_map))


class TwoInputs(nn.Module):
    """Images beside numbers of classes, as a conditional model takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.classes = nn.Conv2d(3, 48, 3, padding=1), nn.Embedding(7, 48)
        self.mixed, self.head = nn.Conv2d(48, 64, 3, padding=1), nn.Linear(64, 5)

    def forward(self, images: torch.Tensor, classes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        both = self.images(images).relu() + self.classes(classes)[:, :, None, None] * scale[:, :, None, None]
        return self.head(self.mixed(both).relu().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
@pytest.mark.parametrize("runtime", ["eager", "onnxruntime"])
def test_a_model_of_several_inputs_is_timed(runtime: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime")
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))
    torch.manual_seed(0)
    example = (torch.randn(1, 3, 32, 32), torch.tensor([6]), torch.randn(1, 48))
    target = Target(runtime, batch=2)
    found = prunekit.prune(TwoInputs().eval(), example, speedup=1.3, target=target)
    assert found.delivered is not None
    asked = found.delivered.target
    assert [tuple(one.shape) for one in asked.inputs.one] == [(1, 3, 32, 32), (1,), (1, 48)]
    assert {layer["module"] for layer in asked.profile.rows()} >= {"images", "mixed", "head"}
    assert found.delivered.final.ms > 0
    assert found.model(*example).shape == (1, 5)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu()).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_what_is_timed_is_deployed_the_dense_model_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, seen = Normed().eval(), list[nn.Module]()
    channel_map, deploy = trace(model, EXAMPLE), DeploySettings(fold_batchnorm=True, channels_last=True)
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))

    def machine(dense: nn.Module, compact: nn.Module, *_: object, **__: object) -> Timing:
        seen.extend([dense, compact])
        return took(2.0)

    monkeypatch.setattr(latency_budget_search, "time_pair", machine)
    wanted = PruneSettings(BudgetSettings(speedup=2.0), target=ONE_BY_ONE)
    transform = transform_of(model, EXAMPLE, deploy)
    search = with_profile(PlanSearch.trace(model, EXAMPLE, wanted, channel_map=channel_map), deploy)
    assert isinstance(search, TimedPlanSearch)
    profiled = search.latency.profile
    assert "norm" not in {layer["module"] for layer in profiled.rows()}  # it takes no time of its own
    assert "as it is deployed: BatchNorm folded and channels last" in profiled.notes[0]
    planned = search.find()
    last = search.deliver(planned, transform(planned.compact))
    assert len(seen) == 2 * (len(planned.attempts) + 1) > 2
    assert all(isinstance(one.get_submodule("norm"), FoldedNorm) and lies_channels_last(one) for one in seen)
    assert last.summary()["deployed"] == "BatchNorm folded and channels last"
    assert isinstance(model.norm, nn.BatchNorm2d)


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_what_was_profiled_before_cuts_out_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))
    model, wanted, whole = Normed().eval(), PruneSettings(BudgetSettings(speedup=2.0)), list[bool]()

    def spied(network: nn.Module, plan: Plan) -> nn.Module:
        whole.append(not next(network.parameters()).is_meta)
        return compact(network, plan)

    monkeypatch.setattr(profiled_networks, "compact", spied)
    found = []
    for expected in (True, False):
        whole.clear()
        found.append(profile(model, EXAMPLE, settings=wanted, log=lambda text: None))
        assert any(whole) == expected
    assert [sample.times for sample in found[0].samples] == [sample.times for sample in found[1].samples]


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_one_call_delivers_a_speedup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model = Chain([32, 48, 32], [3, 3, 3], shortcut=True).eval()
    found = prunekit.prune(model, (torch.randn(1, 3, 48, 48),), speedup=1.5)
    assert found.delivered is not None
    assert found.delivered.target.asked == {"speedup": 1.5}
    assert found.delivered.attempts[0].macs_left < 1
    assert set(found.delivered.shortfalls) <= set(found.notes)
    assert found.plan.provenance["prune"]["budget"]["speedup"] == 1.5
    assert 5 < len(list((tmp_path / "latency").iterdir())) <= 10  # small nets may be drawn twice

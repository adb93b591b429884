"""Blocks and widths under one budget: near the best of all choices, within the limits that are asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.errors import PlanError
from prunekit.measure.latency_profile.network_timing import LayerTimes
from prunekit.measure.latency_profile.staircase_fit import TimedNetwork, features_of, fit_latency_table
from prunekit.measure.model_size import count_macs
from prunekit.planning.budgets.budget import budgets_of
from prunekit.planning.candidates import PlanBounds, Scores, free_parts
from prunekit.planning.depth_search import LEFT, blocks_of, stage_of
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import ScheduleStep, settings_at_step
from prunekit.planning.solver import keep_of, make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


class Stages(nn.Module):
    """Two stages of two blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.early = nn.Sequential(Block(6, 3), Block(6, 4))
        self.late = nn.Sequential(Block(6, 4), Block(6, 3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.late(self.early(self.stem(x))))


@cache
def traced() -> tuple[Stages, ChannelMap]:
    torch.manual_seed(0)
    model = Stages()
    return model, trace(model, torch.randn(3, 5))


def settings(**options: Any) -> PruneSettings:
    names = ("macs", "params", "speedup", "channels")
    budget = BudgetSettings(**{name: options.pop(name) for name in names if name in options})
    return PruneSettings(budget, **{"scope": "per_mac", "depth": True, "ignore": ("stem",), **options})


def scores_of(seed: int) -> Scores:
    return np.random.default_rng(seed).exponential(size=traced()[1].n_labels)


def value(plan: Plan, scores: Scores) -> float:
    """What is kept of the scores: a block without channels loses a share of those that its last layer reads."""
    chart = plan.channel_map
    labels = np.concatenate([group.labels for group in chart.groups])
    spared = sum(float(scores[branch.labels].sum() - LEFT * scores[branch.last].sum()) for branch in plan.gone)
    return float(scores[labels][plan.keep[labels]].sum()) + spared


def best_of_all(scores: Scores, wanted: PruneSettings) -> float:
    """The most that any choice of widths keeps, with no channel at all in some blocks."""
    chart = traced()[1]
    parts = free_parts(chart, scores, wanted)
    budgets = budgets_of(chart, parts, wanted)
    closed = [set(block.parts) for block in blocks_of(chart, parts, scores, wanted)]
    inside = set().union(*closed)
    best = -np.inf
    for counts in product(
        *(range(0 if index in inside else 1, part.labels.size + 1) for index, part in enumerate(parts))
    ):
        if budgets.fits(np.array(counts)):
            best = max(best, value(Plan(chart, keep_of(chart, parts, np.array(counts))), scores))
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [{"macs": 0.6}, {"macs": 0.35}, {"params": 0.5}])
def test_nearly_as_much_is_kept_as_by_the_best_choice(budget: dict[str, float], seed: int) -> None:
    scores = scores_of(seed)
    wanted = settings(**budget)
    found = make_plan(traced()[1], scores, wanted)
    assert value(found, scores) >= 0.99 * best_of_all(scores, wanted)


def test_costs_are_those_of_the_compact_model() -> None:
    model, chart = traced()
    plan = make_plan(chart, scores_of(1), settings(macs=0.3))
    small = compact(model, plan)
    assert plan.gone
    assert plan.totals()["MACs"][1] == count_macs(small, (torch.randn(1, 5),))
    assert plan.totals()["parameters"][1] == sum(parameter.numel() for parameter in small.parameters())
    assert plan.provenance["budgets"]["macs"]["left"] == pytest.approx(chart.macs(plan.keep) / chart.macs())


def test_blocks_go_by_themselves_only_where_widths_are_not_enough() -> None:
    chart, scores = traced()[1], scores_of(0)
    assert not make_plan(chart, scores, settings(macs=0.6, depth="auto")).gone
    with pytest.raises(PlanError, match=r"it contradicts depth=False, without which 0\.\d+ can be had"):
        make_plan(chart, scores, settings(macs=0.25, depth=False))
    assert make_plan(chart, scores, settings(macs=0.25, depth="auto")).gone


def test_blocks_stay_where_that_is_asked_for() -> None:
    chart, scores = traced()[1], scores_of(0)
    cases = ((0.62, {"ignore": ("stem", "late.*")}), (0.4, {"ratios": {"late.*.first": 0.5}}))
    for macs, options in cases:
        gone = make_plan(chart, scores, settings(macs=macs, **options)).gone
        assert gone
        assert all(branch.name.startswith("early") for branch in gone)
    plan = make_plan(chart, scores, settings(macs=0.35, min_blocks=1))
    left = [stage_of(branch.name) for branch in chart.branches.found if branch not in plan.gone]
    assert set(left) == {"early", "late"}
    with pytest.raises(PlanError, match="min_blocks, without which"):
        make_plan(chart, scores, settings(macs=0.2, min_blocks=2))


def test_the_blocks_that_have_to_stay_are_the_cheapest_ones() -> None:
    chart, scores = traced()[1], scores_of(0)
    kept = chart.macs(make_plan(chart, scores, settings(macs=0.2)).keep)  # of what is in no block
    wanted = settings(macs=0.01, min_blocks=1, round_to=4)  # blocks of 3 and 4 channels, of which all are kept
    least = (kept + 2 * 6 * 3 * 2) / chart.macs()
    with pytest.raises(PlanError, match=f"no less than {least:.4g} of the dense model"):
        make_plan(chart, scores, wanted)


def test_what_stays_has_the_same_share_where_the_scope_is_uniform() -> None:
    torch.manual_seed(0)
    chart = trace(nn.Sequential(*(Block(8, 40) for _ in range(3)), nn.Linear(8, 2)), torch.randn(3, 8))
    scores = np.random.default_rng(0).exponential(size=chart.n_labels)
    scores[chart.branches.found[1].last] = 0
    plan = make_plan(chart, scores, settings(macs=0.4, scope="uniform", ignore=(), round_to=1))
    assert [branch.name for branch in plan.gone] == ["1"]
    inside = [np.flatnonzero(plan.keep[branch.labels]).size for branch in chart.branches.found]
    assert abs(inside[0] - inside[2]) <= 1  # the last channels of the budget go one by one


def test_a_schedule_takes_blocks_one_after_the_other() -> None:
    chart, scores = traced()[1], scores_of(0)
    wanted = replace(settings(macs=0.2), schedule=ScheduleSettings("linear"))
    plan, gone = Plan(chart, np.ones(chart.n_labels, dtype=bool)), [0]
    for progress in np.linspace(0, 1, 11)[1:]:
        at_stage = settings_at_step(wanted, ScheduleStep(0, progress), {"macs": 1.0})
        before = {branch.name for branch in plan.gone}
        plan = make_plan(chart, scores, at_stage, bounds=PlanBounds(most=plan.keep))
        assert before <= {branch.name for branch in plan.gone}
        gone.append(len(plan.gone))
    assert sorted(set(gone)) == [0, 1, 2, 3, 4]


def test_times_of_absent_modules_are_zero() -> None:
    chart = traced()[1]
    random = np.random.default_rng(0)
    features = features_of(chart)
    kinds = list(dict.fromkeys(one.signature for one in features))  # modules that do the same take the same time
    took = {one.module: 1.0 + kinds.index(one.signature) for one in features}
    samples = []
    for number in range(16):
        keep = np.ones(chart.n_labels, dtype=bool)
        for branch in chart.branches.found:
            if number and random.random() < 0.4:
                keep[branch.labels] = False
        keep = chart.completed(keep)
        there = {path: ms for path, ms in took.items() if chart.is_present(path, keep)}
        whole = sum(there.values())
        samples.append(TimedNetwork(keep, LayerTimes(whole, sum(took.values()), there, 0.0)))
    table = fit_latency_table(chart, samples, {})
    wanted = settings(speedup=1.5, ignore=())
    parts = free_parts(chart, scores_of(0), wanted)
    budgets = budgets_of(chart, parts, wanted, table)
    dense = table.at(chart)
    for sample in samples:
        predicted = table.at(chart, sample.keep)
        assert predicted == pytest.approx(sample.times.whole_ms, rel=0.02)
        counts = np.array([int(sample.keep[part.labels].sum()) for part in parts])
        assert budgets.left(counts)[0] == pytest.approx(predicted / dense, rel=1e-5)

"""Latency tables against sums written out, as budgets, and against every plan there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chains import Chain, chain, kept, most_kept, random_table, scored
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_budgets import Mixed, random_scores
from torch import nn

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.trace import trace
from prunekit.errors import PlanError, UsageError
from prunekit.planning.budgets.budget import budgets_of
from prunekit.planning.budgets.cost_model import Span
from prunekit.planning.budgets.latency_table import LatencyTable, LatencyTerm, LayerLatency
from prunekit.planning.candidates import free_parts
from prunekit.planning.feasibility import least_possible, require_unmeasured_met
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, Scope


@settings(max_examples=15)
@given(st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_budgets_of_time_count_what_the_table_says(mixed: bool, turning: bool, seed: int) -> None:
    model: nn.Module = Mixed() if mixed else Chain([8, 12, 8], [3, 1, 3], shortcut=True)
    channel_map = trace(model, (torch.zeros(1, 3, 4, 4) if mixed else torch.zeros(1, 3, 16, 16),))
    table = random_table(channel_map, (1, 4, 8), seed, turning)
    wanted = PruneSettings(BudgetSettings(latency_ms=1.0, speedup=2.0))
    parts = free_parts(channel_map, random_scores(channel_map, seed), wanted)
    limits = budgets_of(channel_map, parts, wanted, table)
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, [part.labels.size + 1 for part in parts])
    keep = np.ones(channel_map.n_labels, dtype=bool)
    for part, count in zip(parts, counts, strict=True):
        keep[part.labels[count:]] = False
    predicted = table.at(channel_map, channel_map.completed(keep))
    assert limits.left(counts) == pytest.approx([predicted, predicted / table.at(channel_map)], rel=1e-4)


def test_a_width_counts_as_the_next_multiple_of_its_step() -> None:
    channel_map = chain([8, 12], shortcut=False)
    factor = channel_map.traced.trace.labels["layers.1.weight"][0]
    assert factor is not None
    table = LatencyTable({}, (LayerLatency("layers.1", 0.5, (LatencyTerm(0.25, (factor,), (8,)),)),), 1.0, 2.0, 0.0)
    group = next(group for group in channel_map.groups if group.labels.size == 12)
    for left, counted in ((12, 16), (9, 16), (8, 8), (1, 8)):
        keep = np.ones(channel_map.n_labels, dtype=bool)
        keep[group.labels[left:]] = False
        assert table.at(channel_map, keep) == pytest.approx(1.0 + 2.0 * (0.5 + 0.25 * counted))


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(
    st.lists(st.integers(3, 40), min_size=2, max_size=2) | st.lists(st.integers(3, 8), min_size=3, max_size=4),
    st.floats(1.1, 3.0),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_plans_in_time_are_within_one_percent_of_the_best_there_is(
    widths: list[int], speedup: float, with_macs: bool, turning: bool, seed: int
) -> None:
    channel_map = chain(widths)
    scores = scored(channel_map, np.random.default_rng(seed))
    table = random_table(channel_map, (1, 4, 8), seed, turning)
    budget = BudgetSettings(speedup=speedup, macs=0.7 if with_macs else None)
    wanted = PruneSettings(budget, scope="per_mac", depth=False)
    parts = free_parts(channel_map, scores, wanted)
    best = most_kept(parts, scores, budgets_of(channel_map, parts, wanted, table))
    assume(0 < best < float(scores[np.isfinite(scores)].sum()))
    plan = make_plan(channel_map, scores, wanted, latency=table)
    assert kept(plan, scores) >= 0.99 * best
    assert plan.provenance["budgets"]["speedup"]["left"] >= speedup
    assert table.at(channel_map) / table.at(channel_map, plan.keep) >= speedup * (1 - 1e-6)


def test_a_term_counts_only_within_its_spans() -> None:
    channel_map = chain([8, 12], shortcut=False)
    factor = channel_map.traced.trace.labels["layers.1.weight"][0]
    assert factor is not None
    slow, fast = (LatencyTerm(ms, (factor,), (1,), (span,)) for ms, span in from_ten(factor))
    table = LatencyTable({}, (LayerLatency("layers.1", 0.5, (slow, fast)),), 0.0, 1.0, 0.0)
    group = next(group for group in channel_map.groups if group.labels.size == 12)
    for left, ms in ((12, 1.2), (10, 1.0), (9, 1.8), (1, 0.2)):
        keep = np.ones(channel_map.n_labels, dtype=bool)
        keep[group.labels[left:]] = False
        assert table.at(channel_map, keep) == pytest.approx(0.5 + ms)


@pytest.mark.parametrize("scope", ["per_mac", "capacity", "global", "uniform"])
def test_the_fastest_plan_may_not_be_the_narrowest(scope: Scope) -> None:
    channel_map = chain([8, 12], shortcut=False)
    factor = channel_map.traced.trace.labels["layers.1.weight"][0]
    assert factor is not None
    table = turning_at_ten(factor)
    group = next(group for group in channel_map.groups if group.labels.size == 12)
    wanted = PruneSettings(BudgetSettings(latency_ms=0.15, macs=0.7), scope=scope)
    assert least_possible(channel_map, wanted, table)["latency_ms"] == pytest.approx(0.1)
    plan = make_plan(channel_map, np.ones(channel_map.n_labels), wanted, latency=table)
    assert np.count_nonzero(plan.keep[group.labels]) >= 10
    assert plan.provenance["budgets"]["latency_ms"]["left"] == pytest.approx(0.1)
    assert plan.provenance["budgets"]["macs"]["left"] <= 0.7


def test_a_budget_that_another_excludes_names_it() -> None:
    channel_map = chain([8, 12], shortcut=False)
    factor = channel_map.traced.trace.labels["layers.1.weight"][0]
    assert factor is not None
    table = turning_at_ten(factor)
    wanted = PruneSettings(BudgetSettings(latency_ms=0.15, channels=0.2), scope="per_mac")
    message = (
        r"budget latency_ms: at most 0\.15 ms .* leave no less than 0\.2 ms \(predicted\) "
        r"\(it contradicts budget channels, without which 0\.1 ms can be had\)"
    )
    with pytest.raises(PlanError, match=message):
        make_plan(channel_map, np.ones(channel_map.n_labels), wanted, latency=table)
    assert least_possible(channel_map, wanted, table)["latency_ms"] == pytest.approx(0.2)


class Beside(nn.Module):
    """Two convolutions side by side, whose channels one input takes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)
        self.reads = nn.Conv2d(32, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reads(torch.cat([self.left(x), self.right(x)], 1))


@pytest.mark.parametrize("scope", ["per_mac", "capacity", "global", "uniform"])
def test_a_width_that_two_groups_decide_may_turn_too(scope: Scope) -> None:
    """20 us a channel below 24 inputs, and 10 from there: at 24, what 12 take before."""
    channel_map = trace(Beside(), (torch.zeros(1, 3, 8, 8),))
    inputs = channel_map.traced.trace.labels["reads.weight"][1]
    assert inputs is not None
    terms = tuple(LatencyTerm(ms, (inputs,), (1,), (span,)) for ms, span in from_width(inputs, 24, 0.02, 0.01))
    table = LatencyTable({}, (LayerLatency("reads", 0.0, terms),), 0.0, 1.0, 0.0)
    wanted = PruneSettings(BudgetSettings(latency_ms=0.25), min_channels=10, scope=scope)
    assert least_possible(channel_map, wanted, table)["latency_ms"] == pytest.approx(0.24)
    plan = make_plan(channel_map, random_scores(channel_map, 0), wanted, latency=table)
    left = sum(np.count_nonzero(plan.keep[channel_map.labels[f"{side}.weight"][0]]) for side in ("left", "right"))
    assert 24 <= left <= 25
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), wanted)
    budgets = budgets_of(channel_map, parts, wanted, table)
    assert (budgets.non_monotonic, budgets.smooth, [*budgets.breakpoints]) == (True, False, [()] * len(parts))


@pytest.mark.parametrize("scope", ["per_mac", "capacity", "global", "uniform"])
def test_the_widest_plan_that_is_fast_enough_may_lie_beyond_some_that_are_not(scope: Scope) -> None:
    """10 us a channel below 60, 5 from there: 0.45 ms are 45 channels, and 90."""
    channel_map = chain([100, 4], shortcut=False)
    factor = channel_map.traced.trace.labels["layers.0.weight"][0]
    assert factor is not None
    terms = tuple(LatencyTerm(ms, (factor,), (1,), (span,)) for ms, span in from_width(factor, 60, 0.01, 0.005))
    table = LatencyTable({}, (LayerLatency("layers.0", 0.0, terms),), 0.0, 1.0, 0.0)
    wanted = PruneSettings(BudgetSettings(latency_ms=0.45), scope=scope, round_to=1)
    plan = make_plan(channel_map, random_scores(channel_map, 0), wanted, latency=table)
    assert np.count_nonzero(plan.keep[channel_map.labels["layers.0.weight"][0]]) == 90
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), wanted)
    assert (60,) in budgets_of(channel_map, parts, wanted, table).breakpoints


@pytest.mark.parametrize("scope", ["per_mac", "capacity", "global", "uniform"])
def test_the_least_time_is_that_within_the_other_budgets(scope: Scope) -> None:
    """Both wide take the least, and too many channels; one of them wide is what can be had."""
    channel_map = chain([64, 64], shortcut=False)
    layers = []
    for index in (0, 1):
        factor = channel_map.traced.trace.labels[f"layers.{index}.weight"][0]
        assert factor is not None
        terms = tuple(LatencyTerm(ms, (), (), (span,)) for ms, span in from_width(factor, 48, 0.2, 0.1))
        layers.append(LayerLatency(f"layers.{index}", 0.0, terms))
    table = LatencyTable({}, tuple(layers), 0.0, 1.0, 0.0)
    wanted = PruneSettings(BudgetSettings(latency_ms=0.3, channels=0.6), scope=scope)
    if scope == "uniform":  # a share of every group there
        wanted = replace(wanted, budget=BudgetSettings(latency_ms=0.3, macs=0.5))
    assert least_possible(channel_map, wanted, table)["latency_ms"] == pytest.approx(0.3)
    plan = make_plan(channel_map, np.ones(channel_map.n_labels), wanted, latency=table)
    assert table.at(channel_map, plan.keep) == pytest.approx(0.3)
    with pytest.raises(PlanError, match=r"no less than 0\.3 ms .* contradicts budget (channels|macs)"):
        make_plan(
            channel_map,
            np.ones(channel_map.n_labels),
            replace(wanted, budget=replace(wanted.budget, latency_ms=0.25)),
            latency=table,
        )


def test_the_other_budgets_are_checked_without_a_table() -> None:
    channel_map = chain([8, 12])
    for budget, changed, error, message in (
        ({"macs": 1e-6}, {}, PlanError, "budget macs: at most 1e-06"),
        ({"macs": 0.5}, {"ignore": ("*",)}, PlanError, "no channel is free"),
        ({"macs": -1.0}, {}, UsageError, "macs: expected a share above 0"),
    ):
        with pytest.raises(error, match=message):
            require_unmeasured_met(channel_map, PruneSettings(BudgetSettings(speedup=1.5, **budget), **changed))
    for fine in ({}, {"macs": 1.0}, {"macs": 0.5, "size_mb": 1.0}):
        require_unmeasured_met(channel_map, PruneSettings(BudgetSettings(speedup=1.5, **fine)))


def turning_at_ten(factor: Labels) -> LatencyTable:
    """0.2 ms below ten of the labels, 0.1 from there on."""
    terms = tuple(LatencyTerm(ms, (), (), (span,)) for ms, span in from_ten(factor))
    return LatencyTable({}, (LayerLatency("layers.1", 0.0, terms),), 0.0, 1.0, 0.0)


def from_ten(factor: Labels) -> tuple[tuple[float, Span], tuple[float, Span]]:
    """0.2 ms below ten of the labels, 0.1 from there on."""
    return from_width(factor, 10, 0.2, 0.1)


def from_width(
    factor: Labels, width: int, before: float, beyond: float
) -> tuple[tuple[float, Span], tuple[float, Span]]:
    """Milliseconds below a width, and from it on."""
    return (before, Span(factor, 0, width)), (beyond, Span(factor, width, np.inf))


def test_a_speedup_out_of_reach_names_the_best_that_is_predicted() -> None:
    channel_map = chain([8, 12])
    table = random_table(channel_map, (1,), 0)
    wanted = PruneSettings(BudgetSettings(speedup=1e6))
    best = 1 / least_possible(channel_map, wanted, table)["speedup"]
    with pytest.raises(PlanError, match=rf"at least 1e\+06x was asked for.* leave no more than {best:.4g}x"):
        make_plan(channel_map, np.ones(channel_map.n_labels), wanted, latency=table)


def test_a_budget_of_time_needs_a_table() -> None:
    channel_map = chain([8, 12])
    with pytest.raises(PlanError, match="budget latency_ms: expected a latency table"):
        make_plan(channel_map, np.ones(channel_map.n_labels), PruneSettings(BudgetSettings(latency_ms=1.0)))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"speedup": 1.0}, "speedup: expected a number of times faster above 1, got 1.0"),
        ({"latency_ms": -1.0}, "above 0"),
    ],
)
def test_figures_that_mean_nothing_are_refused(budget: dict[str, float], message: str) -> None:
    channel_map = chain([8, 12])
    with pytest.raises(UsageError, match=message):
        make_plan(channel_map, np.ones(channel_map.n_labels), PruneSettings(BudgetSettings(**budget)))

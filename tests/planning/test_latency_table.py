"""Latency tables against sums written out, as budgets, and against every plan there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chains import Chain, chain, kept, random_table, scored
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_budgets import Mixed, random_scores
from torch import nn

from prunekit.channels import trace
from prunekit.channels.labels import Labels
from prunekit.errors import PlanError, UsageError
from prunekit.planning import BudgetSettings, PruneSettings, free_parts, make_plan
from prunekit.planning.budgets import budgets_of
from prunekit.planning.latency import LatencyTable, LatencyTerm, LayerLatency, Span
from prunekit.planning.reach import least_left
from prunekit.planning.settings import Scope


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
    wanted = PruneSettings(budget, scope="per_mac")
    parts = free_parts(channel_map, scores, wanted)
    every = np.stack(np.meshgrid(*[part.counts for part in parts], indexing="ij"), -1).reshape(-1, len(parts))
    worth = sum(np.r_[0, np.cumsum(scores[part.labels])][every[:, i]] for i, part in enumerate(parts))
    best = float((worth * budgets_of(channel_map, parts, wanted, table).fits(every)).max())
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


@pytest.mark.parametrize("scope", ["per_mac", "global", "uniform"])
def test_the_fastest_plan_may_not_be_the_narrowest(scope: Scope) -> None:
    channel_map = chain([8, 12], shortcut=False)
    factor = channel_map.traced.trace.labels["layers.1.weight"][0]
    assert factor is not None
    slow, fast = (LatencyTerm(ms, (), (), (span,)) for ms, span in from_ten(factor))
    table = LatencyTable({}, (LayerLatency("layers.1", 0.0, (slow, fast)),), 0.0, 1.0, 0.0)
    group = next(group for group in channel_map.groups if group.labels.size == 12)
    wanted = PruneSettings(BudgetSettings(latency_ms=0.15, macs=0.7), scope=scope)
    assert least_left(channel_map, wanted, table)["latency_ms"] == pytest.approx(0.1)
    plan = make_plan(channel_map, np.ones(channel_map.n_labels), wanted, latency=table)
    assert np.count_nonzero(plan.keep[group.labels]) >= 10
    assert plan.provenance["budgets"]["latency_ms"]["left"] == pytest.approx(0.1)
    assert plan.provenance["budgets"]["macs"]["left"] <= 0.7


def test_budgets_that_exclude_each_other_are_named_together() -> None:
    channel_map = chain([8, 12], shortcut=False)
    factor = channel_map.traced.trace.labels["layers.1.weight"][0]
    assert factor is not None
    slow, fast = (LatencyTerm(ms, (), (), (span,)) for ms, span in from_ten(factor))
    table = LatencyTable({}, (LayerLatency("layers.1", 0.0, (slow, fast)),), 0.0, 1.0, 0.0)
    wanted = PruneSettings(BudgetSettings(latency_ms=0.15, channels=0.2), scope="per_mac")
    with pytest.raises(PlanError, match=r"budget channels 0\.2, latency_ms 0\.15: each can be met by itself"):
        make_plan(channel_map, np.ones(channel_map.n_labels), wanted, latency=table)


def from_ten(factor: Labels) -> tuple[tuple[float, Span], tuple[float, Span]]:
    """0.2 ms below ten of the labels, 0.1 from there on."""
    return (0.2, Span(factor, 0, 10)), (0.1, Span(factor, 10, np.inf))


def test_a_speedup_out_of_reach_names_the_best_that_is_predicted() -> None:
    channel_map = chain([8, 12])
    table = random_table(channel_map, (1,), 0)
    wanted = PruneSettings(BudgetSettings(speedup=1e6))
    best = 1 / least_left(channel_map, wanted, table)["speedup"]
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

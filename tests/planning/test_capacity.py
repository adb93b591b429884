"""Scope `capacity`: as many multiply-accumulates as budgets allow, against every plan there is."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
import torchvision
from chains import Chain, chain, random_table, scored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prunekit.channels import ChannelMap, trace
from prunekit.planning import BudgetSettings, PruneSettings, free_parts, make_plan
from prunekit.planning.budgets import budgets_of
from prunekit.planning.latency import LatencyTable
from prunekit.planning.schedule import ScheduleSettings, clashes
from prunekit.planning.solve import keep_of
from prunekit.planning.worth import MacsKept

sizes = st.lists(st.integers(3, 40), min_size=2, max_size=2) | st.lists(st.integers(3, 8), min_size=3, max_size=4)


def most_macs(channel_map: ChannelMap, wanted: PruneSettings, table: LatencyTable | None = None) -> float:
    """The most MACs that any plan leaves within the budgets, by trying them all; 0 where none is."""
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), wanted)
    every = np.stack(np.meshgrid(*[part.counts for part in parts], indexing="ij"), -1).reshape(-1, len(parts))
    fitting = every[budgets_of(channel_map, parts, wanted, table).fits(every)]
    return float(MacsKept.of(parts, channel_map).model(fitting).max(initial=0))


@settings(max_examples=30, derandomize=True)
@given(
    sizes,
    st.booleans(),
    st.fixed_dictionaries({"params": st.floats(0.25, 0.85)}, optional={"channels": st.floats(0.4, 0.9)}),
    st.sampled_from([1, 1, 2]),
    st.integers(0, 10**6),
)
def test_no_plan_within_the_budgets_leaves_one_percent_more_macs(
    widths: list[int], shortcut: bool, budget: dict[str, float], round_to: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    kernels = [int(kernel) for kernel in generator.choice([1, 3], len(widths))]
    channel_map = trace(Chain(widths, kernels, shortcut), (torch.zeros(1, 3, 32, 32),))
    wanted = PruneSettings(BudgetSettings(**budget), scope="capacity", round_to=round_to)
    best = most_macs(channel_map, wanted)
    assume(0 < best < channel_map.macs())  # else the budget cannot be met, or takes nothing
    plan = make_plan(channel_map, scored(channel_map, generator), wanted)
    assert 0.99 * best <= channel_map.macs(plan.keep) <= best
    assert all(found["left"] <= found["asked"] for found in plan.provenance["budgets"].values())


@settings(max_examples=20, derandomize=True)
@given(sizes, st.floats(1.1, 3.0), st.booleans(), st.integers(0, 10**6))
def test_no_plan_as_fast_leaves_one_percent_more_macs(
    widths: list[int], speedup: float, turning: bool, seed: int
) -> None:
    channel_map = chain(widths)
    scores = scored(channel_map, np.random.default_rng(seed))
    table = random_table(channel_map, (1, 4, 8), seed, turning)
    wanted = PruneSettings(BudgetSettings(speedup=speedup), scope="capacity")
    best = most_macs(channel_map, wanted, table)
    assume(0 < best < channel_map.macs())
    plan = make_plan(channel_map, scores, wanted, latency=table)
    assert 0.99 * best <= channel_map.macs(plan.keep) <= best
    assert table.at(channel_map) / table.at(channel_map, plan.keep) >= speedup * (1 - 1e-6)


@pytest.fixture(scope="module")
def resnet() -> ChannelMap:
    return trace(torchvision.models.resnet18(num_classes=10), (torch.zeros(1, 3, 64, 64),))


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_macs_are_those_of_the_map_at_any_counts(resnet: ChannelMap, seed: int) -> None:
    parts = free_parts(resnet, np.zeros(resnet.n_labels), PruneSettings())
    worth, generator = MacsKept.of(parts, resnet), np.random.default_rng(seed)
    counts = np.array([generator.choice(part.counts) for part in parts])
    assert worth(counts) == resnet.macs(keep_of(resnet, parts, counts))
    index = int(generator.integers(len(parts)))
    trials = np.repeat(counts[None], parts[index].counts.size, axis=0)
    trials[:, index] = parts[index].counts
    assert worth.along(counts, index, parts[index].counts) == pytest.approx([worth(trial) for trial in trials])
    better = worth.better(trials, counts)
    assert [*map(worth, better)] == sorted((kept for kept in map(worth, trials) if kept > worth(counts)), reverse=True)


@pytest.mark.parametrize("budget", [{"params": 0.4}, {"channels": 0.5}, {"params": 0.5, "macs": 0.3}])
def test_more_macs_are_left_than_by_scores_whose_order_in_a_group_it_keeps(
    resnet: ChannelMap, budget: dict[str, float]
) -> None:
    scores = scored(resnet, np.random.default_rng(0))
    capacity, by_scores = (
        make_plan(resnet, scores, PruneSettings(BudgetSettings(**budget), scope=scope))
        for scope in ("capacity", "per_mac")
    )
    assert resnet.macs(capacity.keep) >= resnet.macs(by_scores.keep)
    assert "macs" in budget or resnet.macs(capacity.keep) > 1.05 * resnet.macs(by_scores.keep)
    of_groups = [(scores[group.labels], capacity.keep[group.labels]) for group in resnet.groups]
    cut = [(values, kept) for values, kept in of_groups if kept.any() and not kept.all()]
    assert cut
    assert all(values[kept].min() >= values[~kept].max() for values, kept in cut)


def test_a_schedule_may_score_by_movement_where_scores_only_order_a_group() -> None:
    asked = PruneSettings(scope="capacity", schedule=ScheduleSettings(score="movement"))
    assert not list(clashes(asdict(asked)))

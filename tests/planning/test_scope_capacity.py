"""Scope `capacity`: widths by themselves, against every plan there is, and no group given up for another."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
import torchvision
from chains import chain, kept, most_kept, random_chain, random_table, scored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.planning.budgets.budget import budgets_of
from prunekit.planning.budgets.latency_table import LatencyTable
from prunekit.planning.candidates import Scores, free_parts
from prunekit.planning.solver import make_plan, worth_of_widths
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings, Scope, prune_contradictions

sizes = st.lists(st.integers(3, 40), min_size=2, max_size=2) | st.lists(st.integers(3, 8), min_size=3, max_size=4)


def worth_and_best(
    channel_map: ChannelMap, scores: Scores, wanted: PruneSettings, table: LatencyTable | None = None
) -> tuple[Scores, float]:
    """What widths are worth, and the most of it that any plan keeps within the budgets."""
    parts = free_parts(channel_map, scores, wanted)
    worth = worth_of_widths(channel_map, parts)
    return worth, most_kept(parts, worth, budgets_of(channel_map, parts, wanted, table))


@pytest.mark.slow
@settings(max_examples=30, derandomize=True)
@given(
    sizes,
    st.booleans(),
    st.fixed_dictionaries({"macs": st.floats(0.25, 0.85)}, optional={"params": st.floats(0.25, 0.85)}),
    st.sampled_from([1, 1, 2]),
    st.integers(0, 10**6),
)
def test_within_one_percent_of_the_best_widths_there_are(
    widths: list[int], shortcut: bool, budget: dict[str, float], round_to: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    channel_map = random_chain(widths, shortcut, generator)
    scores = scored(channel_map, generator)
    wanted = PruneSettings(BudgetSettings(**budget), scope="capacity", round_to=round_to)
    worth, best = worth_and_best(channel_map, scores, wanted)
    assume(0 < best < worth.sum())  # else the budget cannot be met, or takes nothing
    plan = make_plan(channel_map, scores, wanted)
    assert 0.99 * best <= kept(plan, worth) <= best * (1 + 1e-12)
    assert all(found["left"] <= found["asked"] for found in plan.provenance["budgets"].values())


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(sizes, st.floats(1.1, 3.0), st.booleans(), st.integers(0, 10**6))
def test_within_one_percent_of_the_best_widths_that_are_as_fast(
    widths: list[int], speedup: float, turning: bool, seed: int
) -> None:
    channel_map = chain(widths)
    scores = scored(channel_map, np.random.default_rng(seed))
    table = random_table(channel_map, (1, 4, 8), seed, turning)
    wanted = PruneSettings(BudgetSettings(speedup=speedup), scope="capacity")
    worth, best = worth_and_best(channel_map, scores, wanted, table)
    assume(0 < best < worth.sum())
    plan = make_plan(channel_map, scores, wanted, latency=table)
    assert 0.99 * best <= kept(plan, worth) <= best * (1 + 1e-12)
    assert table.at(channel_map) / table.at(channel_map, plan.keep) >= speedup * (1 - 1e-6)


def test_a_width_is_worth_the_macs_of_all_layers_that_have_it() -> None:
    """Kernels of 3 x 3 from 3 to 2 channels at 16 x 16 pixels and from 2 to 4 at 8 x 8; then a head from 4 to 4."""
    channel_map = chain([2, 4], shortcut=False)
    parts = free_parts(channel_map, np.zeros(channel_map.n_labels), PruneSettings())
    worth = worth_of_widths(channel_map, parts)
    first, second = 16 * 16 * 3 * 2 * 9, 8 * 8 * 2 * 4 * 9
    head = 4 * 4
    whole = first + second + head
    assert channel_map.macs() == whole
    weights = {2: (first + second) / whole, 4: (second + head) / whole}
    for part in parts:
        size = part.labels.size
        assert worth[part.labels] == pytest.approx(weights[size] * np.log1p(1 / np.arange(1, size + 1)))


@pytest.fixture(scope="module")
def resnet() -> ChannelMap:
    return trace(torchvision.models.resnet18(num_classes=10), (torch.zeros(1, 3, 64, 64),))


@pytest.mark.parametrize("budget", [{"macs": 0.3}, {"params": 0.4}, {"params": 0.5, "macs": 0.3}])
def test_no_group_is_given_up_and_the_lowest_scores_of_each_go(resnet: ChannelMap, budget: dict[str, float]) -> None:
    scores = scored(resnet, np.random.default_rng(0))

    def shares(scope: Scope) -> tuple[list[float], list[tuple[Scores, Scores]]]:
        plan = make_plan(resnet, scores, PruneSettings(BudgetSettings(**budget), scope=scope))
        each = [(scores[group.labels], plan.keep[group.labels]) for group in resnet.groups]
        return [float(keeps.mean()) for _, keeps in each], each

    by_width, each = shares("capacity")
    by_score, _ = shares("per_mac")
    assert min(by_width) > 0.2 > min(by_score)
    cut = [(values, keeps) for values, keeps in each if not keeps.all()]
    assert cut
    assert all(values[keeps].min() >= values[~keeps].max() for values, keeps in cut)


def test_a_schedule_may_score_by_movement_where_scores_only_order_a_group() -> None:
    asked = PruneSettings(scope="capacity", schedule=ScheduleSettings(score="movement"))
    assert not list(prune_contradictions(asdict(asked)))

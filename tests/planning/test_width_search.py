"""Plans by price against every plan there is, on nets small enough to try them all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chains import Chain, kept, most_kept, random_chain, scored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.planning.budgets.budget import budgets_of
from prunekit.planning.candidates import Scores, free_parts
from prunekit.planning.solver import make_plan
from prunekit.planning.width_search import KeptScores, local_search
from prunekit.settings.pruning import BudgetSettings, PruneSettings

sizes = (
    st.lists(st.integers(3, 40), min_size=2, max_size=2)
    | st.lists(st.integers(3, 8), min_size=2, max_size=4)
    | st.lists(st.integers(3, 4), min_size=5, max_size=6)
)
budgets = st.fixed_dictionaries(
    {"macs": st.floats(0.25, 0.85)},
    optional={"params": st.floats(0.25, 0.85), "channels": st.floats(0.4, 0.9)},
)


@pytest.mark.slow
@settings(max_examples=30, derandomize=True)
@given(sizes, st.booleans(), budgets, st.sampled_from([1, None, 2]), st.integers(0, 10**6))
def test_within_one_percent_of_the_best_plan_there_is(
    widths: list[int], shortcut: bool, budget: dict[str, float], round_to: int | None, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    channel_map = random_chain(widths, shortcut, generator)
    scores = scored(channel_map, generator)
    wanted = PruneSettings(BudgetSettings(**budget), scope="per_mac", round_to=round_to)
    parts = free_parts(channel_map, scores, wanted)
    best = most_kept(parts, scores, budgets_of(channel_map, parts, wanted))
    whole = float(scores[np.isfinite(scores)].sum())
    assume(0 < best < whole)  # else the budget cannot be met, or takes nothing
    plan = make_plan(channel_map, scores, wanted)
    assert kept(plan, scores) >= 0.99 * best
    assert kept(plan, scores) <= best * (1 + 1e-12)
    assert all(found["left"] <= found["asked"] for found in plan.provenance["budgets"].values())
    assert np.array_equal(plan.keep, make_plan(channel_map, scores, wanted).keep)


def two_budgets() -> tuple[ChannelMap, Scores, PruneSettings]:
    channel_map = trace(Chain([24, 32, 40, 24], [3, 3, 3, 3], True), (torch.zeros(1, 3, 16, 16),))
    scores = scored(channel_map, np.random.default_rng(2))
    return channel_map, scores, PruneSettings(BudgetSettings(macs=0.45, params=0.45), scope="per_mac", round_to=1)


def test_exchange_only_ever_keeps_more_and_stops_where_no_exchange_helps() -> None:
    channel_map, scores, wanted = two_budgets()
    parts = free_parts(channel_map, scores, wanted)
    worth, limits = KeptScores.of(parts, scores), budgets_of(channel_map, parts, wanted)
    narrow = np.array([part.counts[0] for part in parts])
    found = local_search(parts, worth, limits, narrow)
    assert limits.fits(found)
    assert worth(found) > worth(narrow)
    for wider in range(len(parts)):
        for narrower in range(len(parts)):
            other = found.copy()
            other[wider] += 1
            other[narrower] -= wider != narrower
            allowed = all(count in part.counts for count, part in zip(other, parts, strict=True))
            assert not allowed or not limits.fits(other) or worth(other) <= worth(found) * (1 + 1e-9)
    assert np.array_equal(local_search(parts, worth, limits, found), found)


def test_what_is_worth_everything_goes_last() -> None:
    channel_map, scores, wanted = two_budgets()
    groups = {group.name: group.labels for group in channel_map.groups}
    scores[groups["layers.1"]] = np.inf
    plan = make_plan(channel_map, scores, wanted)
    assert plan.keep[groups["layers.1"]].all()
    tight = make_plan(channel_map, scores, replace(wanted, budget=BudgetSettings(macs=0.02)))
    assert 0 < tight.keep[groups["layers.1"]].sum() < groups["layers.1"].size
    assert all(kept == 1 for name, (kept, _) in tight.widths().items() if name != "layers.1")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_scores_spend_the_budget(value: float) -> None:
    channel_map, scores, wanted = two_budgets()
    plan = make_plan(channel_map, np.full_like(scores, value), wanted)
    assert max(found["left"] / found["asked"] for found in plan.provenance["budgets"].values()) > 0.95


def test_a_joint_plan_of_two_budgets_keeps_more_than_the_tighter_plan_of_either() -> None:
    """A plan priced by one resource alone spends the other badly."""
    channel_map, scores, wanted = two_budgets()
    both = kept(make_plan(channel_map, scores, wanted), scores)
    alone = [
        make_plan(channel_map, scores, replace(wanted, budget=BudgetSettings(macs=macs, params=params)))
        for macs, params in ((0.45, None), (None, 0.45))
    ]
    assert both <= min(kept(plan, scores) for plan in alone) + 1e-9
    halfway = make_plan(channel_map, scores, replace(wanted, scope="global"))
    assert both > kept(halfway, scores)

"""Plans of attention: heads, and positions in heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_net import HEADS, Attention
from equivalence import heads_and_positions

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings

DEPTH = 12


@pytest.fixture(scope="module")
def chart() -> ChannelMap:
    return trace(Attention(DEPTH), (torch.zeros(1, 5, 6),))


def left(chart: ChannelMap, settings: PruneSettings) -> tuple[int, int]:
    """How many heads and how many positions in each of them a plan from equal scores keeps of the queries."""
    plan = make_plan(chart, np.ones(chart.n_labels), settings)
    heads, positions = heads_and_positions(plan.kept("q.weight", 0), DEPTH)
    return len(heads), len(positions)


def half(**settings: Any) -> PruneSettings:
    return PruneSettings(budget=BudgetSettings(channels=0.5), **settings)


def test_a_share_is_that_of_heads_and_that_of_positions(chart: ChannelMap) -> None:
    assert left(chart, half()) == (HEADS // 2, DEPTH // 2)


@pytest.mark.parametrize(("round_to", "expected"), [(4, (2, 4)), (8, (2, 8)), (6, (2, 6))])
def test_rounding_holds_for_the_width_of_all_heads(chart: ChannelMap, round_to: int, expected: tuple[int, int]) -> None:
    assert left(chart, half(round_to=round_to)) == expected


def test_a_ratio_takes_whole_heads(chart: ChannelMap) -> None:
    assert left(chart, half(ratios={"q": 0.5})) == (HEADS // 2, DEPTH)


def test_what_is_excluded_keeps_heads_and_positions(chart: ChannelMap) -> None:
    assert left(chart, half(ignore=("q",))) == (HEADS, DEPTH)


def test_macs_of_attention_count_both(chart: ChannelMap) -> None:
    plan = make_plan(chart, np.ones(chart.n_labels), half())
    dense, kept = chart.layer_macs(), chart.layer_macs(plan.keep)
    assert dense == {"q": 1440, "k": 1440, "v": 1440, "": 2 * 25 * HEADS * DEPTH, "o": 480}
    assert kept == {module: macs // 4 for module, macs in dense.items()}

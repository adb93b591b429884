"""Plans of attention: heads, and positions in heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_net import HEADS, Attention
from equivalence import heads_and_positions
from torch import Tensor, nn

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


class Layers(nn.Module):
    """Layers of attention between the same input and output."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(DEPTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


@pytest.mark.parametrize("layout", ["free", "equal"])
def test_heads_of_all_layers_keep_the_share_together(layout: Any) -> None:
    """A share that no layer alone can keep of four heads: some layers lose one, unless all are to be alike."""
    chart = trace(Layers(10), (torch.zeros(1, 5, 6),))
    before = np.zeros(chart.n_labels, dtype=bool)
    for share in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        settings = PruneSettings(BudgetSettings(params=share), layout=layout, depth=False, round_to=1)
        plan = make_plan(chart, np.ones(chart.n_labels), settings)
        found = [heads_and_positions(plan.kept(f"layers.{n}.q.weight", 0), DEPTH) for n in range(10)]
        heads, positions = [len(heads) for heads, _ in found], [len(positions) for _, positions in found]
        assert max(heads) - min(heads) <= (layout == "free")
        assert max(positions) - min(positions) <= 1
        if layout == "free":  # what is left of the parameters is the product of both
            assert sum(heads) / 40 == pytest.approx(share**0.5, abs=0.07)
            assert sum(positions) / (10 * DEPTH) == pytest.approx(share**0.5, abs=0.07)
            assert abs(sum(heads[:5]) - sum(heads[5:])) <= 1  # spread over the layers
            assert not (before & ~plan.keep).any()
        before = plan.keep


def test_a_budget_of_each_group_is_kept_to_by_every_layer() -> None:
    chart = trace(Layers(3), (torch.zeros(1, 5, 6),))
    plan = make_plan(chart, np.ones(chart.n_labels), PruneSettings(BudgetSettings(channels=0.7), round_to=1))
    for number in range(3):
        heads, positions = heads_and_positions(plan.kept(f"layers.{number}.q.weight", 0), DEPTH)
        assert (len(heads), len(positions)) == (2, 8)

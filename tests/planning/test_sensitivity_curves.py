"""The allocation against all allocations there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.elimination import hull_slopes
from prunekit.planning.candidates import Scores
from prunekit.planning.sensitivity_curves import (
    SensitivityCurve,
    cumulative_curves,
    fewest_within,
    kept_counts,
    rank_correlation,
)
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings


def chart() -> ChannelMap:
    """Two inner groups of 4 and 6 channels between fixed widths, of different cost."""
    parts = (nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 3, 1))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.parts[1](self.parts[0](x))
            return x + self.parts[3](self.parts[2](x))

    return trace(Two(), (torch.zeros(1, 3, 4, 4),))


def curves(channel_map: ChannelMap, seed: int) -> list[SensitivityCurve]:
    generator = np.random.default_rng(seed)
    groups = [group for group in channel_map.groups if group.labels.size in (4, 6)]
    return [
        SensitivityCurve(generator.permutation(g.labels), np.cumsum(np.sort(generator.random(g.labels.size))))
        for g in groups
    ]


def scores_of(channel_map: ChannelMap, found: list[SensitivityCurve]) -> Scores:
    scores = np.full(channel_map.n_labels, np.inf)
    for curve in found:
        scores[curve.labels] = np.diff(curve.errors, prepend=0)
    return scores


@pytest.mark.parametrize("seed", range(4))
def test_no_other_allocation_saves_as_much_at_less_error(seed: int) -> None:
    channel_map = chart()
    found = curves(channel_map, seed)
    settings = PruneSettings(BudgetSettings(macs=0.6), scope="per_mac")
    plan = make_plan(channel_map, scores_of(channel_map, found), settings)
    ours = [int((~plan.keep[curve.labels]).sum()) for curve in found]
    for curve, count in zip(found, ours, strict=True):
        assert not plan.keep[curve.labels[:count]].any()
    best, errors = channel_map.macs(plan.keep), _error(found, ours)
    for counts in itertools.product(*(range(curve.labels.size) for curve in found)):
        keep = np.ones(channel_map.n_labels, dtype=bool)
        for curve, count in zip(found, counts, strict=True):
            keep[curve.labels[:count]] = False
        assert channel_map.macs(keep) > best or _error(found, counts) >= errors - 1e-12


def _error(found: list[SensitivityCurve], counts: tuple[int, ...] | list[int]) -> float:
    return sum(float(np.r_[0, curve.errors][count]) for curve, count in zip(found, counts, strict=True))


def test_slopes_are_those_of_the_lower_hull() -> None:
    assert hull_slopes(np.array([0.0, 0.0, 3.0, 4.0, 9.0])).tolist() == [0.0, 0.0, 2.0, 2.0, 5.0]


def test_a_group_without_a_curve_stays_whole() -> None:
    channel_map = chart()
    found = curves(channel_map, 0)[:1]
    scores = scores_of(channel_map, found)
    plan = make_plan(channel_map, scores, PruneSettings(BudgetSettings(macs=0.8), scope="per_mac"))
    assert [name for name, (kept, dense) in plan.widths().items() if kept < dense] == list(
        cumulative_curves(channel_map, scores)
    )


def test_curves_come_back_from_scores() -> None:
    channel_map = chart()
    found = curves(channel_map, 1)
    again = cumulative_curves(channel_map, scores_of(channel_map, found))
    for one, other in zip(found, again.values(), strict=True):
        assert one.labels.tolist() == other.labels.tolist()
        np.testing.assert_allclose(one.errors, other.errors)


@pytest.mark.parametrize("seed", range(5))
def test_the_hull_never_falls_nor_lies_above_its_curve(seed: int) -> None:
    errors = np.cumsum(np.random.default_rng(seed).random(40) ** 4)
    slopes = hull_slopes(errors)
    assert (np.diff(slopes) >= 0).all()
    assert (np.cumsum(slopes) <= errors + 1e-12).all()
    assert np.cumsum(slopes)[-1] == pytest.approx(errors[-1])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16, 63, 512])
def test_counts_to_measure_go_from_all_to_one_over_half(size: int) -> None:
    counts = kept_counts(size)
    assert (counts[0], counts[-1]) == (size, 1)
    assert max(1, size // 2) in counts
    assert list(counts) == sorted(set(counts), reverse=True)
    assert len(counts) == min(size, 8)


def test_the_fewest_within_a_limit_has_nothing_worse_above_it() -> None:
    curve = [(8, 0.0), (6, 0.005), (4, 0.02), (2, 0.008), (1, 0.3)]
    assert [fewest_within(curve, limit) for limit in (0.001, 0.01, 0.1, 1)] == [8, 6, 2, 1]


def test_rank_correlation_is_spearmans() -> None:
    one, other = np.array([1.0, 2, 3, 4, 5]), np.array([2.0, 1, 4, 3, 50])
    assert rank_correlation(one, other) == pytest.approx(1 - 6 * 4 / (5 * 24))  # without ties: by the differences
    tied = np.array([1.0, 1, 2, 3])  # ranks 1.5, 1.5, 3, 4
    assert rank_correlation(tied, np.arange(4.0)) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert rank_correlation(np.ones(3), np.arange(3.0)) is None
    assert rank_correlation(np.array([]), np.array([])) is None


def test_a_curve_knows_its_error_by_what_is_kept() -> None:
    curve = SensitivityCurve(np.arange(3), np.array([1.0, 2, 8]), outputs=4)
    assert [curve.error_at(kept) for kept in (3, 2, 1, 0)] == [0, 1, 2, 8]
    assert curve.share_at(1) == 0.5

"""With few samples, those that are held out choose how like layers share a cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.criterion import Scores
from prunekit.errors import UsageError
from prunekit.planning.plan import Plan
from prunekit.pruning.sample_statistics import share_check
from prunekit.repair.similar_layer_shares import CLEAR, TRIED, ShareCheck, evened, fit_plainly, like_groups
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.statistics.gram_matrices import PatchStats

WIDTH = 12


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def deep(blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *(Block() for _ in range(blocks)), nn.LayerNorm(8), nn.Linear(8, 4)).eval()


def samples(count: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(1))


def inner(chart: ChannelMap) -> list[Any]:
    """The groups between the layers of the blocks."""
    return next(alike for alike in like_groups(chart) if len(alike) == 3)


def test_groups_of_layers_that_repeat_are_alike() -> None:
    chart = pk.trace(deep(), samples(2))
    assert [group.labels.size for group in inner(chart)] == [WIDTH] * 3
    assert not like_groups(pk.trace(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(2, 4)))


def drawn_scores(chart: ChannelMap) -> Scores:
    scores = np.random.default_rng(0).random(chart.n_labels)
    for place, group in enumerate(inner(chart)):
        scores[group.labels] *= 10.0**place
    return scores


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_order_within_a_group_stays(share: float) -> None:
    chart = pk.trace(deep(), samples(2))
    scores = drawn_scores(chart)
    found = evened(scores, chart, share)
    for group in chart.groups:
        assert (np.argsort(found[group.labels]) == np.argsort(scores[group.labels])).all()


def test_evened_groups_have_one_curve() -> None:
    chart = pk.trace(deep(), samples(2))
    scores, groups = drawn_scores(chart), inner(chart)
    every = [np.sort(evened(scores, chart, 1.0)[group.labels]) for group in groups]
    assert np.allclose(every, np.median([np.sort(scores[group.labels]) for group in groups], 0))
    half = [np.sort(evened(scores, chart, 0.5)[group.labels]) for group in groups]
    assert np.allclose(half[0], np.sqrt(np.sort(scores[groups[0].labels]) * every[0]))
    assert (evened(scores, chart, 0.0) == scores).all()


def test_channels_that_cannot_be_ranked_stay_so() -> None:
    chart = pk.trace(deep(), samples(2))
    scores = drawn_scores(chart)
    scores[inner(chart)[0].labels] = np.inf
    found = evened(scores, chart, 1.0)
    assert np.isinf(found[inner(chart)[0].labels]).all()
    assert (found[inner(chart)[1].labels] == scores[inner(chart)[1].labels]).all()


def test_a_plain_fit_is_exact_where_others_can_make_up_for_what_goes() -> None:
    model: Any = deep(1).double()
    block = model[1]
    with torch.no_grad():  # each neuron is there twice
        for name in ("weight", "bias"):
            tensor = getattr(block.up, name)
            tensor[WIDTH // 2 :] = tensor[: WIDTH // 2]
    x = samples(256).double()
    found = pk.collect(model, x)
    chart, keep = found.channel_map, np.ones(found.channel_map.n_labels, dtype=bool)
    group = next(group for group in chart.groups if ("1.up.weight", 0) in group.slots)
    keep[group.labels[WIDTH // 2 :]] = False
    plan = Plan(chart, keep, {})
    masked = deep(1).double()
    masked.load_state_dict(model.state_dict())
    plan.zero(masked)
    with torch.no_grad():
        before = float((masked(x) - model(x)).square().mean())
        fit_plainly(masked, model, plan, found.patches)
        after = float((masked(x) - model(x)).square().mean())
    assert after < 1e-4 * before  # the ridge
    assert not masked[1].down.weight[:, WIDTH // 2 :].any()


FEW = 8
"""Positions for layers that read 12 columns and a constant."""


def check_of(model: nn.Module, count: int = FEW) -> tuple[ShareCheck | None, ChannelMap]:
    found = pk.collect(model, samples(count))
    settings = PruneSettings(budget=BudgetSettings(params=0.7), criterion="elimination", scope="per_mac")
    return share_check(model, found.samples, found.channel_map, found.patches, settings), found.channel_map


def needed(model: nn.Module) -> tuple[ShareCheck, ChannelMap]:
    check, chart = check_of(model)
    assert check is not None
    return check, chart


def test_enough_positions_and_layers_that_do_not_repeat_need_no_check() -> None:
    assert check_of(deep(1))[0] is None
    assert check_of(deep())[0] is not None
    check, _ = check_of(deep(), 64)
    assert check is not None  # as a plan by errors times their growth is tried too
    assert not check.uneven


def test_growth_decides_where_held_out_samples_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    check, chart = check_of(deep(), 64)
    assert check is not None
    scores, grown, asked = drawn_scores(chart), drawn_scores(chart) + 1, list[Scores]()

    def planned(given: Scores) -> Any:
        asked.append(given)
        return len(asked) - 1

    monkeypatch.setattr(ShareCheck, "held_out_error", lambda self, plan, patches: 1.0 if plan == 0 else 0.5)
    assert check.best(scores, chart, planned, lambda: grown) == 1  # type: ignore[comparison-overlap]
    assert "times their growth" in check.note
    check.best(scores, chart, planned, lambda: grown)
    assert [some is grown for some in asked] == [False, True, True]


class Transposed(nn.Module):
    """A linear layer whose weight has its inputs first, as GPT-2's have."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_weights_with_their_inputs_first_are_checked_too() -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(Transposed(8, 12), nn.ReLU(), Transposed(12, 8)) for _ in range(3))
    model = nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 2)).eval()
    check, chart = needed(model)
    masked, scores = Plan(chart, np.ones(chart.n_labels, dtype=bool)), drawn_scores(chart)
    assert check.best(scores, chart, lambda scores: masked) is masked
    result = pk.prune(model, calibration=samples(FEW), params=0.7)
    assert result.max_relative_difference < 1e-9


def test_the_plain_fit_does_not_see_the_samples_that_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    check, chart = needed(deep())
    seen = list[int]()

    def noted(self: ShareCheck, plan: Any, patches: PatchStats) -> float:
        seen.append(patches.layers[0].rows)
        return 1.0

    monkeypatch.setattr(ShareCheck, "held_out_error", noted)
    check.best(drawn_scores(chart), chart, lambda scores: Plan(chart, np.ones(chart.n_labels, dtype=bool)))
    assert seen == [FEW - 1] * 3


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_least_error_chooses_and_later_plans_share_alike(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check, chart = needed(deep())
    asked = list[Scores]()

    def planned(scores: Scores) -> Any:
        asked.append(scores)
        return len(asked) - 1

    monkeypatch.setattr(ShareCheck, "held_out_error", lambda self, plan, patches: 0.5 if plan == best else 1.0)
    scores = drawn_scores(chart)
    assert check.best(scores, chart, planned) == best  # type: ignore[comparison-overlap]
    assert len(asked) == 3
    assert bool(check.note) == (best > 0)
    check.best(scores, chart, planned)
    assert (asked[-1] == asked[best]).all()
    assert len(asked) == 4


def test_a_choice_has_to_be_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    check, chart = needed(deep())
    monkeypatch.setattr(ShareCheck, "held_out_error", lambda self, plan, patches: 1.0 if plan == 0 else 0.99)
    numbers: Any = iter(range(9))
    assert check.best(drawn_scores(chart), chart, lambda scores: next(numbers)) == 0  # type: ignore[comparison-overlap]
    assert check.share == 0


def test_outputs_that_cannot_be_compared_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check, chart = needed(deep())

    def refuse(self: ShareCheck, plan: Any, patches: PatchStats) -> float:
        raise UsageError("no tensor")

    monkeypatch.setattr(ShareCheck, "held_out_error", refuse)
    numbers: Any = iter(range(9))
    assert check.best(drawn_scores(chart), chart, lambda scores: next(numbers)) == 0  # type: ignore[comparison-overlap]
    assert (check.share, check.note) == (0, "")


@pytest.mark.parametrize("scales", [(0.2, 1.0, 3.0), (3.0, 0.3, 0.03)])
def test_the_chosen_plan_is_the_best_of_those_that_were_tried(
    scales: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = list[float]()
    measured: Callable[[ShareCheck, Plan, PatchStats], float] = ShareCheck.held_out_error

    def noted(self: ShareCheck, plan: Plan, patches: PatchStats) -> float:
        errors.append(measured(self, plan, patches))
        return errors[-1]

    monkeypatch.setattr(ShareCheck, "held_out_error", noted)
    model: Any = deep()
    with torch.no_grad():
        for place, scale in zip((1, 2, 3), scales, strict=True):
            model[place].down.weight.mul_(scale)
    result = pk.prune(model, calibration=samples(FEW), params=0.6)
    assert len(errors) == 1 + len(TRIED)
    assert all(error > 0 for error in errors)
    clear = min(errors) < CLEAR * errors[0]
    assert any("like layers lose" in note for note in result.notes) == clear
    assert result.max_relative_difference < 1e-9


@pytest.mark.parametrize("given", [{"scope": "uniform"}, {"layout": "equal"}, {"criterion": "l2"}])
def test_nothing_is_checked_where_scores_only_rank(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ShareCheck, plan: Plan, patches: PatchStats) -> float:
        raise AssertionError

    monkeypatch.setattr(ShareCheck, "held_out_error", refuse)
    assert pk.prune(deep(), calibration=samples(FEW), params=0.7, **given).model is not None

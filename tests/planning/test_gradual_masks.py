"""Masks of a pattern at a pruning step of a schedule: how many weights of each layer are zero, and which."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pattern_masks import holds
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.errors import NonFiniteError
from prunekit.planning.patterns.gradual_masks import StepWeights, masks_at_step, share_moved
from prunekit.planning.patterns.pattern import Pattern, PatternLayers, pattern_layers
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import ScheduleStep, share_kept
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.statistics.layer_graph import find_layer_graph

PATTERNS = {
    "unstructured": PatternSettings("unstructured", sparsity=0.7),
    "global": PatternSettings("unstructured", sparsity=0.7, scope="global"),
    "uniform": PatternSettings("unstructured", sparsity=0.7, scope="uniform"),
    "kernel": PatternSettings("kernel", 0.6),
    "block": PatternSettings("block", 0.5, block=(4, 1)),
    "2:4": PatternSettings("2:4"),
    "1:8": PatternSettings("1:8", ignore=("6",)),
}
STAGES = [ScheduleStep(at, at / 4, at / 4) for at in (1, 2, 3, 4)]


def layers_of(settings: PatternSettings) -> tuple[nn.Module, PatternLayers]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Flatten(),
        nn.Linear(32, 12), nn.Linear(12, 3),
    )  # fmt: skip
    x = torch.randn(1, 3, 6, 6)
    chart = trace(model, (x,))
    plan = Plan(chart, np.ones(chart.n_labels, dtype=bool))
    with torch.no_grad():
        return model, pattern_layers(find_layer_graph(model, (x,)), plan, settings)


def weights_of(model: nn.Module, layers: PatternLayers, masks: list[Tensor] | None = None) -> list[StepWeights]:
    found = []
    for index, layer in enumerate(layers.layers):
        values = layer.matrix(model.get_parameter(layer.weight).detach())
        alive = torch.ones_like(values, dtype=torch.bool) if masks is None else masks[index]
        size = (values * alive).square()
        found.append(StepWeights(layer, size, size, alive))
    return found


@pytest.mark.parametrize("name", PATTERNS)
def test_zeros_grow_as_the_schedule_says_and_stay(name: str) -> None:
    settings = PATTERNS[name]
    model, layers = layers_of(settings)
    pattern = Pattern.of(settings)
    masks: list[Tensor] | None = None
    for stage in STAGES:
        before = masks
        masks = masks_at_step(layers, weights_of(model, layers, masks), settings, "cubic", stage)
        zeros = sum(int((~mask).sum()) for mask in masks)
        asked = 1 - share_kept("cubic", stage.progress, 1 - settings.zeros)
        of = layers.size if settings.kept_of is None else sum(layer.size for layer in layers.layers)
        assert zeros == pytest.approx(asked * of, abs=12)  # whole units, rounded in each layer
        if before is not None:
            assert all(not bool((mask & ~was).any()) for mask, was in zip(masks, before, strict=True))
        assert all(mask.any() for mask in masks)
        assert settings.kept_of is not None or all(holds(pattern, mask) for mask in masks)
    assert masks is not None
    assert all(holds(pattern, mask) for mask in masks)


def test_error_is_that_of_lamp() -> None:
    settings = PATTERNS["unstructured"]
    model, layers = layers_of(settings)
    masks = masks_at_step(layers, weights_of(model, layers), settings, "cubic", STAGES[-1])
    scores = []
    for layer in layers.layers:
        flat = layer.matrix(model.get_parameter(layer.weight).detach()).flatten().double().square()
        scores.append(torch.stack([value / flat[flat >= value].sum() for value in flat]))  # equation 4, word by word
    zeros = round(settings.zeros * layers.size)
    threshold = torch.cat(scores).sort().values[zeros - 1]
    for mask, score in zip(masks, scores, strict=True):
        assert torch.equal(mask.flatten(), score > threshold)


def test_shares_of_named_layers_and_the_rest_add_up() -> None:
    settings = PatternSettings("unstructured", sparsity=0.4, layers={"2": 0.25, "4": 0.0}, first_and_last=True)
    model, layers = layers_of(settings)
    masks = masks_at_step(layers, weights_of(model, layers), settings, "linear", STAGES[-1])
    zeros = {layer.path: float((~mask).double().mean()) for layer, mask in zip(layers.layers, masks, strict=True)}
    assert zeros["2"] == 0.25
    assert "4" not in zeros
    assert sum(int((~mask).sum()) for mask in masks) == round(0.4 * layers.size)


@pytest.mark.parametrize(("elapsed", "share"), [(0.0, 0.3), (0.5, 0.15), (1.0, 0.0)])
def test_fewer_weights_move_along_a_cosine(elapsed: float, share: float) -> None:
    assert share_moved(ScheduleStep(1, 1.0, elapsed)) == pytest.approx(share)


def test_the_smallest_weights_make_room_for_the_largest_gradients() -> None:
    settings = PatternSettings("unstructured", sparsity=0.7, scope="uniform")
    model, layers = layers_of(settings)
    masks = masks_at_step(layers, weights_of(model, layers), settings, "cubic", STAGES[-1])
    before = weights_of(model, layers, masks)
    gradients = [torch.rand(one.size.shape, generator=torch.Generator().manual_seed(3)) for one in before]
    given = [replace(one, gradient=gradient) for one, gradient in zip(before, gradients, strict=True)]
    for mask, one, gradient in zip(
        masks_at_step(layers, given, settings, "cubic", ScheduleStep(9, 1.0, 0.5)), given, gradients, strict=True
    ):
        kept = int(one.alive.sum())
        moved = round(0.15 * kept)
        assert int(mask.sum()) == kept
        stay = one.size.flatten().argsort(descending=True)[: kept - moved]
        assert mask.flatten()[stay].all()
        rest = gradient.flatten().clone()
        rest[stay] = -1
        grown = rest.argsort(descending=True)[:moved]
        assert mask.flatten()[grown].all()


def test_groups_take_back_the_largest_gradients_too() -> None:
    settings = PATTERNS["2:4"]
    model, layers = layers_of(settings)
    masks = masks_at_step(layers, weights_of(model, layers), settings, "cubic", STAGES[-1])
    given = [replace(one, gradient=(~one.alive).float()) for one in weights_of(model, layers, masks)]
    again = masks_at_step(layers, given, settings, "cubic", ScheduleStep(9, 1.0, 0.0))
    pattern = Pattern.of(settings)
    for mask, one in zip(again, given, strict=True):
        assert holds(pattern, mask)
        moved = int((mask & ~one.alive).sum())
        assert moved == int((one.alive & ~mask).sum()) == round(0.3 * int(one.alive.sum()))


def test_scores_let_masked_weights_return() -> None:
    settings = PatternSettings("unstructured", sparsity=0.5, scope="uniform")
    model, layers = layers_of(settings)
    masks = masks_at_step(layers, weights_of(model, layers), settings, "cubic", STAGES[-1])
    turned = [replace(one, score=(~one.alive).float(), returning=True) for one in weights_of(model, layers, masks)]
    for mask, one in zip(masks_at_step(layers, turned, settings, "cubic", STAGES[-1]), turned, strict=True):
        assert int((mask & one.alive).sum()) == max(0, int(mask.sum()) - int((~one.alive).sum()))


def test_values_that_are_not_finite_are_named() -> None:
    settings = PATTERNS["2:4"]
    model, layers = layers_of(settings)
    with torch.no_grad():
        model.get_parameter("2.weight")[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"2\.weight: weights are NaN or Inf"):
        masks_at_step(layers, weights_of(model, layers), settings, "cubic", STAGES[0])

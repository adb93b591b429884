"""Zeros among single weights of a plan: by the size of the weights, or in one shot from calibration images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from prunekit.planning.patterns.gradual_masks import StageWeights, masks_at_stage
from prunekit.planning.patterns.pattern_layers import PatternLayers, pattern_layers
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import Stage
from prunekit.repair.patterns.prune_weights import PrunedWeights, prune_weights
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pattern import PatternSettings
from prunekit.statistics.layers.layer_graph import find_layer_graph
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import inputs_as_example


@torch.no_grad()
def zeros_by_size(
    model: nn.Module, plan: Plan, example: tuple[Any, ...], settings: PatternSettings
) -> tuple[Plan, PatternLayers]:
    """Return a plan with masks of the smallest weights, and which layers have zeros.

    Args:
        model: the dense one; only read.
        plan: which channels are kept.
        example: inputs, see `prunekit.utils.inputs.as_example`.
        settings: of the pattern; with scope `error` by LAMP (Lee et al. 2021), which needs no data.

    Raises:
        PlanError: the pattern doesn't fit the model, see `pattern_layers`.
        NonFiniteError: weights are NaN or Inf.
    """
    with training_mode(model, False):
        graph = find_layer_graph(model, example, plan.channel_map.norms)
    layers = pattern_layers(graph, plan, settings)
    tensors, weights = dict(model.named_parameters()), list[StageWeights]()
    for layer in layers.layers:
        size = layer.matrix(tensors[layer.weight].detach()).double().square()
        weights.append(StageWeights(layer, size, size, torch.ones_like(size, dtype=torch.bool)))
        weights[-1].require_finite()
    masks = masks_at_stage(layers, weights, settings, "oneshot", Stage(0, 1.0))
    found = {
        layer.weight: layer.element_mask(mask, tensors[layer.weight].shape)
        for layer, mask in zip(layers.layers, masks, strict=True)
    }
    return replace(plan, element_masks={**plan.element_masks, **found}), layers


def zeros_from_samples(
    model: nn.Module,
    plan: Plan,
    samples: Any,
    settings: PatternSettings,
    repair: RepairSettings | None,
    *,
    log: Callable[[str], None],
) -> PrunedWeights:
    """Return the masked model of `prune_weights`, fitted to the dense one unless `repair` is None."""
    inputs = inputs_as_example(model, samples)
    return prune_weights(model, plan, inputs, settings, repair, fitted=repair is not None, log=log, progress=False)

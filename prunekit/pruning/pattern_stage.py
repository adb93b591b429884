"""Zeros among single weights of a plan: by the size of the weights, or in one shot from calibration images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.cut.channel_order import with_channel_order
from prunekit.channels.labels import Labels
from prunekit.errors import VerificationError
from prunekit.measure.verification import compare_outputs
from prunekit.planning.patterns.gradual_masks import StageWeights, masks_at_stage
from prunekit.planning.patterns.group_orders import group_orders, kept_size
from prunekit.planning.patterns.pattern import PatternLayer, PatternLayers, pattern_layers
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import Stage
from prunekit.repair.patterns.prune_weights import PrunedWeights, prune_weights
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pattern import PatternSettings
from prunekit.statistics.layer_graph import find_layer_graph
from prunekit.utils.context import training_mode
from prunekit.utils.display import plural, share
from prunekit.utils.inputs import inputs_as_example


@torch.no_grad()
def zeros_by_size(
    model: nn.Module, plan: Plan, example: tuple[Any, ...], settings: PatternSettings
) -> tuple[Plan, PatternLayers]:
    """Return a plan with masks of the smallest weights, and which layers have zeros."""
    layers = _layers(model, plan, example, settings)
    tensors, weights = dict(model.named_parameters()), list[StageWeights]()
    for layer in layers.layers:
        size = layer.matrix(tensors[layer.weight].detach()).double().square()
        weights.append(StageWeights(layer, size, size, torch.ones_like(size, dtype=torch.bool)))
        weights[-1].require_finite()
    masks = masks_at_stage(layers, weights, settings, "oneshot", Stage(0, 1.0))
    return replace(plan, element_masks={**plan.element_masks, **layers.element_masks(plan, masks)}), layers


def _layers(model: nn.Module, plan: Plan, example: tuple[Any, ...], settings: PatternSettings) -> PatternLayers:
    """Return the layers of a model that get zeros, see `pattern_layers`."""
    with training_mode(model, False):
        return pattern_layers(find_layer_graph(model, example, plan.channel_map.norms), plan, settings)


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


def with_best_order(
    model: nn.Module, plan: Plan, example: tuple[Any, ...], settings: PatternSettings
) -> tuple[nn.Module, str]:
    """Return the model with its channels in an order in which N:M keeps more, and a sentence on that.

    The order of a group is taken only if the model computes the same with it in float64.
    """
    if settings.kept_of is None or not settings.permute:
        return model, ""
    layers = _layers(model, plan, example, settings).layers
    orders = group_orders(layers, dict(model.named_parameters()), plan, settings.kept_of)
    found, taken = _with_orders(model, plan, example, list(orders.values()))
    if not taken:
        return model, ""
    shares = [_share_kept(layers, dict(one.named_parameters()), settings.kept_of) for one in (model, found)]
    return found, (
        f"pattern: channels of {plural(taken, 'group')} changed places, so that {settings.kind} keeps "
        f"{share(shares[1])} of the weights' size instead of {share(shares[0])}"
    )


def _with_orders(model: nn.Module, plan: Plan, example: tuple[Any, ...], orders: list[Labels]) -> tuple[nn.Module, int]:
    """Return the model with all orders that change nothing, and their number: all at once, or else one by one."""
    if not orders:
        return model, 0
    source = np.arange(plan.channel_map.n_labels)
    for order in orders:
        source = np.where(order != np.arange(order.size), order, source)
    found = with_channel_order(model, plan.channel_map, source)
    try:
        compare_outputs(model, found, example)
        return found, len(orders)
    except VerificationError:
        if len(orders) == 1:
            return model, 0
        half = len(orders) // 2
        first, taken = _with_orders(model, plan, example, orders[:half])
        second, more = _with_orders(first, plan, example, orders[half:])
        return second, taken + more


def _share_kept(layers: Sequence[PatternLayer], weights: Mapping[str, Tensor], kept_of: tuple[int, int]) -> float:
    sizes = [layer.matrix(weights[layer.weight].detach()).abs().double().movedim(1, 2) for layer in layers]
    return float(sum(kept_size(each, kept_of).sum() for each in sizes) / sum(each.sum() for each in sizes))

"""Zeros among single weights in one shot, from unlabeled images, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.planning.patterns.pattern import Pattern, PatternLayers, pattern_layers
from prunekit.planning.plan import Plan, require_plan
from prunekit.repair.held_out_images import Inputs
from prunekit.repair.layer_walk import RepairSetup
from prunekit.repair.patterns.pattern_fitter import PatternFitter, Zeros
from prunekit.repair.patterns.zero_shares import shares_by_error, uniform_shares
from prunekit.repair.repair_model import require_images
from prunekit.repair.repair_report import RepairReport
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.pattern import PatternSettings
from prunekit.utils.inputs import as_example
from prunekit.utils.progress import reporting


@dataclass(frozen=True, eq=False)
class PrunedWeights:
    """The result of `prune_weights`.

    Attributes:
        model: the masked model, in its dense size.
        plan: the one that was given, with masks of single weights.
        report: errors of each layer with the zeros alone and with the fit, and of the model's output.
        layers: which have zeros, and which stay dense.
    """

    model: nn.Module
    plan: Plan
    report: RepairReport
    layers: PatternLayers


def prune_weights(
    dense: nn.Module,
    plan: Plan,
    images: Tensor | list[Tensor] | Inputs,
    pattern: PatternSettings,
    settings: RepairSettings | None = None,
    *,
    fitted: bool = True,
    log: Callable[[str], None] | None = None,
    progress: bool | None = None,
) -> PrunedWeights:
    """Return a masked copy of a model with zeros among the weights that its channels leave.

    In the order in which layers run, each chooses its zeros on what the masked model feeds it, and its kept weights are
    fitted to the dense model's outputs, as a repair does.

    Args:
        fitted: whether kept weights are fitted to the dense outputs; if not, methods `obs` and `sparsegpt` fit them to
            what the layer itself computes, and others leave them.
    """
    settings = replace(settings or RepairSettings(), fit="patch")
    require_plan(plan, dense)
    if isinstance(images, (tuple, list, Mapping)):
        images = as_example(dense, images)
    inputs = require_images(images)
    plan.channel_map.require_plain_forward("pattern")
    with reporting(progress, "pattern"), RepairSetup.entered(dense, plan, inputs) as setup:
        found = pattern_layers(setup.found, plan, pattern)
        by_weight = {layer.weight: layer for layer in found.layers}
        if pattern.scope == "uniform" or pattern.kept_of is not None:
            shares = uniform_shares(found, pattern)
        else:
            shares = shares_by_error(setup.original, found, plan, inputs, pattern, settings)
        zeros = Zeros(Pattern.of(pattern), pattern.method, shares, fitted)
        fitter = PatternFitter(setup.original, setup.masked, plan, settings, by_weight, zeros)
        walk = setup.walk(settings, fitter)
        if log is not None:
            for line in (*found.notes(), f"pattern: {walk.memory}"):
                log(line)
        walk.run()
        for layer in found.layers:
            if layer.weight not in fitter.masks:
                fitter.choose_by_size(layer, "not reached on these images")
        masks = found.element_masks(plan, [fitter.masks[layer.weight] for layer in found.layers])
        masked_plan = replace(plan, element_masks={**plan.element_masks, **masks})
        zeroed = with_tensors(dense, {name: tensor.detach().clone() for name, tensor in named_tensors(setup.original)})
        masked_plan.zero(zeroed)
        before = setup.difference(walk, zeroed)
        after_all, after, reports = setup.keep_what_helps(walk, fitter, masked_plan, before)
    model = with_tensors(dense, {name: tensor.detach() for name, tensor in named_tensors(setup.masked)})
    kept = any(layer.applied for layer in reports)
    report = RepairReport(reports, before, after, kept, walk.memory, after_all, setup.judge.selected)
    return PrunedWeights(model, masked_plan, report, found)

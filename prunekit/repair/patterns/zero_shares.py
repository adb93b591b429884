"""Shares of zeros: how a budget is spread over layers, by the error that zeros add to the model's output."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.hooks.model_copy import named_tensors
from prunekit.planning.patterns.pattern import Pattern, PatternLayer, PatternLayers
from prunekit.planning.plan import Plan
from prunekit.repair.least_squares import ridged
from prunekit.repair.patterns.removal import removal_order
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.statistics.gram_matrices import LayerMoments, collect_patches
from prunekit.statistics.layer_errors import relative_scale, with_gains
from prunekit.utils.inputs import sample_count, select_samples

AT_ONCE = 8
"""One of so many remaining units is removed at a time: curves need less than masks."""
ROWS = 8192
"""Positions sampled of each layer."""
WORK = 2e7
"""Entries of inverses for each layer: of a wide layer, some outputs stand for all."""
TRUST = 0.5
"""Exponent of layers' gains, as in `prunekit.criteria.elimination`: later layers correct some of an error."""
GAINS = 64
"""Images on which the gains of layers are measured."""

Samples = tuple[Any, ...]


def uniform_shares(layers: PatternLayers, settings: PatternSettings) -> dict[str, float]:
    """Return the same share of zeros for all layers, so that the budget is met with what settings say of some."""
    free = sum(layer.size for layer in layers.layers if layer.zeros is None)
    rest = settings.zeros
    if settings.kept_of is None and free:
        fixed = sum(layer.zeros * layer.size for layer in layers.layers if layer.zeros is not None)
        rest = (settings.zeros * layers.size - fixed) / free
    return {layer.weight: rest if layer.zeros is None else layer.zeros for layer in layers.layers}


def shares_by_error(
    dense: nn.Module,
    layers: PatternLayers,
    plan: Plan,
    inputs: Samples,
    settings: PatternSettings,
    repair: RepairSettings,
) -> dict[str, float]:
    """Return the share of zeros of each layer, so that removing one more weight costs the same in all.

    The costs are those of removing the weights of each output in the order of an optimal brain surgeon, on what the
    dense model reads; at the end of the layer's chain, each output over its variance, times the measured gain of the
    layer where scope is `error`.
    """
    free = [layer for layer in layers.layers if layer.zeros is None]
    if len(free) < 2:
        return uniform_shares(layers, settings)
    wanted = {(layer.weight, layer.layer.axes[1]) for layer in free}
    count = sample_count(inputs)
    batches = [select_samples(inputs, slice(start, start + 128)) for start in range(0, count, 128)]
    stats = collect_patches(
        dense,
        [(batch,) for batch in batches],
        norms=plan.channel_map.norms,
        inputs=wanted,
        rows=min(ROWS, repair.rows),
        images=count,
        memory_bytes=repair.memory_bytes,
    )
    if settings.scope == "error":
        stats = with_gains(dense, stats, select_samples(inputs, slice(GAINS)), plan.channel_map.read)
    tensors, modules = dict(named_tensors(dense)), dict(dense.named_modules())
    moments = {found.layer.weight: found for found in stats.layers}
    pattern, curves = Pattern.of(settings), dict[str, Tensor]()
    for layer in free:
        if layer.weight in moments:
            weight = tensors[layer.weight].detach()
            curves[layer.weight] = _unit_costs(layer, moments[layer.weight], weight, modules, pattern, repair.ridge)
    if not curves:
        return uniform_shares(layers, settings)
    return _equal_slopes(layers, curves, settings)


def _equal_slopes(layers: PatternLayers, curves: Mapping[str, Tensor], settings: PatternSettings) -> dict[str, float]:
    """Return shares at one threshold on the costs of removing a weight; layers without a curve have the mean share."""
    shares = uniform_shares(layers, settings)
    known = [layer for layer in layers.layers if layer.weight in curves]
    costs = torch.cat([curves[layer.weight] for layer in known])
    sizes = torch.cat([torch.full_like(curves[one.weight], one.size / len(curves[one.weight])) for one in known])
    order = costs.argsort(stable=True)
    wanted = sum(shares[layer.weight] * layer.size for layer in known)
    count = int(torch.searchsorted(sizes[order].cumsum(0), torch.tensor(wanted, dtype=sizes.dtype)))
    gone = torch.zeros(len(costs), dtype=torch.bool)
    gone[order[:count]] = True
    parts = torch.split(gone, [len(curves[layer.weight]) for layer in known])
    return shares | {layer.weight: float(part.double().mean()) for layer, part in zip(known, parts, strict=True)}


def _unit_costs(
    layer: PatternLayer,
    moments: LayerMoments,
    weight: Tensor,
    modules: Mapping[str, nn.Module],
    pattern: Pattern,
    ridge: float,
) -> Tensor:
    """Return for each unit of a layer what its removal costs per weight; of some outputs alone where there are many."""
    outputs, inputs, taps = layer.shape
    groups = len(moments.grams)
    scale = relative_scale(moments, modules)[layer.rows] * moments.output_gain ** (TRUST / 2)
    matrix = layer.matrix(weight).double()
    if moments.taps == 1 and taps > 1:  # without the taps' own statistics each of them is a layer of its own
        matrix, taps = matrix.transpose(1, 2).reshape(outputs * taps, inputs, 1), 1
        scale = scale.repeat_interleave(layer.taps)
    of = layer.rows // (layer.layer.matrix(weight).shape[0] // groups)
    of = of.repeat_interleave(len(matrix) // outputs)
    found = []
    columns = _columns(layer, moments)
    aligned = pattern if pattern.outputs == 1 or groups == 1 else Pattern(pattern.name, 1, pattern.inputs)
    most = max(1, int(WORK / len(columns) ** 2))
    for group in _evenly(torch.unique(of), most):
        rows = (of == group).nonzero().flatten()
        blocks = rows[: len(rows) // aligned.outputs * aligned.outputs].view(-1, aligned.outputs)  # they share zeros
        rows = _evenly(
            blocks, max(1, max(1, most // groups) // aligned.outputs)
        ).flatten()  # of outputs that share zeros
        _, factor = ridged(moments.grams[int(group)][columns][:, columns], ridge, biased=True)
        inverse = torch.cholesky_inverse(factor)
        own = torch.cat([matrix[rows].flatten(1), matrix.new_zeros(len(rows), 1)], 1)
        order = removal_order(inverse, own, scale[rows], aligned, (len(rows), inputs, taps), AT_ONCE)
        found.append(order.costs.flatten().cpu())
    return torch.cat(found) / (aligned.outputs * aligned.inputs * (taps if aligned.whole_kernels else 1))


def _columns(layer: PatternLayer, moments: LayerMoments) -> Tensor:
    """Return the columns of a Gram matrix that kept inputs have, and the constant."""
    taps = torch.arange(moments.taps)
    own = (layer.columns[:, None] * moments.taps + taps).flatten()
    return torch.cat([own, torch.tensor([len(moments.grams[0]) - 1])])


def _evenly(values: Tensor, most: int) -> Tensor:
    return values if len(values) <= most else values[np.linspace(0, len(values) - 1, most).round().astype(int)]

"""Importance from the weights alone: magnitudes, distances between filters, scales of norms; and a random baseline."""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from prunekit.criteria.criterion import Evidence, Scores, register_criterion
from prunekit.criteria.scoring import LabelMean, mean_over_slices, require_finite
from prunekit.statistics.layer_stats import IntArray


@register_criterion(
    "l1", needs=("weights",), measures="mean |w|", paper="Li et al. 2017, Pruning filters for efficient ConvNets"
)
def l1(evidence: Evidence) -> Scores:
    """Return the mean |w| of a label's slices (Li et al. 2017, "Pruning filters for efficient ConvNets")."""
    return mean_over_slices(evidence, partial(_add_powers, 1))


@register_criterion(
    "l2",
    needs=("weights",),
    measures="root mean square of w",
    paper="Li et al. 2017, Pruning filters for efficient ConvNets",
)
def l2(evidence: Evidence) -> Scores:
    """Return the root mean square of a label's slices (the l2 norm that Li et al. 2017 compare with)."""
    return mean_over_slices(evidence, partial(_add_powers, 2))


@register_criterion(
    "lamp", needs=("weights",), measures="w^2 over what ranks above it", paper="Lee et al. 2021, LAMP", comparable=True
)
def lamp(evidence: Evidence) -> Scores:
    """Return the layer-adaptive magnitude (Lee et al. 2021), of channels instead of weights.

    The square of a label's `l2` over the sum of its own and those that follow it in its group, in ascending order and,
    as in the paper, equal ones by their index: 1 for the last of every group that is not all zeros, so that no such
    group is emptied in a ranking over all of them. Within a group it ranks as `l2` does.
    """
    squares = l2(evidence) ** 2
    result = squares.copy()
    for group in evidence.channel_map.groups:
        own = squares[group.labels]
        if np.isfinite(own).all():  # else on no parameter: nothing to remove, +inf as it is
            order = np.argsort(own, kind="stable")
            rest = np.empty_like(own)
            rest[order] = own[order][::-1].cumsum()[::-1]
            result[group.labels] = own / np.where(rest > 0, rest, 1)
    return result


def _add_powers(power: int, found: LabelMean, name: str, weight: Tensor, labeled: dict[int, IntArray]) -> None:
    """Add the norms of a weight's slices, relative to the sizes of the slices."""
    wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    for axis, sums in _power_sums(wide, power, list(labeled)).items():
        values = sums.numpy() * (weight.shape[axis] / max(weight.numel(), 1))
        require_finite(name, values)
        found.add(labeled[axis], values, exponent=1 / power)


BLOCK = 1 << 18
"""Entries of a weight at a time: their powers stay in the cache, and need no memory of the weight's size."""


def _power_sums(weight: Tensor, power: int, axes: list[int]) -> dict[int, Tensor]:
    """Return the sums of |w| or w^2 over all axes but each of `axes`, float64 (size,), in one pass over the weight."""
    sums = {axis: torch.zeros(weight.shape[axis], dtype=torch.float64) for axis in axes}
    rows = max(1, BLOCK * weight.shape[0] // max(weight.numel(), 1))
    for start in range(0, weight.shape[0], rows):
        block = weight[start : start + rows]
        powers = block.abs() if power == 1 else block.square()
        for axis in axes:
            if axis == 0:
                total = powers.sum(list(range(1, weight.ndim))) if weight.ndim > 1 else powers
                sums[0][start : start + rows] = total.cpu().double()
            else:
                # Axes before this one first: they are added up row by row, and leave little for the rest.
                before = powers.sum(list(range(axis))).cpu().double()
                sums[axis] += before.sum(list(range(1, before.ndim))) if before.ndim > 1 else before
    return sums


COLUMNS = 4096
"""Columns of a weight multiplied at a time, in its own precision; their products are added in float64."""


@register_criterion(
    "fpgm", needs=("weights",), measures="distance to the layer's other filters", paper="He et al. 2019, FPGM"
)
def fpgm(evidence: Evidence) -> Scores:
    """Return the mean distance of a filter to the others of its layer (FPGM, He et al. 2019).

    The sum of Euclidean distances to all filters of the layer, divided by their number and by the root of their size,
    so that layers which share labels count alike; the mean over those layers. A filter is a slice along the axis of
    output channels of a weight; labels on no such axis score as in `l2`, which is so for whole groups. Costs as much as
    the product of each weight with its transpose.
    """
    found = LabelMean(evidence.channel_map)
    for name, weight in evidence.parameters.items():
        owner = evidence.modules.get(name.rpartition(".")[0])
        axis = 1 if isinstance(owner, (_ConvTransposeNd, nn.Embedding)) else 0  # of outputs
        labels = evidence.channel_map.labels[name][axis] if weight.ndim > 1 else None
        if labels is not None and labels.any():
            distances = _mean_distances(weight.movedim(axis, 0).flatten(1)).numpy()
            require_finite(name, distances)
            found.add(labels, distances)
    return found.result() if found.seen[1:].all() else found.result(otherwise=l2(evidence))


def _mean_distances(filters: Tensor) -> Tensor:
    """Return the mean distance of filters (n, size) to all of them, over the root of their size; float64 (n,)."""
    gram = torch.zeros(len(filters), len(filters), dtype=torch.float64)
    for columns in torch.split(filters, COLUMNS, 1):
        wide = columns.cpu().to(torch.promote_types(columns.dtype, torch.float32))
        wide = wide - wide.mean(0)  # their mean adds nothing but rounding
        gram += wide @ wide.T
    squares = gram.diagonal()
    distances = (squares + squares[:, None] - 2 * gram).clamp(min=0).sqrt()
    mean: Tensor = distances.fill_diagonal_(0).mean(1) / max(filters.shape[1], 1) ** 0.5
    return mean


NORMS = (
    nn.modules.batchnorm._NormBase,  # every BatchNorm and InstanceNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@register_criterion(
    "bn_scale", needs=("weights",), measures="|scale| of norms", paper="Liu et al. 2017, Network slimming"
)
def bn_scale(evidence: Evidence) -> Scores:
    """Return the mean |gamma| of the norms that carry a label (Liu et al. 2017, "Network slimming").

    Labels that no affine norm carries score as in `l2`. The two never meet in one ranking: labels of a group lie on the
    same parameters, so that all or none of them are on a norm, and across groups scores are normalized.
    """
    found = LabelMean(evidence.channel_map)
    for path, module in evidence.modules.items():
        name = f"{path}.weight" if path else "weight"
        if isinstance(module, NORMS) and name in evidence.parameters:
            scales = evidence.parameters[name].abs().cpu().double()
            for axis, labels in enumerate(evidence.channel_map.labels[name]):
                if labels is not None:
                    values = (scales.movedim(axis, 0).flatten(1).mean(1) if scales.ndim > 1 else scales).numpy()
                    require_finite(name, values)
                    found.add(labels, values)
    return found.result() if found.seen[1:].all() else found.result(otherwise=l2(evidence))


@register_criterion("random", needs=(), measures="nothing: the baseline")
def random(evidence: Evidence) -> Scores:
    """Return uniform numbers in [0, 1), from the seed alone."""
    return np.random.default_rng(evidence.seed).random(evidence.channel_map.n_labels)

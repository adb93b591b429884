"""Importance from how much the filters of a layer differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from prunekit.criteria.magnitude import l2
from prunekit.criteria.registry import Evidence, Scores, register_criterion
from prunekit.criteria.slices import LabelMean, require_finite

COLUMNS = 4096
"""Columns of a weight multiplied at a time, in its own precision; their products are added in float64."""


@register_criterion(
    "fpgm", needs=("weights",), measures="distance to the layer's other filters", paper="He et al. 2019, FPGM"
)
def fpgm(evidence: Evidence) -> Scores:
    """Distance to the geometric median (He et al. 2019, FPGM): how far a filter lies from the others of its layer.

    The sum of Euclidean distances to all filters of the layer, divided by their number and by the root of their size,
    so that layers which share labels weigh alike; the mean over those layers. A filter is a slice along the axis of
    output channels of a weight; labels on no such axis score as in `l2`, which holds for whole groups. Costs as much as
    the product of each weight with its transpose.
    """
    found = LabelMean(evidence.channel_map)
    for name, weight in evidence.parameters.items():
        axis = _output_axis(evidence.modules, name)
        labels = evidence.channel_map.labels[name][axis] if weight.ndim > 1 else None
        if labels is not None and labels.any():
            distances = _mean_distances(weight.movedim(axis, 0).flatten(1)).numpy()
            require_finite(name, distances)
            found.add(labels, distances)
    return found.result() if found.seen[1:].all() else found.result(otherwise=l2(evidence))


def _output_axis(modules: Mapping[str, nn.Module], name: str) -> int:
    owner = modules.get(name.rpartition(".")[0])
    return 1 if isinstance(owner, (_ConvTransposeNd, nn.Embedding)) else 0


def _mean_distances(filters: Tensor) -> Tensor:
    """Mean distance of each filter to all, itself included, over the root of their size; (n, size) -> float64 (n,)."""
    gram = torch.zeros(len(filters), len(filters), dtype=torch.float64)
    for columns in torch.split(filters, COLUMNS, 1):
        wide = columns.cpu().to(torch.promote_types(columns.dtype, torch.float32))
        wide = wide - wide.mean(0)  # what all share adds nothing but rounding
        gram += wide @ wide.T
    squares = gram.diagonal()
    distances = (squares + squares[:, None] - 2 * gram).clamp(min=0).sqrt()
    mean: Tensor = distances.fill_diagonal_(0).mean(1) / max(filters.shape[1], 1) ** 0.5
    return mean

"""Importance from the scales that norms learn."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from prunekit.criteria.magnitude import l2
from prunekit.criteria.registry import Evidence, Scores, register_criterion
from prunekit.criteria.slices import LabelMean, require_finite

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
    """|gamma| of the norms that carry a label (Liu et al. 2017, "Network slimming"), mean over them.

    Labels that no affine norm carries score as in `l2`. The two never meet in one ranking: labels of a group lie on the
    same parameters, so that all or none of them are on a norm, and across groups scores are normalized.
    """
    found = LabelMean(evidence.channel_map)
    for path, module in evidence.modules.items():
        name = f"{path}.weight" if path else "weight"
        if isinstance(module, NORMS) and name in evidence.parameters:
            _add_scales(found, name, evidence)
    return found.result() if found.seen[1:].all() else found.result(otherwise=l2(evidence))


def _add_scales(found: LabelMean, name: str, evidence: Evidence) -> None:
    scales: Tensor = evidence.parameters[name].abs().cpu().double()
    for axis, labels in enumerate(evidence.channel_map.labels[name]):
        if labels is not None:
            values = scales.movedim(axis, 0).flatten(1).mean(1) if scales.ndim > 1 else scales
            require_finite(name, np.asarray(values))
            found.add(labels, np.asarray(values))

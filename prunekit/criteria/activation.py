"""Importance from what a channel does on calibration images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import nn

from prunekit.calibration import ChannelStats
from prunekit.channels import ChannelMap
from prunekit.criteria.registry import Evidence, Scores, criterion
from prunekit.criteria.slices import LabelMean
from prunekit.errors import UsageError

NORMS = (
    nn.modules.batchnorm._NormBase,  # every BatchNorm and InstanceNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)

Accepts = Callable[[str, str], bool]


@criterion("activation", needs="stats")
def activation(evidence: Evidence) -> Scores:
    """Mean |activation| of a label's channels, mean over the outputs of norms and activation functions that carry it.

    (Molchanov et al. 2017, "Pruning CNNs for resource efficient inference", use it as a baseline.) Labels that no such
    output carries are judged by any other output, then by any input.

    Raises:
        UsageError: the statistics cover none of the activations of some label.
        NonFiniteError: NaN or Inf was met while they were collected.
    """
    stats, channel_map = evidence.stats, evidence.channel_map
    assert stats is not None  # `score` checked what this criterion needs
    stats.require_finite()
    scores = np.full(channel_map.n_labels, np.nan)
    for accepts in _preferences(evidence):
        if np.isnan(scores[1:]).any():
            found = _mean_abs(channel_map, stats, accepts)
            scores = np.where(np.isnan(scores), found.result(otherwise=np.nan), scores)
    _require_all(scores, channel_map)
    return scores


def _preferences(evidence: Evidence) -> tuple[Accepts, ...]:
    preferred = {path for path, module in evidence.modules.items() if _shapes_activations(module)}
    return (
        lambda path, side: side == "output" and path in preferred,
        lambda path, side: side == "output",
        lambda path, side: True,
    )


def _shapes_activations(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or type(module).__module__ == nn.modules.activation.__name__


def _mean_abs(channel_map: ChannelMap, stats: ChannelStats, accepts: Accepts) -> LabelMean:
    found = LabelMean(channel_map.n_labels)
    for key, labels in channel_map.activations.items():
        layer = stats.get(key) if accepts(key[0], key[1]) else None  # type: ignore[call-overload]
        if layer is None:
            continue
        if layer.channels != len(labels):
            raise UsageError(
                f"{key[1]} of {key[0]!r}: the channel map has {len(labels)} channels, the statistics {layer.channels}; "
                "both must come from the same model"
            )
        found.add(labels, layer.mean_abs)
    return found


def _require_all(scores: Scores, channel_map: ChannelMap) -> None:
    for group in channel_map.groups:
        missing = int(np.isnan(scores[group.labels]).sum())
        if missing:
            raise UsageError(
                f"criterion 'activation': no statistics for {missing} of {len(group.labels)} channels of group "
                f"{group.name!r}; collect them over every module (StatsCollector(model)) or score by 'l2'"
            )

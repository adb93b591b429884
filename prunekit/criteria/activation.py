"""Importance from what a channel does on calibration images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import nn

from prunekit.calibration import ChannelStats, LayerStats, MapRanks, StatsKey
from prunekit.catalogue import CRITERIA
from prunekit.criteria.consumed import rms_of_reads
from prunekit.criteria.norms import NORMS
from prunekit.criteria.registry import Evidence, Scores, criterion
from prunekit.criteria.slices import FloatArray, LabelMean
from prunekit.errors import UsageError

Measured = TypeVar("Measured", LayerStats, MapRanks)
Accepts = Callable[[StatsKey, Measured], npt.NDArray[np.bool_] | bool]
"""Whether an activation may speak for its channels: all of them, or one answer each, (channels,)."""

ACTIVATIONS = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.GLU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,  # and ReLU6
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.PReLU,
    nn.ReLU,
    nn.RReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
"""The activation functions of PyTorch that look at one value at a time, and GLU; not Softmax, not attention."""


@criterion(CRITERIA["activation"])
def activation(evidence: Evidence) -> Scores:
    """Mean |activation| of a label's channels, mean over the outputs of norms and activation functions that carry it.

    (Molchanov et al. 2017, "Pruning CNNs for resource efficient inference", use it as a baseline.) Labels that no such
    output carries are judged by any other output, then by any input.

    Raises:
        UsageError: the statistics cover none of the activations of some label.
        NonFiniteError: NaN or Inf was met while they were collected.
    """
    return _of_outputs(evidence, "activation", lambda layer: layer.mean_abs)


@criterion(CRITERIA["activation_rms"])
def activation_rms(evidence: Evidence) -> Scores:
    """Root mean square of a label's channels, over the same outputs as `activation`.

    (Molchanov et al. 2017, "Pruning CNNs for resource efficient inference", have mean and deviation of activations as
    baselines; this holds both.) Labels that no measured activation carries, such as attention's heads, are judged by
    the Gram matrices of the layers that read them, where those were collected.

    Raises:
        UsageError, NonFiniteError: as for `activation`.
    """
    return _of_outputs(evidence, "activation_rms", lambda layer: layer.rms, otherwise=rms_of_reads(evidence))


@criterion(CRITERIA["apoz"])
def apoz(evidence: Evidence) -> Scores:
    """1 - APoZ: the share of a label's activations that are not zero, in 0..1 (Hu et al. 2016, "Network trimming").

    Zeros mean something behind a rectifier only: in outputs of activation functions, where there are any; and for
    labels that no such module carries (a functional ReLU has none), in the inputs of modules, on channels that were
    never negative.

    Raises:
        UsageError: some label lies behind no rectifier; names its group.
        NonFiniteError: NaN or Inf was met while the statistics were collected.
    """
    functions = _activation_functions(evidence)
    scores = _first_found(
        evidence,
        _finite(evidence),
        lambda layer: 1 - layer.zero_fraction,
        lambda key, layer: key.side == "output" and key.module in functions and bool(layer.zeros.any()),
        lambda key, layer: (layer.min >= 0) & (key.side == "input" and bool(layer.zeros.any())),
    )
    advice = "score by 'activation' or 'taylor', which need no zeros"
    _require_all(scores, evidence, "criterion 'apoz': no zeros behind an activation function were seen", advice)
    return scores


@criterion(CRITERIA["hrank"])
def hrank(evidence: Evidence) -> Scores:
    """Mean rank of a channel's feature maps (Lin et al. 2020, "HRank: filter pruning using high-rank feature map").

    Mean over the outputs of activation functions that carry it; where there are none, over all that was measured.

    Raises:
        UsageError: some label has no feature maps; names its group.
    """
    functions = _activation_functions(evidence)
    scores = _first_found(
        evidence,
        _finite(evidence).ranks,
        lambda maps: maps.mean,
        lambda key, maps: key.side == "output" and key.module in functions,
        lambda key, maps: True,
    )
    advice = "score by 'activation' or 'chip', which need no maps"
    _require_all(scores, evidence, "criterion 'hrank': no feature maps", advice)
    return scores


def _of_outputs(
    evidence: Evidence, name: str, value: Callable[[LayerStats], FloatArray], *, otherwise: Scores | float = np.nan
) -> Scores:
    """A value of each label from norms and activation functions, else any output, else any input."""
    norms = {path for path, module in evidence.modules.items() if isinstance(module, NORMS)}
    preferred = norms | _activation_functions(evidence)
    scores = _first_found(
        evidence,
        _finite(evidence),
        value,
        lambda key, layer: key.side == "output" and key.module in preferred,
        lambda key, layer: key.side == "output",
        lambda key, layer: True,
    )
    scores = np.where(np.isnan(scores), otherwise, scores)
    advice = "collect them over every module, or score by 'activation_rms' with moments='full' or by 'l2'"
    _require_all(scores, evidence, f"criterion {name!r}: no statistics", advice)
    return scores


def _activation_functions(evidence: Evidence) -> set[str]:
    return {path for path, module in evidence.modules.items() if isinstance(module, ACTIVATIONS)}


def _finite(evidence: Evidence) -> ChannelStats:
    assert evidence.stats is not None  # `score` checked what the criterion needs
    evidence.stats.require_finite()
    return evidence.stats


def _first_found(
    evidence: Evidence,
    measured: Mapping[StatsKey, Measured],
    value: Callable[[Measured], FloatArray],
    *preferences: Accepts[Measured],
) -> Scores:
    """Mean of `value` over the activations that the first preference accepts, and where there are none, the next."""
    scores = np.full(evidence.channel_map.n_labels, np.nan)
    for accepts in preferences:
        if np.isnan(scores[1:]).any():
            found = _mean(evidence, measured, value, accepts)
            scores = np.where(np.isnan(scores), found.result(otherwise=np.nan), scores)
    return scores


def _mean(
    evidence: Evidence,
    measured: Mapping[StatsKey, Measured],
    value: Callable[[Measured], FloatArray],
    accepts: Accepts[Measured],
) -> LabelMean:
    found = LabelMean(evidence.channel_map)
    for place, labels in evidence.channel_map.activations.items():
        key = StatsKey(*place)  # type: ignore[arg-type]  # sides are text in a map
        layer = measured.get(key)
        if layer is None:
            continue
        if layer.channels != len(labels):
            raise UsageError(
                f"{key.side} of {key.module!r}: the channel map has {len(labels)} channels, the statistics "
                f"{layer.channels}; both must come from the same model"
            )
        chosen = np.broadcast_to(accepts(key, layer), labels.shape)
        found.add(labels[chosen], value(layer)[chosen])
    return found


def _require_all(scores: Scores, evidence: Evidence, problem: str, advice: str) -> None:
    for group in evidence.channel_map.groups:
        missing = int(np.isnan(scores[group.labels]).sum())
        if missing:
            raise UsageError(
                f"{problem} for {missing} of {len(group.labels)} channels of group {group.name!r}; {advice}"
            )

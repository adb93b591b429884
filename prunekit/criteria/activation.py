"""Importance from what a channel does on calibration images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import nn

from prunekit.calibration import LayerStats, StatsKey
from prunekit.criteria.norms import NORMS
from prunekit.criteria.registry import Evidence, Scores, criterion
from prunekit.criteria.slices import FloatArray, LabelMean
from prunekit.errors import UsageError

Accepts = Callable[[StatsKey, LayerStats], npt.NDArray[np.bool_] | bool]
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


@criterion("activation", needs="stats")
def activation(evidence: Evidence) -> Scores:
    """Mean |activation| of a label's channels, mean over the outputs of norms and activation functions that carry it.

    (Molchanov et al. 2017, "Pruning CNNs for resource efficient inference", use it as a baseline.) Labels that no such
    output carries are judged by any other output, then by any input.

    Raises:
        UsageError: the statistics cover none of the activations of some label.
        NonFiniteError: NaN or Inf was met while they were collected.
    """
    norms = {path for path, module in evidence.modules.items() if isinstance(module, NORMS)}
    preferred = norms | _activation_functions(evidence)
    scores = _first_found(
        evidence,
        lambda layer: layer.mean_abs,
        lambda key, layer: key.side == "output" and key.module in preferred,
        lambda key, layer: key.side == "output",
        lambda key, layer: True,
    )
    advice = "collect them over every module (StatsCollector(model)) or score by 'l2'"
    _require_all(scores, evidence, "criterion 'activation': no statistics", advice)
    return scores


@criterion("apoz", needs="stats")
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
        lambda layer: 1 - layer.zero_fraction,
        lambda key, layer: key.side == "output" and key.module in functions and bool(layer.zeros.any()),
        lambda key, layer: (layer.min >= 0) & (key.side == "input" and bool(layer.zeros.any())),
    )
    advice = "score by 'activation' or 'taylor', which need no zeros"
    _require_all(scores, evidence, "criterion 'apoz': no zeros behind an activation function were seen", advice)
    return scores


def _activation_functions(evidence: Evidence) -> set[str]:
    return {path for path, module in evidence.modules.items() if isinstance(module, ACTIVATIONS)}


def _first_found(evidence: Evidence, value: Callable[[LayerStats], FloatArray], *preferences: Accepts) -> Scores:
    """Mean of `value` over the activations that the first preference accepts, and where there are none, the next."""
    assert evidence.stats is not None  # `score` checked what the criterion needs
    evidence.stats.require_finite()
    scores = np.full(evidence.channel_map.n_labels, np.nan)
    for accepts in preferences:
        if np.isnan(scores[1:]).any():
            found = _mean(evidence, value, accepts)
            scores = np.where(np.isnan(scores), found.result(otherwise=np.nan), scores)
    return scores


def _mean(evidence: Evidence, value: Callable[[LayerStats], FloatArray], accepts: Accepts) -> LabelMean:
    found = LabelMean(evidence.channel_map)
    assert evidence.stats is not None
    for place, labels in evidence.channel_map.activations.items():
        layer = evidence.stats.get(place)  # type: ignore[call-overload]  # a plain tuple equals the named one
        if layer is None:
            continue
        if layer.channels != len(labels):
            raise UsageError(
                f"{place[1]} of {place[0]!r}: the channel map has {len(labels)} channels, the statistics "
                f"{layer.channels}; both must come from the same model"
            )
        chosen = np.broadcast_to(accepts(StatsKey(*place), layer), labels.shape)  # type: ignore[arg-type]
        found.add(labels[chosen], value(layer)[chosen])
    return found


def _require_all(scores: Scores, evidence: Evidence, problem: str, advice: str) -> None:
    for group in evidence.channel_map.groups:
        missing = int(np.isnan(scores[group.labels]).sum())
        if missing:
            raise UsageError(
                f"{problem} for {missing} of {len(group.labels)} channels of group {group.name!r}; {advice}"
            )

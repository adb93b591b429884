"""Importance from the activations of a channel on calibration images."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from prunekit.criteria.criterion import Evidence, Scores, register_criterion
from prunekit.criteria.magnitude import NORMS
from prunekit.criteria.scoring import LabelMean, require_finite, require_scores
from prunekit.errors import UsageError
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_stats import FloatArray, IntArray, LayerStats, StatsKey
from prunekit.statistics.observers import Consumer

Accepts = Callable[[StatsKey, LayerStats], npt.NDArray[np.bool_] | bool]
"""Whether an activation counts for its channels: for all of them, or an answer for each, (channels,)."""

ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.RReLU, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
"""PyTorch's element-wise activation functions, and GLU; ReLU6 is a Hardtanh."""

TIES = 1e-3
"""The most that the size of activations that are never zero adds to a share of 1."""


@register_criterion(
    "activation", needs=("stats",), measures="mean |activation|", paper="Molchanov et al. 2017, Pruning CNNs"
)
def activation(evidence: Evidence) -> Scores:
    """Return the mean |activation| of a label's channels.

    It is the mean over the outputs of norms and activation functions that carry the label (a baseline of Molchanov et
    al. 2017, "Pruning CNNs for resource efficient inference"). Labels that no such output carries are scored by any
    other output, then by any input, as attention's heads are where they are projected.
    """
    return _of_outputs(evidence, "activation", lambda layer: layer.mean_abs)


@register_criterion(
    "activation_rms",
    needs=("stats",),
    measures="root mean square of activations",
    paper="Molchanov et al. 2017, Pruning CNNs",
)
def activation_rms(evidence: Evidence) -> Scores:
    """Return the root mean square of a label's channels, over the same outputs as `activation`.

    Mean and deviation of activations are baselines of Molchanov et al. 2017, "Pruning CNNs for resource efficient
    inference"; this holds both.
    """
    return _of_outputs(evidence, "activation_rms", lambda layer: layer.rms)


@register_criterion(
    "apoz",
    needs=("stats",),
    measures="share of activations that are not zero",
    paper="Hu et al. 2016, Network trimming",
)
def apoz(evidence: Evidence) -> Scores:
    """Return 1 - APoZ: the share of a label's activations that are not zero, in 0..1.

    (Hu et al. 2016, "Network trimming".) Zeros mean something only behind a rectifier: in outputs of activation
    functions; and for labels that no such module carries, as with a functional ReLU, in the inputs of modules, on
    channels that were never negative. Channels behind no rectifier, such as attention's heads, are hardly ever zero and
    score 1; there the mean |activation| tells them apart, by at most 0.001.
    """
    functions, stats = _activation_functions(evidence), _finite(evidence)
    scores = _first_found(
        evidence,
        stats,
        lambda layer: 1 - layer.zero_fraction,
        lambda key, layer: key.side == "output" and key.module in functions and bool(layer.zeros.any()),
        lambda key, layer: (layer.min >= 0) & (key.side == "input" and bool(layer.zeros.any())),
    )
    if np.isfinite(scores).any():
        anywhere = _first_found(evidence, stats, _never_zero, *_anywhere(evidence))
        scores = np.where(np.isnan(scores), anywhere, scores)
    advice = "score by 'activation' or 'taylor', which need no zeros"
    problem = "criterion 'apoz': no zeros behind an activation function were found"
    return require_scores(scores, evidence, problem, advice)


def _never_zero(layer: LayerStats) -> FloatArray:
    size = layer.mean_abs
    return 1 - layer.zero_fraction + TIES * size / (size.max() or 1)


def _of_outputs(evidence: Evidence, name: str, value: Callable[[LayerStats], FloatArray]) -> Scores:
    """Return a value of each label from norms and activation functions, else from any output, else any input."""
    norms = {path for path, module in evidence.modules.items() if isinstance(module, NORMS)}
    preferred = norms | _activation_functions(evidence)
    scores = _first_found(
        evidence,
        _finite(evidence),
        value,
        lambda key, layer: key.side == "output" and key.module in preferred,
        *_anywhere(evidence),  # last: outputs of layers whose modules are not called, such as attention's queries
    )
    advice = "collect them over every module, or score by 'l2', which needs none"
    return require_scores(scores, evidence, f"criterion {name!r}: no statistics", advice)


def _anywhere(evidence: Evidence) -> tuple[Accepts, ...]:
    return (
        lambda key, layer: key.side == "output" and key in evidence.channel_map.activations,
        lambda key, layer: key.side == "input",
        lambda key, layer: True,
    )


def _activation_functions(evidence: Evidence) -> set[str]:
    return {path for path, module in evidence.modules.items() if isinstance(module, ACTIVATIONS)}


def _finite(evidence: Evidence) -> ChannelStats:
    assert evidence.stats is not None  # `score` checked what the criterion needs
    evidence.stats.require_finite()
    return evidence.stats


def _first_found(
    evidence: Evidence,
    stats: ChannelStats,
    value: Callable[[LayerStats], FloatArray],
    *preferences: Accepts,
) -> Scores:
    """Return the mean of `value` over the activations that the first preference accepts, else over the next one's."""
    scores = np.full(evidence.channel_map.n_labels, np.nan)
    for accepts in preferences:
        if not np.isnan(scores[1:]).any():
            break
        found = LabelMean(evidence.channel_map)
        for key, layer in stats.items():
            if (labels := _labels(evidence, key)) is not None:
                _require_as_many(f"{key.side} of {key.module!r}", labels, layer)
                chosen = np.broadcast_to(accepts(key, layer), labels.shape)
                found.add(labels[chosen], value(layer)[chosen])
        scores = np.where(np.isnan(scores), found.result(otherwise=np.nan), scores)
    return scores


def _require_as_many(where: str, labels: IntArray, measured: LayerStats) -> None:
    if measured.channels != len(labels):
        raise UsageError(
            f"{where}: the channel map has {len(labels)} channels, the statistics {measured.channels}; both must come "
            "from the same model"
        )


def _labels(evidence: Evidence, key: StatsKey) -> IntArray | None:
    """Return the labels of an activation's channels, from the weight where the layer's module is not called."""
    labels = evidence.channel_map.activations.get(key)
    consumer = evidence.stats.reads.get(key.module) if evidence.stats is not None else None
    if labels is not None or consumer is None or consumer.groups > 1:
        return labels
    axis = consumer.input_axis if key.side == "input" else 1 - consumer.input_axis
    return evidence.channel_map.labels.get(consumer.weight, (None, None))[axis]


@register_criterion(
    "wanda", needs=("weights", "stats"), measures="|w| times the norm of what it reads", paper="Sun et al. 2024, Wanda"
)
def wanda(evidence: Evidence) -> Scores:
    """Return the mean |w| that reads a channel times the channel's root mean square, mean over the layers that read it.

    (Sun et al. 2024, "A simple and effective pruning approach for large language models": |w| times the norm of the
    input, here the mean over a channel's weights.) Channels that no layer reads, as those of queries and keys, get the
    size that they have if the channels of the layer that makes them are independent.
    """
    stats = _finite(evidence)
    read, made = LabelMean(evidence.channel_map), LabelMean(evidence.channel_map)
    for path, consumer in stats.reads.items():
        layer, weight = stats.get(StatsKey(path, "input", 0)), evidence.parameters.get(consumer.weight)
        if layer is None or weight is None:
            continue
        outputs = evidence.channel_map.labels.get(consumer.weight, (None,))[0]
        if outputs is not None and weight.ndim == 2:
            made.add(outputs, np.sqrt(((_columns(consumer, weight) * layer.rms[:, None]) ** 2).sum(0)))
        labels = _labels_read(evidence, path, consumer)
        if labels is None or not labels.any():
            continue
        _require_as_many(f"input of {path!r}", labels, layer)
        read.add(labels, np.abs(_columns(consumer, weight)).mean(1) * layer.rms)
    scores = read.result(otherwise=made.result(otherwise=np.nan))
    problem, advice = "criterion 'wanda': no input was measured", "calibrate over every layer"
    return require_scores(scores, evidence, problem, advice, read.seen)


def _columns(consumer: Consumer, weight: Tensor) -> FloatArray:
    """Return the entries of a layer's weight for each channel that it reads, (channels, outputs x taps)."""
    columns = consumer.columns(weight).cpu().double().numpy()
    require_finite(consumer.weight, columns)
    return columns


def _labels_read(evidence: Evidence, path: str, consumer: Consumer) -> IntArray | None:
    """Return the labels of the channels that a layer reads; the weight of a grouped one has those of one group."""
    chart = evidence.channel_map
    on_weight = chart.labels.get(consumer.weight, ())[consumer.input_axis : consumer.input_axis + 1]
    candidates = (*on_weight, chart.activations.get((path, "input", 0)))
    return next((on for on in candidates if on is not None and len(on) == consumer.channels), None)

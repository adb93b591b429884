"""Importance from the layers that read a channel: their weights, and the second moments of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunekit.criteria.criterion import Evidence, Scores, register_criterion
from prunekit.criteria.scoring import LabelMean, require_finite, require_scores
from prunekit.errors import UsageError
from prunekit.statistics.layer_stats import FloatArray, IntArray, StatsKey
from prunekit.statistics.moments import RAISED, InputMoments
from prunekit.statistics.watch import Consumer

DAMPING = 0.01
"""Ridge that SparseGPT adds to the diagonal of the Gram matrix, as a share of its mean."""


@dataclass(frozen=True, eq=False)
class LabeledConsumer:
    """A layer that reads channels, and the labels of its input's channels, (channels,)."""

    consumer: Consumer
    labels: IntArray

    def columns(self, evidence: Evidence) -> FloatArray:
        """Return the entries of the layer's weight for each channel, (channels, outputs x taps)."""
        return _columns(evidence, self.consumer)


def _columns(evidence: Evidence, consumer: Consumer) -> FloatArray:
    columns = consumer.columns(evidence.parameters[consumer.weight]).cpu().double().numpy()
    require_finite(consumer.weight, columns)
    return columns


@register_criterion(
    "wanda", needs=("weights", "stats"), measures="|w| times the norm of what it reads", paper="Sun et al. 2024, Wanda"
)
def wanda(evidence: Evidence) -> Scores:
    """Return the mean |w| that reads a channel times the channel's root mean square, mean over the layers that read it.

    (Sun et al. 2024, "A simple and effective pruning approach for large language models": |w| times the norm of the
    input, here the mean over a channel's weights.)
    """
    found = LabelMean(evidence.channel_map)
    for read, moments in _with_moments(evidence):
        found.add(read.labels, np.abs(read.columns(evidence)).mean(1) * moments.rms)
    return _require_measured(found, _output_sizes(evidence, squared=False), evidence, "wanda")


@register_criterion(
    "obs",
    needs=("weights", "moments"),
    measures="output error once the other channels make up for it",
    paper="Frantar & Alistarh 2023, SparseGPT; Hassibi & Stork 1993, OBS",
)
def obs(evidence: Evidence) -> Scores:
    """Return the squared error of layers' outputs without a channel, once the others make up for it by least squares.

    For the channels c that carry a label: tr(W_c^T [(H^-1)_cc]^-1 W_c), with H the mean of x x^T, damped by 0.01 of its
    mean diagonal, by 0.1 where there were fewer positions than channels; the taps of a kernel share H. Mean over the
    layers that read the label; of a layer whose Gram matrix was left out, H is the diagonal alone. (Frantar & Alistarh
    2023, "SparseGPT"; Hassibi & Stork 1993, "Second order derivatives for network pruning: optimal brain surgeon".)
    """
    found = LabelMean(evidence.channel_map)
    for read, moments in _with_moments(evidence):
        damping = DAMPING * RAISED if moments.too_few else DAMPING
        factors = inverse_factors(moments.blocks / max(moments.count, 1), damping)
        alive = moments.rms[:, None] > 0  # channels that are always 0 cost nothing, whatever the ridge adds
        columns = (read.columns(evidence) * alive).reshape(*moments.blocks.shape[:2], -1)

        def cost(
            block: int, index: IntArray, factors: list[FloatArray] = factors, columns: FloatArray = columns
        ) -> FloatArray:
            removed = columns[block, index]  # (labels, channels of each, outputs x taps)
            parts = factors[block].T[index]  # (labels, channels of each, n)
            solved = np.linalg.solve(parts @ parts.swapaxes(1, 2), removed)
            return np.asarray((removed * solved).sum((1, 2)))

        for labels in evidence.channel_map.deciding(read.labels):
            _add_joint(found, labels, moments.groups, cost)
    return _require_measured(found, _output_sizes(evidence, squared=True), evidence, "obs")


@register_criterion(
    "chip", needs=("moments",), measures="nuclear norm lost with the channel", paper="Sui et al. 2021, CHIP"
)
def chip(evidence: Evidence) -> Scores:
    """Return channel independence: how much the nuclear norm of a layer's input falls without the channel.

    (Sui et al. 2021, "CHIP: channel independence-based pruning for compact neural networks"; here of all calibration
    data together, whose singular values are the roots of the Gram matrix's eigenvalues, not image by image.) It is the
    mean over the layers that read the channel, and small for channels that are sums of others. Layers that read
    channels one by one, and those whose Gram matrix was left out, count only where no other layer does.
    """
    whole, grouped = LabelMean(evidence.channel_map), LabelMean(evidence.channel_map)
    for read, moments in _with_moments(evidence):
        if moments.groups > 1 and whole.seen[read.labels[read.labels > 0]].all():
            continue
        norms = [NuclearNorm(block / max(moments.count, 1)) for block in moments.blocks]

        def lost(block: int, index: IntArray, norms: list[NuclearNorm] = norms) -> FloatArray:
            return norms[block].lost_without(index)

        for labels in evidence.channel_map.deciding(read.labels):
            _add_joint(whole if moments.groups == 1 else grouped, labels, moments.groups, lost)
    otherwise = grouped.result(otherwise=_output_sizes(evidence, squared=False))
    return _require_measured(whole, otherwise, evidence, "chip")


def _require_measured(found: LabelMean, otherwise: Scores, evidence: Evidence, name: str) -> Scores:
    scores, problem = found.result(otherwise=otherwise), f"criterion {name!r}: no input was measured"
    return require_scores(scores, evidence, problem, "calibrate over every layer, with moments='full'", found.seen)


def _output_sizes(evidence: Evidence, *, squared: bool) -> Scores:
    """Return the size of linear layers' outputs, for channels that no layer reads, as those of queries and keys.

    It is (n_labels,) root mean squares if inputs are independent, or their squares; NaN where there is no such output.
    """
    assert evidence.stats is not None
    found = LabelMean(evidence.channel_map)
    for consumer in evidence.stats.reads.values():  # those too that read no channel that may go
        weight = evidence.parameters.get(consumer.weight)
        labels, moments = evidence.channel_map.labels.get(consumer.weight, (None,))[0], _moments_of(evidence, consumer)
        if labels is not None and moments is not None and weight is not None and weight.ndim == 2:
            energy = ((_columns(evidence, consumer) * moments.rms[:, None]) ** 2).sum(0)
            found.add(labels, energy if squared else np.sqrt(energy))
    return found.result(otherwise=np.nan)


def _labeled_consumers(evidence: Evidence) -> Iterator[LabeledConsumer]:
    """Yield every layer whose input channels have labels."""
    assert evidence.stats is not None
    evidence.stats.require_finite()
    chart = evidence.channel_map
    for path, consumer in evidence.stats.reads.items():
        on_weight = chart.labels.get(consumer.weight, ())[consumer.input_axis : consumer.input_axis + 1]
        candidates = (*on_weight, chart.activations.get((path, "input", 0)))  # a grouped weight has those of one group
        labels = next((on for on in candidates if on is not None and len(on) == consumer.channels), None)
        if labels is not None and labels.any() and consumer.weight in evidence.parameters:
            yield LabeledConsumer(consumer, labels)


def _with_moments(evidence: Evidence) -> Iterator[tuple[LabeledConsumer, InputMoments]]:
    """Yield each layer with the moments of its input."""
    for read in _labeled_consumers(evidence):
        moments = _moments_of(evidence, read.consumer)
        if moments is not None:
            if moments.channels != len(read.labels):
                raise UsageError(
                    f"input of {read.consumer.path!r}: the channel map has {len(read.labels)} channels, the "
                    f"statistics {moments.channels}; both must come from the same model"
                )
            yield read, moments


def _moments_of(evidence: Evidence, consumer: Consumer) -> InputMoments | None:
    """Return the moments of a layer's input; of a Gram matrix that was left out, the diagonal; None: not measured."""
    assert evidence.stats is not None
    layer = evidence.stats.get(StatsKey(consumer.path, "input", 0))
    if consumer.path in evidence.stats.moments or layer is None:
        return evidence.stats.moments.get(consumer.path)
    return InputMoments(1, layer.mean.copy(), np.square(layer.rms)[:, None, None])


def _add_joint(found: LabelMean, labels: IntArray, groups: int, value: Callable[[int, IntArray], FloatArray]) -> None:
    """Add the joint value of the channels of each label, summed over the groups that they lie in.

    Args:
        value: gets a group, and the positions within it of the channels of some labels, (labels, channels of each).
    """
    joint = np.zeros(int(labels.max()) + 1)
    for block, on in enumerate(labels.reshape(groups, -1)):
        order = np.argsort(on, kind="stable")
        names, starts, counts = np.unique(on[order], return_index=True, return_counts=True)
        for size in np.unique(counts[names > 0]):
            which = (counts == size) & (names > 0)
            joint[names[which]] += value(block, order[starts[which, None] + np.arange(size)])
    present = np.unique(labels[labels > 0])
    found.add(present, joint[present])


LEAF = 128
"""Rows of a triangle from which on it is inverted by its quarters, which are products of matrices."""


def inverse_factors(blocks: FloatArray, damping: float) -> list[FloatArray]:
    """Return V with V^T V = the inverse of each symmetric matrix (n, n) with a ridge, by its Cholesky factor.

    Then (V^T V)_cc needs the columns c of V alone. Where a ridge of `damping` times the mean diagonal is not enough for
    rounding errors, ten times as much is added, and so on; to a matrix of zeros, 1.
    """
    return [_triangle_inverse(_factor(torch.tensor(block), damping)).numpy() for block in blocks]


def _factor(matrix: Tensor, damping: float) -> Tensor:
    mean = float(matrix.diagonal().mean()) or 1.0 / damping
    while True:
        damped = matrix.clone()
        damped.diagonal().add_(damping * mean)
        factored = torch.linalg.cholesky_ex(damped)
        if not int(factored.info):
            lower: Tensor = factored.L
            return lower
        damping *= 10


def _triangle_inverse(lower: Tensor) -> Tensor:
    size = len(lower)
    if size <= LEAF:
        small: Tensor = torch.linalg.solve_triangular(lower, torch.eye(size, dtype=lower.dtype), upper=False)
        return small
    half = size // 2
    result = torch.zeros_like(lower)
    result[:half, :half] = _triangle_inverse(lower[:half, :half])
    result[half:, half:] = _triangle_inverse(lower[half:, half:])
    result[half:, :half] = -(result[half:, half:] @ (lower[half:, :half] @ result[:half, :half]))
    return result


STEP = 0.4
"""Step of the trapezoidal rule over log t: its error falls with exp(-pi^2 / step), here to 2e-11."""
LOWEST, HIGHEST = 1e-6, 1e5
"""Range of t, in largest singular values; beyond it the integrand follows a power."""
ENTRIES = 2**22
"""Numbers held at a time."""


class NuclearNorm:
    """The nuclear norm of a matrix A, (n, positions), known by its Gram matrix G = A A^T.

    Without the rows S it is smaller by (2 / pi) times the integral over t > 0 of |S| - t^2 tr(R_SS^-1 (R^2)_SS), with
    R = (G + t^2)^-1: that is sqrt(G) = (2 / pi) integral of G (G + t^2)^-1, and the trace of the inverse of a block
    by its Schur complement. So each S costs O(n), not another decomposition.

    Args:
        gram: (n, n), symmetric, without negative eigenvalues but for rounding.
    """

    def __init__(self, gram: FloatArray) -> None:
        values, self._vectors = np.linalg.eigh(gram)
        self._values = values.clip(min=0)
        self._scale = float(np.sqrt(self._values[-1]))
        low, high = np.log(LOWEST), np.log(HIGHEST)
        self._t = np.exp(np.linspace(low, high, 1 + round((high - low) / STEP))) * self._scale

    def lost_without(self, rows: IntArray) -> FloatArray:
        """Return how much smaller the norm is without some rows, at least 0, (m,) for m choices of rows (m, size)."""
        if self._scale == 0:
            return np.zeros(len(rows))
        values = self._singly(rows[:, 0]) if rows.shape[1] == 1 else np.stack([self._jointly(each) for each in rows], 1)
        weighted = values * self._t[:, None]  # dt = t d(log t)
        step = np.log(self._t[1] / self._t[0])
        ends = weighted[0] + weighted[-1]  # below the range the integrand is constant, above it falls with t^-2
        inside = step * (weighted.sum(0) - ends / 2) + step**2 / 12 * ends  # Euler and Maclaurin's first correction
        lost: FloatArray = np.maximum(0.0, 2 / np.pi * (inside + ends))
        return lost

    def _singly(self, rows: IntArray) -> FloatArray:
        """Return the integrand for single rows, (points, rows): only the diagonals of R and R^2 are needed."""
        squares = self._vectors[rows] ** 2
        inverse = 1 / (self._values + self._t[:, None] ** 2)  # (points, n)
        found: FloatArray = 1 - self._t[:, None] ** 2 * (inverse**2 @ squares.T) / (inverse @ squares.T)
        return found

    def _jointly(self, rows: IntArray) -> FloatArray:
        """Return the integrand for several rows together, (points,)."""
        vectors = self._vectors[rows]
        parts = np.array_split(self._t, 1 + vectors.size * len(self._t) // ENTRIES)
        return np.concatenate([self._integrand(vectors, t) for t in parts])

    def _integrand(self, vectors: FloatArray, t: FloatArray) -> FloatArray:
        inverse = 1 / (self._values + t[:, None] ** 2)  # (points, n)
        once = vectors * inverse[:, None]
        twice = once * inverse[:, None]
        product = np.linalg.solve(once @ vectors.T, twice @ vectors.T)
        value: FloatArray = len(vectors) - t**2 * product.trace(axis1=1, axis2=2)
        return value

"""Importance from what the layers that read a channel make of it: their weights, and what was seen at their inputs.

Inverses of Gram matrices, by Cholesky factors: half of each matrix is all that is computed.

Nuclear norms with rows left out, from one eigenvalue decomposition of a Gram matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunekit.criteria.criterion import Evidence, Scores, register_criterion
from prunekit.criteria.scoring import FloatArray, IntArray, LabelMean, require_all, require_finite
from prunekit.errors import UsageError
from prunekit.statistics.consumers import Consumer
from prunekit.statistics.layer_stats import StatsKey
from prunekit.statistics.moments import RAISED, InputMoments

LEAF = 128
"""Rows of a triangle from which on it is inverted by its quarters, which are products of matrices."""


def inverse_factors(blocks: FloatArray, damping: float) -> list[FloatArray]:
    """For each symmetric matrix (n, n), with a ridge, V with V^T V = its inverse: so (V^T V)_cc takes columns c alone.

    Where a ridge of `damping` times the mean diagonal is not enough for rounding errors, ten times as much is added,
    and so on; to a matrix of zeros, 1.
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
"""Of the trapezoidal rule over log t: its error falls with exp(-pi^2 / step), here to 2e-11."""
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
        """By how much the norm is smaller without some rows, at least 0.

        Args:
            rows: (m, size) m choices of as many rows.

        Returns:
            (m,) for each choice alone.
        """
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
        """(points, rows) The integrand for single rows: of R and R^2 only the diagonals are needed."""
        squares = self._vectors[rows] ** 2
        inverse = 1 / (self._values + self._t[:, None] ** 2)  # (points, n)
        found: FloatArray = 1 - self._t[:, None] ** 2 * (inverse**2 @ squares.T) / (inverse @ squares.T)
        return found

    def _jointly(self, rows: IntArray) -> FloatArray:
        """(points,) The integrand for several rows."""
        vectors = self._vectors[rows]
        parts = np.array_split(self._t, 1 + vectors.size * len(self._t) // ENTRIES)
        return np.concatenate([self._integrand(vectors, t) for t in parts])

    def _integrand(self, vectors: FloatArray, t: FloatArray) -> FloatArray:
        """(points,) At each t."""
        inverse = 1 / (self._values + t[:, None] ** 2)  # (points, n)
        once = vectors * inverse[:, None]
        twice = once * inverse[:, None]
        product = np.linalg.solve(once @ vectors.T, twice @ vectors.T)
        value: FloatArray = len(vectors) - t**2 * product.trace(axis1=1, axis2=2)
        return value


DAMPING = 0.01
"""What SparseGPT adds to the diagonal of the Gram matrix, as a share of its mean."""
NOTHING_SEEN = "no input that carries them was measured: collect over every layer, with moments='full'"


@dataclass(frozen=True, eq=False)
class LabeledConsumer:
    """A layer, and the labels of its input's channels, (channels,)."""

    consumer: Consumer
    labels: IntArray

    def columns(self, evidence: Evidence) -> FloatArray:
        """(channels, outputs x taps) What the layer's weight does with each channel."""
        columns = self.consumer.columns(evidence.parameters[self.consumer.weight]).cpu().double().numpy()
        require_finite(self.consumer.weight, columns)
        return columns


@register_criterion(
    "wanda", needs=("weights", "stats"), measures="|w| times the norm of what it reads", paper="Sun et al. 2024, Wanda"
)
def wanda(evidence: Evidence) -> Scores:
    """Return the mean |w| of what reads a channel times the channel's root mean square, mean over the layers that read
    it.

    (Sun et al. 2024, "A simple and effective pruning approach for large language models": |w| times the norm of the
    input; the mean over a channel's weights carries it to channels.)

    Raises:
        UsageError: nothing that reads some label was measured.
        NonFiniteError: weights or statistics hold NaN or Inf.
    """
    found = LabelMean(evidence.channel_map)
    for read, moments in _with_moments(evidence):
        found.add(read.labels, np.abs(read.columns(evidence)).mean(1) * moments.rms)
    return require_all(found, evidence, "wanda", NOTHING_SEEN, otherwise=_made(evidence, squared=False))


@register_criterion(
    "obs",
    needs=("weights", "moments"),
    measures="output error once the other channels make up for it",
    paper="Frantar & Alistarh 2023, SparseGPT; Hassibi & Stork 1993, OBS",
)
def obs(evidence: Evidence) -> Scores:
    """Return the squared error of a layer's outputs where channels go and the others make up for them as well as they
    can.

    For the channels c that carry a label: tr(W_c^T [(H^-1)_cc]^-1 W_c), with H the mean of x x^T, damped by 0.01 of its
    mean diagonal, by 0.1 where there were fewer positions than channels; the taps of a kernel share H. Mean over the
    layers that read the label; of a layer whose Gram matrix was left out, H is the diagonal alone. (Frantar & Alistarh
    2023, "SparseGPT"; Hassibi & Stork 1993, "Second order derivatives for network pruning: optimal brain surgeon".)

    Raises:
        UsageError: nothing that reads some label was measured.
        NonFiniteError: weights or statistics hold NaN or Inf.
    """
    found = LabelMean(evidence.channel_map)
    for read, moments in _with_moments(evidence):
        damping = DAMPING * RAISED if moments.too_few else DAMPING
        factors = inverse_factors(moments.blocks / max(moments.count, 1), damping)
        alive = moments.rms[:, None] > 0  # what is always 0 does nothing: the ridge must not say otherwise
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
    return require_all(found, evidence, "obs", NOTHING_SEEN, otherwise=_made(evidence, squared=True))


@register_criterion(
    "chip", needs=("moments",), measures="nuclear norm lost with the channel", paper="Sui et al. 2021, CHIP"
)
def chip(evidence: Evidence) -> Scores:
    """Channel independence: what the nuclear norm of a layer's input loses with the channel, mean over the layers.

    (Sui et al. 2021, "CHIP: channel independence-based pruning for compact neural networks"; here of all calibration
    data together, whose singular values are the roots of the Gram matrix's eigenvalues, not image by image.) Channels
    that are sums of others lose little. Layers that read channels one by one, and those whose Gram matrix was left out,
    speak only where no other does.

    Raises:
        UsageError: nothing that reads some label was measured.
        NonFiniteError: the statistics hold NaN or Inf.
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
    otherwise = grouped.result(otherwise=_made(evidence, squared=False))
    return require_all(whole, evidence, "chip", NOTHING_SEEN, otherwise=otherwise)


def _made(evidence: Evidence, *, squared: bool) -> Scores:
    """(n_labels,) For what no layer reads, as positions in queries and keys: how large linear layers make it.

    The root mean square of an output whose inputs are independent, or its square; NaN where there is none.
    """
    found = LabelMean(evidence.channel_map)
    for read, moments in _with_moments(evidence):
        labels = evidence.channel_map.labels[read.consumer.weight][0]
        if labels is not None and evidence.parameters[read.consumer.weight].ndim == 2:
            energy = ((read.columns(evidence) * moments.rms[:, None]) ** 2).sum(0)
            found.add(labels, energy if squared else np.sqrt(energy))
    return found.result(otherwise=np.nan)


def _reads(evidence: Evidence) -> Iterator[LabeledConsumer]:
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
    """Yield what was measured of each input; where its Gram matrix was left out, the diagonal, from the statistics."""
    assert evidence.stats is not None
    for read in _reads(evidence):
        moments = evidence.stats.moments.get(read.consumer.path)
        layer = evidence.stats.get(StatsKey(read.consumer.path, "input", 0))
        if moments is None and layer is not None:
            moments = InputMoments(1, layer.mean.copy(), np.square(layer.rms)[:, None, None])
        if moments is not None:
            if moments.channels != len(read.labels):
                raise UsageError(
                    f"input of {read.consumer.path!r}: the channel map has {len(read.labels)} channels, the "
                    f"statistics {moments.channels}; both must come from the same model"
                )
            yield read, moments


def _add_joint(found: LabelMean, labels: IntArray, groups: int, value: Callable[[int, IntArray], FloatArray]) -> None:
    """Add what the channels of each label are worth together, summed over the groups that they lie in.

    Args:
        labels: (channels,)
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

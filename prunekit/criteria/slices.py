"""From values along the axes of tensors to values of labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from prunekit.channels import ChannelMap
from prunekit.criteria.registry import Evidence, Scores
from prunekit.errors import NonFiniteError, UsageError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class LabelMean:
    """Mean over several axes of what each says about a label; an axis that does not carry a label says nothing.

    Where two labels decide on an entry together, the axis says something about both; the joint label scores 0.
    """

    def __init__(self, channel_map: ChannelMap) -> None:
        self._map = channel_map
        self._total, self._axes = np.zeros(channel_map.n_labels), np.zeros(channel_map.n_labels, np.int64)
        self._axes[channel_map.joint[:, 0]] = 1

    def add(self, labels: IntArray, values: FloatArray, *, exponent: float = 1.0) -> None:
        """Adds one axis: the mean of `values` over the indices that share a label, to the power of `exponent`.

        Args:
            labels: (size,), the label of every index along the axis.
            values: (size,), not negative where `exponent` is not whole.
        """
        for deciding in self._map.deciding(labels):
            found, position, count = np.unique(deciding, return_inverse=True, return_counts=True)
            self._total[found] += (np.bincount(position, values) / count) ** exponent
            self._axes[found] += 1

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Labels that some axis carried, (n_labels,)."""
        found: npt.NDArray[np.bool_] = self._axes > 0
        return found

    def result(self, *, otherwise: Scores | float = np.inf) -> Scores:
        """The mean for each label, (n_labels,); `otherwise` for those that no axis carried."""
        return np.where(self.seen, self._total / np.maximum(self._axes, 1), otherwise)


Measure = Callable[[LabelMean, str, Tensor, dict[int, IntArray]], None]
"""Adds to the mean what a named weight says about the labels on its axes: axis -> (size,)."""


def mean_over_slices(evidence: Evidence, measure: Measure) -> Scores:
    """Mean over a label's axes of what `measure` says about its slice.

    A slice is everything that carries the label along one axis of a weight: a filter, the columns that read it, and
    behind a flatten all the columns of one channel together. Weights of two or more axes speak; biases and affine
    scales do only for labels that lie on nothing else. A label on no parameter scores +inf: nothing to remove.
    """
    weights = _measured(evidence, measure, vectors=False)
    if weights.seen[1:].all():
        return weights.result()
    return weights.result(otherwise=_measured(evidence, measure, vectors=True).result())


def _measured(evidence: Evidence, measure: Measure, *, vectors: bool) -> LabelMean:
    found = LabelMean(evidence.channel_map)
    for name, weight in evidence.parameters.items():
        if (weight.ndim < 2) == vectors:
            axes = enumerate(evidence.channel_map.labels[name])
            labeled = {axis: labels for axis, labels in axes if labels is not None and labels.any()}
            measure(found, name, weight, labeled)
    return found


def require_finite(name: str, values: FloatArray) -> None:
    """Checks what was computed from a parameter.

    Raises:
        NonFiniteError: NaN or Inf is among the values; names the parameter.
    """
    if not np.isfinite(values).all():
        raise NonFiniteError(f"parameter {name!r} holds NaN or Inf; importance needs finite weights")


def require_all(
    found: LabelMean, evidence: Evidence, name: str, advice: str, *, otherwise: Scores | float = np.nan
) -> Scores:
    """The scores of a criterion that has to know something of every label.

    Args:
        otherwise: for those of which `found` knows nothing.

    Raises:
        UsageError: some label is left without; names its group.
    """
    scores = found.result(otherwise=otherwise)
    for group in evidence.channel_map.groups:
        missing = int((np.isnan(scores[group.labels]) & ~found.seen[group.labels]).sum())
        if missing:
            raise UsageError(
                f"criterion {name!r}: {missing} of {len(group.labels)} channels of group {group.name!r} cannot be "
                f"scored: {advice}"
            )
    return scores

"""From values along the axes of tensors to values of labels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prunekit.criteria.registry import Scores

IntArray = npt.NDArray[np.int64]


class LabelMean:
    """Mean over several axes of what each says about a label; an axis that does not carry a label says nothing."""

    def __init__(self, n_labels: int) -> None:
        self._total, self._axes = np.zeros(n_labels), np.zeros(n_labels, np.int64)

    def add(self, labels: IntArray, values: npt.NDArray[np.float64], *, exponent: float = 1.0) -> None:
        """Adds one axis: the mean of `values` over the indices that share a label, to the power of `exponent`.

        Args:
            labels: (size,), the label of every index along the axis.
            values: (size,), not negative where `exponent` is not whole.
        """
        found, position, count = np.unique(labels, return_inverse=True, return_counts=True)
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

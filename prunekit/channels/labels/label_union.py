"""The union of labels: which labels were merged, as a union-find over integers; label 0 is locked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
LOCKED = 0


class LabelUnion:
    """Union-find over labels on a NumPy root array: merges are batched and resolved lazily.

    Every class is represented by its smallest label, so whatever is merged with label 0 reads as 0: locked.
    """

    def __init__(self) -> None:
        self._root: Labels = np.zeros(1, dtype=np.int64)
        self._pending: list[tuple[Labels, Labels]] = []

    @property
    def size(self) -> int:
        """Number of labels given out so far, the locked label included."""
        return len(self._root)

    def copy(self) -> LabelUnion:
        """Return an independent union with the classes that this one has now."""
        self._flush()
        twin = LabelUnion()
        twin._root = self._root.copy()
        return twin

    def new(self, count: int) -> Labels:
        """Give out `count` fresh labels."""
        fresh = np.arange(self.size, self.size + count, dtype=np.int64)
        self._root = np.concatenate([self._root, fresh])
        return fresh

    def merge(self, left: Labels, right: Labels) -> None:
        """Make `left[i]` and `right[i]` one class; the two arrays broadcast against each other."""
        if left is not right:
            if left.shape != right.shape:
                left, right = np.broadcast_arrays(left, right)
            self._pending.append((left.reshape(-1), right.reshape(-1)))

    def tie(self, labels: Labels, axes: Sequence[int]) -> Labels:
        """Make labels constant along `axes` by merging; return them with those axes reduced to size 1."""
        first = labels
        for axis in axes:
            first = np.take(first, [0], axis=axis)
        self.merge(labels, first)
        return first

    def lock(self, labels: Labels) -> None:
        """Merge labels into the locked class."""
        self._pending.append((labels.reshape(-1), np.zeros(labels.size, dtype=np.int64)))

    def find(self, labels: Labels) -> Labels:
        """Return the representative of every label, in the shape of `labels`."""
        self._flush()
        return self._root[labels]

    def equal(self, left: Labels, right: Labels) -> bool:
        """Return whether two arrays of labels are the same, class by class."""
        if left.shape != right.shape:
            return False
        return left is right or np.array_equal(left, right) or np.array_equal(self.find(left), self.find(right))

    def _flush(self) -> None:
        """Merge all pending edges by min-hooking and pointer jumping, until every edge joins equal roots."""
        if not self._pending:
            return
        left = np.concatenate([edge[0] for edge in self._pending])
        right = np.concatenate([edge[1] for edge in self._pending])
        self._pending = []
        root = self._root
        while True:
            a, b = root[left], root[right]
            open_edges = a != b
            if not open_edges.any():
                break
            left, right, a, b = left[open_edges], right[open_edges], a[open_edges], b[open_edges]
            np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
            while True:
                jumped = root[root]
                if np.array_equal(jumped, root):
                    break
                root[:] = jumped

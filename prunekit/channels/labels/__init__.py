"""Channel labels: integers for what must be kept or removed together, merged by union-find; label 0 is locked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        self.merge(labels, np.zeros(1, dtype=np.int64))

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


class Field:
    """Labels that lie on a tensor: an integer array that broadcasts to its shape. Immutable.

    Attributes:
        labels: as many axes as the tensor, of full size where the label depends on that axis and of size 1 elsewhere.
        zero: whether entries of a removed label are exactly 0 when the model runs under masks.
        true: whether they are True instead, as comparisons of 0 with another number may be.
        span: the axes along which the labels differ.
    """

    __slots__ = ("labels", "span", "true", "zero")

    def __init__(self, labels: Labels, zero: bool, true: bool = False) -> None:
        self.labels = labels
        self.zero = zero
        self.true = true
        self.span = tuple([axis for axis, size in enumerate(labels.shape) if size > 1])

    def with_labels(self, labels: Labels) -> Field:
        """Return the same field with other labels."""
        return Field(labels, self.zero, self.true)


def along(labels: Labels, axis: int, ndim: int) -> Labels:
    """Return a vector of labels shaped to lie on one axis of an `ndim`-dimensional tensor."""
    shape = [1] * ndim
    shape[axis] = labels.size
    return labels.reshape(shape)


def apart(fields: Iterable[Field]) -> tuple[tuple[Labels, ...], set[int]]:
    """Return the flat labels of the fields of one tensor that share no axis with an earlier one, and their axes."""
    covered: set[int] = set()
    factors = []
    for field in fields:
        if not covered & set(field.span):
            covered |= set(field.span)
            factors.append(field.labels.reshape(-1))
    return tuple(factors), covered


def rows_along(labels: Labels, axis: int) -> Labels:
    """Return the labels with a row for each position of an axis, (size, n)."""
    return np.moveaxis(labels, axis, 0).reshape(labels.shape[axis], -1)


def collapse(labels: Labels) -> Labels:
    """Reduce every axis along which the labels are constant to size 1."""
    for axis, size in enumerate(labels.shape):
        if size > 1:
            first = np.take(labels, [0], axis=axis)
            if (labels == first).all():
                labels = first
    return labels


@dataclass(frozen=True, eq=False)
class MacTerm:
    """Multiply-accumulates of one operator for one sample: `constant` times the kept labels of every factor."""

    module: str
    operator: str
    constant: float
    factors: tuple[Labels, ...]


@dataclass(frozen=True, eq=False)
class WidthMultiple:
    """A width that is needed in multiples of a number, as by kernels that load 16 bytes at once, and a least one."""

    labels: Labels
    number: int
    least: int = 1


@dataclass(frozen=True)
class Stored:
    """Storage of a tensor in a model's file: bytes of one element, and whether it is a parameter or a buffer."""

    element_bytes: int
    parameter: bool

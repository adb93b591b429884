"""Fields: labels that lie on tensors; and what is said of labels, such as the multiply-accumulates that they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from prunekit.channels.labels.label_union import Labels


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

    def behind(self, axes: int) -> Field:
        """Return the field of a tensor that has as many axes of size 1 before the others."""
        return self.with_labels(self.labels.reshape((1,) * axes + self.labels.shape)) if axes else self


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

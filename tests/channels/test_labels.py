"""Union-find over labels against a naive model, and fields."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunekit.channels.labels.label_flow import Field, along, collapse
from prunekit.channels.labels.label_union import LabelUnion

Edges = list[list[tuple[int, int]]]
SIZE = 24


class NaiveUnion:
    """Classes as sets, merged one edge at a time."""

    def __init__(self, size: int) -> None:
        self.classes = [{label} for label in range(size)]

    def merge(self, a: int, b: int) -> None:
        joined = self.find_class(a) | self.find_class(b)
        self.classes = [members for members in self.classes if not members & joined] + [joined]

    def find_class(self, label: int) -> set[int]:
        return next(members for members in self.classes if label in members)


edge = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))
batches = st.lists(st.lists(edge, max_size=8), max_size=6)


@given(batches, st.booleans())
def test_union_is_the_naive_one(edges: Edges, find_between: bool) -> None:
    union, naive = LabelUnion(), NaiveUnion(SIZE + 1)
    labels = union.new(SIZE)
    assert labels.tolist() == list(range(1, SIZE + 1))
    for batch in edges:
        if batch:
            union.merge(*np.array(batch, dtype=np.int64).T)
        for a, b in batch:
            naive.merge(a, b)
        if find_between:
            union.find(labels)
    found = union.find(np.arange(SIZE + 1)).tolist()
    assert found == [min(naive.find_class(label)) for label in range(SIZE + 1)]


@given(batches)
def test_labels_given_out_later_are_on_their_own(edges: Edges) -> None:
    union = LabelUnion()
    union.new(SIZE)
    for batch in edges:
        if batch:
            union.merge(*np.array(batch, dtype=np.int64).T)
    late = union.new(3)
    assert union.size == SIZE + 4
    assert union.find(late).tolist() == late.tolist()


@given(batches, batches)
def test_a_copy_and_its_origin_do_not_see_each_other(before: Edges, after: Edges) -> None:
    union = LabelUnion()
    labels = union.new(SIZE)
    for batch in before:
        if batch:
            union.merge(*np.array(batch, dtype=np.int64).T)
    twin = union.copy()
    wanted = union.find(labels).copy()
    assert twin.size == union.size
    for batch in after:
        if batch:
            union.merge(*np.array(batch, dtype=np.int64).T)
    assert twin.find(labels).tolist() == wanted.tolist()
    assert twin.new(1).tolist() == [SIZE + 1]
    twin.lock(labels)
    assert union.find(union.new(1)).tolist() == [SIZE + 1]


def test_merge_broadcasts() -> None:
    union = LabelUnion()
    rows, columns = union.new(3).reshape(3, 1), union.new(2).reshape(1, 2)
    union.merge(rows, columns)
    assert np.unique(union.find(np.arange(1, 6))).tolist() == [1]


def test_locked_labels_read_as_0() -> None:
    union = LabelUnion()
    first, second = union.new(4), union.new(4)
    union.merge(first, second)
    union.lock(second[1:3])
    assert union.find(first).tolist() == [1, 0, 0, 4]


def test_tie_keeps_one_label_along_an_axis() -> None:
    union = LabelUnion()
    grid = union.new(6).reshape(2, 3)
    assert union.tie(grid, [1]).shape == (2, 1)
    assert union.find(grid).tolist() == [[1, 1, 1], [4, 4, 4]]
    assert union.tie(grid, [0, 1]).shape == (1, 1)
    assert np.unique(union.find(grid)).tolist() == [1]


def test_equal_compares_classes_not_numbers() -> None:
    union = LabelUnion()
    a, b = union.new(3), union.new(3)
    assert not union.equal(a, b)
    union.merge(a, b)
    assert union.equal(a, b)
    assert not union.equal(a, b.reshape(3, 1))
    assert not union.equal(a, b[::-1])


def test_field_span_and_vector_along_an_axis() -> None:
    labels = along(np.arange(1, 5), 1, 3)
    assert labels.shape == (1, 4, 1)
    field = Field(labels, True)
    assert field.span == (1,)
    moved = field.with_labels(labels.reshape(4, 1, 1))
    assert moved.span == (0,)
    assert moved.zero


@pytest.mark.parametrize(
    ("labels", "shape"),
    [([[1, 1], [2, 2]], (2, 1)), ([[1, 2], [1, 2]], (1, 2)), ([[3, 3], [3, 3]], (1, 1)), ([[1, 2], [2, 1]], (2, 2))],
)
def test_collapse_drops_axes_without_a_difference(labels: list[list[int]], shape: tuple[int, int]) -> None:
    array = np.array(labels)
    collapsed = collapse(array)
    assert collapsed.shape == shape
    assert np.array_equal(np.broadcast_to(collapsed, array.shape), array)

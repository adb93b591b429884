"""Shape operators on labels against the same operators of torch on a tensor that holds the labels as values."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rule_mode import RuleMode
from torch import Tensor

from prunekit.channels.labels.constraints import EqualParts, Rectangle
from prunekit.channels.labels.label_flow import Field, LabelFlow, along
from prunekit.channels.rules.shape import axis_groups, reshape_labels


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of the same number of elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=6))

    def grouped() -> list[int]:
        shape = [1]
        for factor in factors:
            if draw(st.booleans()):
                shape.append(1)
            shape[-1] *= factor
        return shape

    return grouped(), grouped()


@given(reshapes())
def test_axis_groups_are_minimal_and_cover_both_shapes(shapes: tuple[list[int], list[int]]) -> None:
    old, new = shapes
    groups = axis_groups(old, new)
    assert [axis for left, _ in groups for axis in left] == list(range(len(old)))
    assert [axis for _, right in groups for axis in right] == list(range(len(new)))
    for left, right in groups:
        assert math.prod(old[axis] for axis in left) == math.prod(new[axis] for axis in right)
        for cut in range(1, len(left)):
            for other in range(1, len(right)):
                assert math.prod(old[a] for a in left[:cut]) != math.prod(new[a] for a in right[:other])


@given(reshapes(), st.data())
def test_reshaped_labels_are_torchs_view_of_them(shapes: tuple[list[int], list[int]], data: st.DataObject) -> None:
    old, new = shapes
    spanned = [data.draw(st.booleans()) for _ in old]
    size = [n if on else 1 for n, on in zip(old, spanned, strict=True)]
    labels = np.arange(1, math.prod(size) + 1).reshape(size)
    got, splits = reshape_labels(labels, old, new)
    want = torch.from_numpy(np.broadcast_to(labels, old).copy()).reshape(new).numpy()
    assert np.array_equal(np.broadcast_to(got, new), want)
    for axes in splits:
        assert len(axes) > 1
        assert all(new[axis] > 1 for axis in axes)


def test_a_size_of_zero_carries_no_labels() -> None:
    labels, splits = reshape_labels(np.arange(1, 4).reshape(1, 3), [0, 3], [3, 0])
    assert labels.shape == (1, 1)
    assert splits == []


SHAPE_OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(1),
    "flatten all": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "merge and split": lambda x: x.reshape(2, 6 * 4).reshape(2, 3, 8),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(-1, 1),
    "movedim": lambda x: x.movedim(1, -1),
    "swap last": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x: x[:, :, :1].squeeze(2),
    "expand": lambda x: x[:, None].expand(-1, 5, -1, -1, -1),
    "flip": lambda x: x.flip(1, 2),
    "slice elsewhere": lambda x: x[:, :, 1:, ::2],
    "select elsewhere": lambda x: x[:, :, 1],
    "pad elsewhere": lambda x: torch.nn.functional.pad(x, (1, 2, 0, 1)),
    "roll elsewhere": lambda x: x.roll(1, 2),
    "repeat": lambda x: x.repeat(3, 1, 2, 1, 1),
    "repeat the labels": lambda x: x.repeat(1, 2, 1, 1),
    "contiguous": lambda x: x.contiguous().clone(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "shuffle": lambda x: x.view(2, 2, 3, 2, 2).transpose(1, 2).reshape(2, 6, 2, 2),
    "looked up by a table": lambda x: x[:, :, torch.tensor([[1, 0, 1], [0, 0, 1]])],
    "looked up by two tables": lambda x: x[:, :, torch.tensor([1, 0, 1]), torch.tensor([[0], [1]])],
    "looked up apart": lambda x: x[torch.tensor([1, 0, 1]), :, torch.tensor([[0], [1]])],
    "rows by a mask": lambda x: x[torch.tensor([False, True])],
    "windows": lambda x: x.unfold(2, 2, 1),
    "stacked with itself": lambda x: torch.stack([x, x], 2),
    "stacked in front": lambda x: torch.stack([x, x]),
    "index elsewhere": lambda x: x.index_select(2, torch.tensor([1, 0])),
}


@pytest.mark.parametrize("name", SHAPE_OPERATORS)
def test_shape_operators_are_replayed(name: str) -> None:
    flow = LabelFlow()
    labels = flow.union.new(6)
    tensor = torch.from_numpy(along(labels, 1, 4)).double().expand(2, 6, 2, 2).contiguous()
    flow.set(tensor, [Field(along(labels, 1, 4), True)])
    flow.first_made = flow.union.size
    with RuleMode(flow):
        out = SHAPE_OPERATORS[name](tensor)
    assert not flow.locks
    (field,) = (field for field in flow.fields(out) if not flow.has_any_size(field))  # as an expanded axis has
    shown = np.broadcast_to(field.labels, tuple(out.shape))
    inside = out.numpy() != 0  # positions that padding added hold 0
    assert np.array_equal(shown[inside], out.numpy()[inside])
    assert field.zero


LOCKING: dict[str, Callable[[Tensor], Tensor]] = {
    "step with a rest": lambda x: x[:, ::4],
    "step from within": lambda x: x[:, 2::2],
    "select": lambda x: x[:, 3].clone(),
    "roll": lambda x: x.roll(1, 1),
    "roll everything": lambda x: x.roll(1),
    "pad that shifts": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 1, -1)),
    "index": lambda x: x[:, [1, 0, 2, 3, 4, 5]],
    "index of several": lambda x: x[torch.tensor([0, 1]), torch.tensor([1, 0])],
    "mask of several": lambda x: x[x[:, :, 0, 0] >= 0],
    "windows": lambda x: x.unfold(1, 2, 1),
    "unbind": lambda x: x.unbind(1)[0],
}


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_step_passes_over_goes_with_what_it_takes(first: int) -> None:
    flow = LabelFlow()
    labels = flow.union.new(6)
    tensor = torch.zeros(2, 6, 2, 2)
    flow.set(tensor, [Field(along(labels, 1, 4), True)])
    with RuleMode(flow):
        taken = tensor[:, first::2]
    assert not flow.locks
    (field,) = flow.fields(taken)
    assert field.labels.shape == (1, 3, 1, 1)
    assert flow.union.find(labels).tolist() == np.repeat(flow.union.find(field.labels.reshape(-1)), 2).tolist()


@pytest.mark.parametrize("name", LOCKING)
def test_positions_picked_by_number_lock(name: str) -> None:
    flow = LabelFlow()
    labels = flow.union.new(6)
    tensor = torch.zeros(2, 6, 2, 2)
    flow.set(tensor, [Field(along(labels, 1, 4), True)])
    with RuleMode(flow):
        LOCKING[name](tensor)
    assert not flow.union.find(labels).any()
    assert flow.locks


PASSING: dict[str, tuple[Callable[[Tensor], Tensor], list[int]]] = {
    "slice": (lambda x: x[:, 2:5], [3, 4, 5]),
    "slice from the end": (lambda x: x[:, -2:], [5, 6]),
    "narrow": (lambda x: x.narrow(1, 1, 2), [2, 3]),
    "unequal split": (lambda x: x.split([2, 4], 1)[1], [3, 4, 5, 6]),
    "last of uneven chunks": (lambda x: x.chunk(4, 1)[-1], [5, 6]),
    "zeros around": (lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 2)), [0, 1, 2, 3, 4, 5, 6, 0, 0]),
}


@pytest.mark.parametrize("name", PASSING)
def test_parts_of_a_labeled_axis_keep_their_labels(name: str) -> None:
    flow = LabelFlow()
    tensor = torch.zeros(2, 6, 2, 2)
    flow.set(tensor, [Field(along(flow.union.new(6), 1, 4), True)])
    with RuleMode(flow):
        (field,) = flow.fields(PASSING[name][0](tensor))
    assert field.labels.reshape(-1).tolist() == PASSING[name][1]
    assert field.zero
    assert not flow.locks


def test_the_only_position_of_a_part_stays() -> None:
    flow = LabelFlow()
    labels = flow.union.new(6)
    tensor = torch.zeros(2, 6, 2, 2)
    flow.set(tensor, [Field(along(labels, 1, 4), True)])
    with RuleMode(flow):
        _ = tensor[:, 2:3], tensor.split([5, 1], 1)
    assert flow.union.find(labels).tolist() == [1, 2, 0, 4, 5, 0]


def test_padding_with_a_value_is_not_zero() -> None:
    flow = LabelFlow()
    tensor = torch.zeros(2, 6, 2, 2)
    flow.set(tensor, [Field(along(flow.union.new(6), 1, 4), True)])
    with RuleMode(flow):
        plain, filled = (torch.nn.functional.pad(tensor, (1, 1), value=value) for value in (0.0, 0.5))
    assert flow.fields(plain)[0].zero
    assert not flow.fields(filled)[0].zero


def test_cat_puts_labels_in_a_row_and_locks_what_has_none() -> None:
    flow = LabelFlow()
    a, b, plain = torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2, 2)
    first, second = flow.union.new(3), flow.union.new(2)
    flow.set(a, [Field(along(first, 1, 2), True)])
    flow.set(b, [Field(along(second, 1, 2), False)])
    with RuleMode(flow):
        out = torch.cat([b, plain, a, a], 1)
    (field,) = flow.fields(out)
    assert field.labels.tolist() == [[4, 5, 0, 0, 1, 2, 3, 1, 2, 3]]
    assert not field.zero


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_chunk_takes_its_part_and_leaves_a_constraint(parts: int) -> None:
    flow = LabelFlow()
    labels = flow.union.new(6)
    tensor = torch.zeros(2, 6, 2)
    flow.set(tensor, [Field(along(labels, 1, 3), True)])
    with RuleMode(flow):
        outs = tensor.chunk(parts, 1)
    (constraint,) = flow.constraints
    assert isinstance(constraint, EqualParts)
    assert constraint.labels.tolist() == labels.reshape(parts, -1).tolist()
    if parts < 6:
        got = [flow.fields(out)[0].labels.reshape(-1).tolist() for out in outs]
        assert got == labels.reshape(parts, -1).tolist()


def test_a_view_into_factors_leaves_rectangles() -> None:
    flow = LabelFlow()
    labels = flow.union.new(12)
    tensor = torch.zeros(2, 12)
    flow.set(tensor, [Field(along(labels, 1, 2), True)])
    with RuleMode(flow):
        tensor.view(2, 2, 3, 2)
    assert all(isinstance(constraint, Rectangle) for constraint in flow.constraints)
    shapes = sorted(constraint.labels.shape for constraint in flow.constraints)
    assert shapes == [(2, 6), (3, 2), (3, 2)]


@pytest.mark.parametrize("operator", [lambda x: x[..., :2], lambda x: x.roll(1, -1), lambda x: x[..., 1]])
def test_what_is_cut_on_one_axis_of_joint_labels_is_tied_along_it(operator: Callable[[Tensor], Tensor]) -> None:
    """Halves of every head, as rotary embeddings take them: whole heads stay prunable."""
    flow = LabelFlow()
    labels = flow.union.new(12)
    heads = torch.zeros(2, 3, 4)
    flow.set(heads, [Field(labels.reshape(1, 3, 4), True)])
    with RuleMode(flow):
        out = operator(heads)
    (field,) = flow.fields(out)
    assert field.labels.reshape(-1).tolist() == [1, 5, 9]
    assert field.zero
    assert flow.union.find(labels).tolist() == [1] * 4 + [5] * 4 + [9] * 4
    assert not flow.locks


@pytest.mark.parametrize("written", [torch.tensor([1, 0]), torch.tensor([True, False, True])])
def test_rows_written_by_number_leave_their_channels_on_what_had_none(written: Tensor) -> None:
    flow = LabelFlow()
    target, rows = torch.zeros(3, 4, 2), torch.zeros(2, 4, 2)
    flow.set(rows, [Field(along(flow.union.new(4), 1, 3), True)])
    with RuleMode(flow):
        target[written] = rows
    (field,) = flow.fields(target)
    assert field.labels.tolist() == [[[1], [2], [3], [4]]]
    assert not field.zero, "nothing is known of the rows that stay"
    assert not flow.locks


def test_rows_written_by_number_merge_with_what_was_there() -> None:
    flow = LabelFlow()
    target, row = torch.zeros(2, 4, 3), torch.zeros(4)
    labels = flow.union.new(8)
    flow.set(target, [Field(along(labels[:4], 1, 3), True)])
    flow.set(row, [Field(along(labels[4:], 0, 1), True)])
    with RuleMode(flow):
        target[torch.tensor([1]), :, torch.tensor([2])] = row
    assert flow.fields(target)[0].zero
    assert flow.union.find(labels).tolist() == [1, 2, 3, 4] * 2
    assert not flow.locks


@pytest.mark.parametrize(("position", "stay"), [(0, {0}), (-1, {3}), (1, {0, 1, 2, 3}), (3, {0, 1, 2, 3})])
def test_the_ends_of_an_axis_stay_its_ends(position: int, stay: set[int]) -> None:
    """Another position would be counted from the front: it moves where earlier ones are removed."""
    flow = LabelFlow()
    labels = flow.union.new(4)
    source = torch.zeros(2, 4)
    flow.set(source, [Field(along(labels, 1, 2), True)])
    with RuleMode(flow):
        source[:, position].sort()
    assert set(np.flatnonzero(flow.union.find(labels) == 0)) == stay


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_put_((torch.tensor([[0], [1]]), torch.tensor([0, 2])), torch.ones(2, 2)),
        lambda x: x.index_put_((torch.ones(2, 4, dtype=torch.bool),), torch.ones(8)),
        lambda x: torch.zeros(4, 3).index_put_((torch.tensor([3, 0, 1, 2]),), x[0, :, None]),
    ],
    ids=["written over", "by a mask of several axes", "onto positions picked by number"],
)
def test_channels_among_which_some_are_picked_to_write_are_locked(write: Callable[[Tensor], Tensor]) -> None:
    flow = LabelFlow()
    labels = flow.union.new(4)
    target = torch.zeros(2, 4)
    flow.set(target, [Field(along(labels, 1, 2), True)])
    with RuleMode(flow):
        write(target)
    assert not flow.union.find(labels).any()

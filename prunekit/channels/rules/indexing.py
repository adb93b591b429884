"""Rules of operators that take an axis apart, put parts together, look up or sort positions, or write to them."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prunekit.channels.labels.constraints import EqualParts, Rectangle
from prunekit.channels.labels.label_flow import Field, LabelFlow, Operand, along
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.pointwise import IN_PLACE, aligned, is_zero, zero_spans
from prunekit.channels.rules.rule import OperatorCall, Trait, aten, register_rule
from prunekit.channels.rules.shape import BY_POSITION, PICKED, part, replay
from prunekit.hooks.model_copy import has_gradients, named_tensors
from prunekit.utils.tensors import gather as gather_tensors

Trait.SIZED.declare("aten.split", "aten.split_with_sizes")
Trait.JOINS.declare("aten.cat")
Trait.PICKS.declare("aten.index", "aten.index_select")
Trait.PICKS_FROM_STACK.declare("aten.select", "aten.index", "aten.index_select")
STORED_ORDER = (
    "put in the order of an index that the model stores, whose numbers pruning leaves as they are; channels that a "
    "view and a transpose reorder instead can be pruned"
)


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the integers that a tensor holds or, on a meta device, would hold; None if unknown."""
    known: torch.Tensor = getattr(tensor, "_prunekit_numbers", tensor)
    unknown = known.is_meta or known.is_floating_point() or (known.numel() and not known.untyped_storage().nbytes())
    return None if unknown else known


def remember(tensor: torch.Tensor, known: torch.Tensor | None) -> None:
    """Remember the numbers of a tensor; where some written to it are unknown, those of all of its views are."""
    before = getattr(tensor, "_prunekit_numbers", None)
    if known is None and before is not None:
        before.untyped_storage().resize_(0)
    elif known is not None:
        tensor._prunekit_numbers = known  # type: ignore[attr-defined]


def _without(flow: LabelFlow, fields: Sequence[Field], axis: int, reason: str) -> list[Field]:
    """Return fields without an axis, all of whose positions stay: fields on it alone are locked, others tied."""
    # queries, keys and values on an axis of size 3 then lose the same heads
    return [field.with_labels(np.squeeze(field.labels, axis)) for field in flow.tied_along([axis], fields, reason)]


@register_rule("aten.select")
def select(flow: LabelFlow, call: OperatorCall) -> None:
    """Take one position of an axis, which is locked if anything reads its values, and not its shape alone.

    The first position stays the first, and the last the last, if it stays: others are free then.
    """
    axis = call.args[1] % call.args[0].dim()
    alone = [field for field in flow.fields(call.args[0]) if field.span == (axis,)]
    others = [field for field in flow.fields(call.args[0]) if field.span != (axis,)]
    if alone:
        end = {0: slice(1), -1: slice(-1, None)}.get(call.args[2], slice(None))
        labels = np.concatenate([field.labels.reshape(-1)[end] for field in alone])
        flow.lock_if_read(call.out, labels, "one position of this axis is picked by number")
    flow.set(call.out, _without(flow, others, axis, ""))


@register_rule("aten.unbind")
def unbind(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock the axis that falls into single positions, or tie along it, and give all of these the others."""
    axis = call.arg(1, "dim", 0) % call.args[0].dim()
    rest = _without(flow, flow.fields(call.args[0]), axis, "unbound into single positions")
    for out in call.outs:
        flow.set(out, rest)


@register_rule(*aten("split split_with_sizes chunk unsafe_split unsafe_chunk"))
def split(flow: LabelFlow, call: OperatorCall) -> None:
    """Split labels, equal parts of which must stay equal; the trial tells whether sizes of unequal parts can be set."""
    axis, outs, fields = call.arg(2, "dim", 0) % call.args[0].dim(), call.outs, flow.fields(call.args[0])
    sizes = [out.shape[axis] for out in outs]
    equal = len(outs) > 1 and len(set(sizes)) == 1
    for field in fields:
        if axis in field.span and equal and flow.module not in flow.substituted:  # these take sizes from their tensors
            moved = np.moveaxis(field.labels, axis, -1)
            for row in moved.reshape(-1, moved.shape[-1]):
                flow.constraints.append(EqualParts(row.reshape(len(outs), -1)))
    ends = np.cumsum(sizes)
    for out, size, end in zip(outs, sizes, ends, strict=True):
        flow.set(out, part(flow, fields, axis, int(end) - size, int(end)))


@register_rule("aten.stack")
def stack(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge the labels of tensors that are put side by side along a new axis, which has none."""
    axis = call.arg(1, "dim", 0) % call.out.dim()
    fields = _common(flow, [tuple(t.shape) for t in call.args[0]], [list(flow.fields(t)) for t in call.args[0]])
    flow.set(call.out, [field.with_labels(np.expand_dims(field.labels, axis)) for field in fields])


@register_rule("aten.cat")
def concatenate(flow: LabelFlow, call: OperatorCall) -> None:
    """Concatenate labels; a part without labels on that axis has locked positions."""
    axis = call.arg(1, "dim", 0) % call.out.dim()
    tensors: list[Any] = [tensor for tensor in call.args[0] if tensor.dim() > axis and tensor.shape[axis]]
    columns: list[Labels] = []
    zero = True
    joint = _joint(flow, tensors, axis)
    every = [_fields_of_part(flow, tensors, index, axis, joint) for index in range(len(tensors))]
    for tensor, fields in zip(tensors, every, strict=True):
        labels, is_zero = flow.vector(fields, axis, "concatenated along an axis that shares its channels with another")
        columns.append(np.zeros(tensor.shape[axis], dtype=np.int64) if labels is None else labels)
        zero = zero and (is_zero or labels is None)
    shape = [1] * call.out.dim()
    shape[axis] = -1
    joined = Field(np.concatenate(columns).reshape(shape), zero)
    one = [tuple(1 if a == axis else size for a, size in enumerate(tensor.shape)) for tensor in tensors]
    others = [[field for field in fields if axis not in field.span] for fields in every]
    flow.set(call.out, [*([joined] if joined.labels.any() else []), *joint.values(), *_common(flow, one, others)])


def _fields_of_part(
    flow: LabelFlow, tensors: Sequence[Any], index: int, axis: int, joint: Container[tuple[int, ...]]
) -> list[Field]:
    """Return the fields of one of the concatenated tensors, without those that all of them have jointly."""
    beside = [
        {axis for field in flow.fields(tensor) if not flow.has_any_size(field) for axis in field.span}
        for i, tensor in enumerate(tensors)
        if i != index
    ]
    fields = []
    for field in flow.fields(tensors[index]):
        if field.span not in joint:
            # tied along its other axes, so that it brings whole channels; along this one where every other tensor has
            # channels on those, as a class token has
            rest = set(field.span) - {axis}
            fields.append(flow.tied(field, [axis] if all(rest <= other for other in beside) else rest))
    return fields


def _joint(flow: LabelFlow, tensors: Sequence[Any], axis: int) -> dict[tuple[int, ...], Field]:
    """Return by span the concatenated fields that lie on an axis and on others in all of the tensors."""
    parts = [
        {field.span: field for field in flow.fields(t) if axis in field.span and len(field.span) > 1} for t in tensors
    ]
    result = {}
    for span in parts[0] if parts else ():
        if all(span in own for own in parts):
            fields = [own[span] for own in parts]
            labels = np.concatenate([field.labels for field in fields], axis)
            flow.constraints.append(Rectangle(np.moveaxis(labels, axis, -1).reshape(-1, labels.shape[axis])))
            result[span] = Field(labels, all(field.zero for field in fields))
    return result


def _common(flow: LabelFlow, shapes: list[tuple[int, ...]], others: list[list[Field]]) -> list[Field]:
    if not any(others):
        return []
    return flow.pointwise(list(zip(shapes, others, strict=True)), product=False)


@register_rule("aten.unfold")
def windows(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock the axis along which windows slide, or tie along it, and pass the others."""
    axis = call.args[1] % call.args[0].dim()
    fields = flow.tied_along([axis], flow.fields(call.args[0]), "windows slide over these channels")
    flow.set(call.out, [field.with_labels(field.labels[..., None]) for field in fields])


@register_rule("aten.index_select", "aten.index", "aten._unsafe_index", "aten.as_strided")
def pick(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock axes whose positions are picked by number, unless it is by an index that is always the same."""
    if _in_stored_order(flow, call):
        return
    if call.name == "aten.index_select":
        flow.lock(flow.fields(call.args[2]), DECIDES)
        axis = call.args[1] % call.args[0].dim()
        replay(flow, call, [axis], _why(flow, call.args[2], call.args[0].shape[axis]))
        return
    picked = None if call.name == "aten.as_strided" else _picked(flow, call)
    if picked is None:
        flow.lock(flow.fields(call.args[0]), f"{call.name} picks positions by number")
    else:  # the axes of the indices are in place of those that are picked from
        flow.set(call.out, [field.with_labels(picked.forth(field.labels)) for field in picked.fields])


def _in_stored_order(flow: LabelFlow, call: OperatorCall) -> bool:
    """Put labels in the order of an index that does not depend on the input; return False if that cannot be stated."""
    source, here = call.args[0], flow.expression
    axis, index = _one_index(call)
    on_axis = [field for field in flow.fields(source) if axis in field.span]
    if here is None or index is None or flow.of_input(index, 0) or [field.span for field in on_axis] != [(axis,)]:
        return False
    numbers, place, labels = numbers_in(index), here.picked(axis), on_axis[0].labels.reshape(-1)
    if numbers is None or place is None or axis == 0 or len(numbers) < 2 or not flow.union.find(labels).any():
        return False
    order = numbers.cpu().numpy().astype(np.int64) % labels.size
    flow.state(labels, place, order, _why(flow, index, labels.size))
    others = [field for field in flow.fields(source) if field is not on_axis[0]]
    flow.set(call.out, [*others, Field(along(labels[order], axis, source.dim()), on_axis[0].zero)])
    return True


def _one_index(call: OperatorCall) -> tuple[int, torch.Tensor | None]:
    """Return the axis of which a vector of integers picks positions, and the vector; None if it is anything else."""
    given = call.args[1] if call.name in ("aten.index", "aten._unsafe_index") else ()
    if call.name == "aten.index_select":
        given = [*[None] * (call.args[1] % call.args[0].dim()), call.args[2]]
    found = [(axis, index) for axis, index in enumerate(given) if index is not None]
    vectors = [(axis, index) for axis, index in found if index.dim() == 1 and index.dtype not in _MASKS]
    return vectors[0] if len(found) == len(vectors) == 1 else (0, None)


def _why(flow: LabelFlow, index: torch.Tensor, size: int) -> str:
    """Return the reason of the lock on an axis of a size that an index picks from."""
    if flow.model is None or index.dim() != 1 or len(index) != size:
        return PICKED
    return STORED_ORDER if any(tensor is index for _, tensor in named_tensors(flow.model)) else PICKED


@dataclass(frozen=True)
class _Picked:
    """Axes that integers pick from, and the `fresh` axes of the integers that come from position `first` instead."""

    axes: tuple[int, ...]
    first: int
    fresh: int
    fields: list[Field]  # of the source, the same at all positions of `axes`

    def forth(self, labels: Labels) -> Labels:
        """Return labels of the source, the same at all positions of `axes`, as labels of the result."""
        rest = np.squeeze(labels, self.axes)
        return rest.reshape(*rest.shape[: self.first], *[1] * self.fresh, *rest.shape[self.first :])

    def back(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape of the result as one of the source, with 1 on all of `axes`."""
        rest = [*shape[: self.first], *shape[self.first + self.fresh :]]
        for axis in self.axes:
            rest.insert(axis, 1)
        return tuple(rest)


_MASKS = (torch.bool, torch.uint8)
"""Types of indices that pick from as many axes as they have, and leave one."""


def _picked(flow: LabelFlow, call: OperatorCall) -> _Picked | None:
    """Return how an operator picks positions of its first argument, and lock the labels there and of the indices."""
    source = call.args[0]
    taken: list[int] = []
    indices: list[torch.Tensor] = []
    axis = 0
    for index in call.args[1]:
        width = index.dim() if index is not None and index.dtype in _MASKS else 1
        if index is not None:
            indices.append(index)
            taken += range(axis, axis + width)
        axis += width
    if not taken:
        return None
    axes = tuple(taken)
    first = axes[0] if axes == tuple(range(axes[0], axes[-1] + 1)) else 0  # apart from each other they go to the front
    fields = flow.tied_along(axes, flow.fields(source), _why(flow, indices[0], source.shape[axes[0]]))
    flow.lock([field for index in indices for field in flow.fields(index)], DECIDES)
    return _Picked(axes, first, max(1 if index.dtype in _MASKS else index.dim() for index in indices), fields)


@register_rule("aten.index_put", "aten.index_put_", "aten._index_put_impl_")
def put(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge values with the tensor that they are written to, on axes that no integers or masks pick from."""
    target, values = call.args[0], call.args[2]
    picked = _picked(flow, call)
    if picked is None:
        flow.lock([*flow.fields(target), *flow.fields(values)], f"{call.name} picks positions by number")
        return
    shape, fields = aligned(flow, values, target.dim() - len(picked.axes) + picked.fresh)
    fresh = range(picked.first, picked.first + picked.fresh)
    written = [
        field.with_labels(field.labels.reshape(picked.back(field.labels.shape)))
        for field in flow.tied_along(fresh, fields, PICKED)
    ]
    known = picked.fields
    apart = not {axis for field in known for axis in field.span} & {axis for field in written for axis in field.span}
    if known and not (apart and all(flow.is_made(field) for field in known)):
        flow.set(call.out, flow.pointwise([(tuple(target.shape), known), (picked.back(shape), written)], product=False))
    else:
        flow.set(call.out, [*known, *(Field(field.labels, zero=False) for field in written)])


@register_rule("aten.embedding", "aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock the rows of a table that is looked up; its columns are the last axis of the output."""
    table = call.args[0]
    flow.fix(flow.on_axis(table, 0, "channels that are spread over both rows and columns of a table")[0])
    columns, zero = flow.on_axis(table, 1, "channels that are spread over both rows and columns of a table")
    given = [field for argument in call.args[1:] for field in flow.fields(argument)]
    flow.lock(given, "decides which rows of a table are taken, or how often")
    for out in call.outs:
        if columns is not None and out.shape == call.outs[0].shape:  # of a bag also where its maxima were
            flow.set(out, [Field(along(columns, out.dim() - 1, out.dim()), zero)])


@register_rule("aten.bucketize", "aten.take")
def looked_up(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass the labels of values whose places among bounds are found, or of integers that pick from a tensor."""
    first, second = (flow.fields(argument) for argument in call.args[:2])
    bounds = call.name == "aten.bucketize"
    flow.lock(second if bounds else first, "bounds between which values are placed" if bounds else PICKED)
    flow.set(call.out, [Field(field.labels, zero=False) for field in (first if bounds else second)])


_FEW = frozenset(aten("topk kthvalue"))
"""Operators that are also given a number, in front of `dim`."""
_VALUES = _FEW | frozenset(aten("sort mode median nanmedian cummax cummin cumprod"))
"""Operators whose first result holds some of the values, or products of them: zero where all values are."""


@register_rule(*_VALUES, *aten("argsort logcumsumexp"))
def ordered(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock the axis whose positions are compared with each other, or tie along it, and pass the others."""
    source, outs = call.args[0], call.outs
    axis = call.arg(2 if call.name in _FEW else 1, "dim", -1) % max(source.dim(), 1)
    whole = outs[0].dim() < source.dim() - 1  # the median of a whole tensor
    axes = range(source.dim()) if whole else [axis]
    rest = flow.tied_along(axes, flow.fields(source), f"{call.name} compares these channels with each other")
    for index, out in enumerate(outs):
        dropped = (axis,) if out.dim() < source.dim() else ()
        stays = index == 0 and call.name in _VALUES
        flow.set(out, [Field(np.squeeze(field.labels, dropped), field.zero and stays) for field in rest])


DECIDES = "decides what is picked from a tensor"


@register_rule(*aten("index_add index_copy index_reduce", IN_PLACE))
def write_rows(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge a tensor with what is written into its rows; the axis that the integers pick from is locked."""
    target, axis, index, source = call.args[:4]
    axis %= max(target.dim(), 1)
    flow.lock(flow.fields(index), DECIDES)
    writers = [_beside(flow, tensor, axis) for tensor in (target, source)]
    flow.set(call.out, _merged(flow, writers, writers))


@register_rule(*aten("scatter scatter_add scatter_reduce", IN_PLACE))
def scatter(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge a tensor with what is scattered into it, and with an index that differs from channel to channel."""
    target, axis, index = call.args[:3]
    axis %= max(target.dim(), 1)
    source = call.arg(3, "src", call.kwargs.get("value"))
    tensors = [one for one in (target, source) if isinstance(one, torch.Tensor)]
    _lock_cut(flow, tensors, index, axis)
    writers = [_beside(flow, tensor, axis) for tensor in tensors]
    nonzero = len(tensors) == 1 and source != 0
    fields = _merged(flow, [*writers, _of_index(index, _beside(flow, index, axis))], writers)
    flow.set(call.out, [Field(field.labels, field.zero and not nonzero) for field in fields])


@register_rule("aten.gather")
def gather(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass what lies on other axes than the one that is picked from; the index has its own labels along that."""
    source, axis, index = call.args[:3]
    axis %= max(source.dim(), 1)
    _lock_cut(flow, [source], index, axis)
    read = _of_index(source, _beside(flow, source, axis))
    own = _of_index(index, (tuple(index.shape), list(flow.fields(index))))
    flow.set(call.out, _merged(flow, [read, own], [read]))


@register_rule(*aten("index_fill", IN_PLACE))
def fill_rows(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock the axis whose positions are filled; only a fill with 0 leaves zeros."""
    value = call.args[3]
    flow.lock(flow.fields(call.args[2]), DECIDES)
    axis = call.args[1] % max(call.args[0].dim(), 1)
    replay(flow, call, [axis], PICKED, zero=is_zero(value))


@register_rule(*aten("masked_scatter", IN_PLACE))
def scatter_masked(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge the last axis of a tensor and of the values that fill its masked rows, if the mask takes whole rows."""
    target, mask, source = call.args[:3]
    rows = bool(mask.dim() and source.dim()) and source.shape[-1] == target.shape[-1]
    rows = rows and (mask.shape[-1] == 1 or _constant(mask, mask.dim() - 1))
    last = {id(one): [f for f in flow.fields(one) if rows and f.span == (one.dim() - 1,)] for one in (target, source)}
    flow.lock([f for one in (target, source) for f in flow.fields(one) if f not in last[id(one)]], PICKED)
    flow.lock(flow.fields(mask), DECIDES)
    writers = [
        ((one.shape[-1],) * bool(rows), [Field(f.labels.reshape(-1), f.zero) for f in last[id(one)]])
        for one in (target, source)
    ]
    lead = (1,) * (target.dim() - 1)
    fields = _merged(flow, writers, writers)
    flow.set(call.out, [field.with_labels(field.labels.reshape(*lead, -1)) for field in fields])


@register_rule("aten.segment_reduce")
def reduce_segments(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass what lies on other axes than the one whose segments are reduced; an empty segment has the initial value."""
    source = call.args[0]
    axis = call.arg(5, "axis", 0) % source.dim()
    flow.lock([field for one in gather_tensors((call.args[1:], call.kwargs)) for field in flow.fields(one)], DECIDES)
    initial = call.arg(7, "initial")
    zero = initial == 0 if initial is not None else call.args[1] == "sum"
    rest = flow.tied_along([axis], flow.fields(source), f"{call.name} over these channels")
    flow.set(call.out, [Field(field.labels, field.zero and zero) for field in rest])


def _beside(flow: LabelFlow, tensor: torch.Tensor, axis: int) -> Operand:
    """Return a tensor's shape and fields without an axis that integers pick from: what lies there is locked or tied."""
    shape = tuple(1 if a == axis else size for a, size in enumerate(tensor.shape))
    return shape, flow.tied_along([axis], flow.fields(tensor), PICKED)


def _of_index(index: torch.Tensor, operand: Operand) -> Operand:
    """Return the operand of an index with size 1 for axes along which all its values are the same."""
    shape, fields = operand
    labeled = {axis for field in fields for axis in field.span}
    sizes = [  # expanded as often as there are channels, it follows the number that is kept
        1 if axis not in labeled and size > 1 and _constant(index, axis) else size for axis, size in enumerate(shape)
    ]
    return tuple(sizes), fields


def _constant(index: torch.Tensor, axis: int) -> bool:
    if index.stride(axis) == 0 or index.is_meta:
        return index.stride(axis) == 0
    return not has_gradients(index) and bool((index == index.narrow(axis, 0, 1)).all())


def _lock_cut(flow: LabelFlow, tensors: Sequence[torch.Tensor], index: torch.Tensor, axis: int) -> None:
    """Lock axes of which an index reaches only the first positions."""
    for tensor in tensors:
        cut = {a for a in range(tensor.dim()) if a != axis and index.shape[a] != tensor.shape[a]}
        flow.lock([field for field in flow.fields(tensor) if cut & set(field.span)], BY_POSITION)


def _merged(flow: LabelFlow, operands: Sequence[Operand], writers: Sequence[Operand]) -> list[Field]:
    """Return merged fields, which are zero where all that is written is: sums, means and extrema of zeros are zero."""
    zeros = [zero_spans(fields) for _, fields in writers]
    fields = flow.pointwise(operands, product=False)
    return [Field(field.labels, all(field.span in spans for spans in zeros)) for field in fields]

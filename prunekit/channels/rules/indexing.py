"""Rules of operators that take an axis apart, put parts together, look up positions, or sort them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prunekit.channels.constraints import EqualParts, Rectangle
from prunekit.channels.labels import Field, Labels, along
from prunekit.channels.rules.pointwise import aligned
from prunekit.channels.rules.rule import OperatorCall, register_rule
from prunekit.channels.rules.scattering import DECIDES
from prunekit.channels.rules.shape import PICKED, part, replay
from prunekit.channels.tracing.label_flow import LabelFlow


def _without(flow: LabelFlow, fields: Sequence[Field], axis: int, reason: str) -> list[Field]:
    """Return fields without an axis, all of whose positions stay: fields on it alone are locked, others tied.

    Queries, keys and values on an axis of size 3 then lose the same heads.
    """
    return [field.with_labels(np.squeeze(field.labels, axis)) for field in flow.tied_along(axis, fields, reason)]


@register_rule("aten.select")
def select(flow: LabelFlow, call: OperatorCall) -> None:
    """Take one position of an axis, which is locked."""
    axis = call.args[1] % call.args[0].dim()
    flow.set(call.out, _without(flow, flow.fields(call.args[0]), axis, "one position of this axis is picked by number"))


@register_rule(
    "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind", "aten.unsafe_split", "aten.unsafe_chunk"
)
def split(flow: LabelFlow, call: OperatorCall) -> None:
    """Split labels, equal parts of which must stay equal; the trial tells whether sizes of unequal parts can be set."""
    source = call.args[0]
    position = 1 if call.name == "aten.unbind" else 2
    axis = call.arg(position, "dim", 0) % source.dim()
    outs = list(call.out)
    fields = flow.fields(source)
    if call.name == "aten.unbind":
        rest = _without(flow, fields, axis, "unbound into single positions")
        for out in outs:
            flow.set(out, rest)
        return
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


@register_rule("aten.cat", "aten.stack")
def concatenate(flow: LabelFlow, call: OperatorCall) -> None:
    """Concatenate labels; a part without labels on that axis has locked positions."""
    tensors: list[Any] = [tensor for tensor in call.args[0] if tensor.dim() > 1 or tensor.numel()]
    axis = call.arg(1, "dim", 0) % call.out.dim()
    if call.name == "aten.stack":
        fields = _common(flow, [tuple(t.shape) for t in call.args[0]], [list(flow.fields(t)) for t in call.args[0]])
        flow.set(call.out, [field.with_labels(np.expand_dims(field.labels, axis)) for field in fields])
        return
    columns: list[Labels] = []
    zero = True
    joint = _joint(flow, tensors, axis)
    for tensor in tensors:
        reason = "concatenated along an axis that shares its channels with another"
        labels, is_zero = flow.on_axis(tensor, axis, reason, except_spans=joint)
        columns.append(np.zeros(tensor.shape[axis], dtype=np.int64) if labels is None else labels)
        zero = zero and (is_zero or labels is None)
    shape = [1] * call.out.dim()
    shape[axis] = -1
    joined = Field(np.concatenate(columns).reshape(shape), zero)
    one = [tuple(1 if a == axis else size for a, size in enumerate(tensor.shape)) for tensor in tensors]
    others = [[field for field in flow.fields(tensor) if axis not in field.span] for tensor in tensors]
    flow.set(call.out, [*([joined] if joined.labels.any() else []), *joint.values(), *_common(flow, one, others)])


def _joint(flow: LabelFlow, tensors: Sequence[Any], axis: int) -> dict[tuple[int, ...], Field]:
    """Return by span the concatenated fields that lie on an axis and on others in all of the tensors."""
    parts = [
        {field.span: field for field in flow.fields(t) if axis in field.span and len(field.span) > 1} for t in tensors
    ]
    result = {}
    for span in parts[0] if parts else ():
        if all(span in fields for fields in parts):
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
    """Lock the axis along which windows slide, and pass the others."""
    axis, fields = call.args[1] % call.args[0].dim(), flow.fields(call.args[0])
    flow.lock([field for field in fields if axis in field.span], "windows slide over these channels")
    flow.set(call.out, [f.with_labels(f.labels[..., None]) for f in fields if axis not in f.span])


@register_rule("aten.index_select", "aten.index", "aten.as_strided")
def pick(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock axes whose positions are picked by number."""
    if call.name == "aten.index_select":
        flow.lock(flow.fields(call.args[2]), DECIDES)
        axis = call.args[1] % call.args[0].dim()
        replay(flow, call, [axis], PICKED)
        return
    if call.name == "aten.index" and _index_rows(flow, call):
        return
    flow.lock(flow.fields(call.args[0]), f"{call.name} picks positions by number")


def _index_rows(flow: LabelFlow, call: OperatorCall) -> bool:
    """Replace the axes that are picked from by those of the indices; return False if the labels cannot follow."""
    picked = _picked(flow, call)
    if picked is None:
        return False
    fields = [field for field in flow.fields(call.args[0]) if not set(picked.axes) & set(field.span)]
    flow.set(call.out, [field.with_labels(picked.forth(field.labels)) for field in fields])
    return True


@dataclass(frozen=True)
class _Picked:
    """Axes that integers pick from, and the `fresh` axes of the integers that come from position `first` instead."""

    axes: tuple[int, ...]
    first: int
    fresh: int

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


def _picked(flow: LabelFlow, call: OperatorCall) -> _Picked | None:
    """Return how an operator picks positions of its first argument, and lock the labels there and of the indices."""
    source, given = call.args[0], call.args[1]
    indices = {axis: index for axis, index in enumerate(given) if index is not None}
    if any(index.dtype == torch.bool and index.dim() != 1 for index in indices.values()):
        return None
    axes = tuple(sorted(indices))
    first = axes[0] if axes == tuple(range(axes[0], axes[-1] + 1)) else 0  # apart from each other they go to the front
    flow.lock([field for field in flow.fields(source) if set(axes) & set(field.span)], PICKED)
    flow.lock([field for index in indices.values() for field in flow.fields(index)], DECIDES)
    return _Picked(axes, first, max(index.dim() for index in indices.values()))


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
    flow.lock([field for field in fields if set(fresh) & set(field.span)], PICKED)
    written = [
        field.with_labels(field.labels.reshape(picked.back(field.labels.shape)))
        for field in fields
        if not set(fresh) & set(field.span)
    ]
    known = [field for field in flow.fields(target) if not set(picked.axes) & set(field.span)]
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
    flow.lock(
        [f for a in call.args[1:] for f in flow.fields(a)], "decides which rows of a table are taken, or how often"
    )
    outs = call.outs
    for out in outs:
        if columns is not None and out.shape == outs[0].shape:  # of a bag also where its maxima were
            flow.set(out, [Field(along(columns, out.dim() - 1, out.dim()), zero)])


_ORDERED = {
    **dict.fromkeys(("aten.sort", "aten.argsort", "aten.mode", "aten.median", "aten.nanmedian"), 1),
    **dict.fromkeys(("aten.cummax", "aten.cummin", "aten.cumprod", "aten.logcumsumexp"), 1),
    **dict.fromkeys(("aten.topk", "aten.kthvalue"), 2),
}
"""Operator -> the position of its argument `dim`, which is -1 by default."""


@register_rule(*_ORDERED)
def ordered(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock the axis whose positions are compared with each other, and pass the others."""
    source, outs = call.args[0], call.outs
    axis = call.arg(_ORDERED[call.name], "dim", -1) % max(source.dim(), 1)
    whole = outs[0].dim() < source.dim() - 1  # the median of a whole tensor
    fields = flow.fields(source)
    mixed = [field for field in fields if whole or axis in field.span]
    flow.lock(mixed, f"{call.name} compares these channels with each other")
    rest = [field for field in fields if field not in mixed]
    for out in outs:
        dropped = (axis,) if out.dim() < source.dim() else ()
        flow.set(out, [Field(np.squeeze(field.labels, dropped), zero=False) for field in rest])

"""Rules of operators that gather rows of a tensor by integers, or write, add and reduce rows into another tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prunekit.channels.labels import Field
from prunekit.channels.rules.pointwise import IN_PLACE
from prunekit.channels.rules.rule import OperatorCall, aten, register_rule
from prunekit.channels.rules.shape import BY_POSITION, PICKED, replay
from prunekit.channels.tracing.label_flow import LabelFlow, Operand

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
    fields = _merged(flow, [*writers, _of_index(flow, index, _beside(flow, index, axis))], writers)
    flow.set(call.out, [Field(field.labels, field.zero and not nonzero) for field in fields])


@register_rule("aten.gather")
def gather(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass what lies on other axes than the one that is picked from; the index has its own labels along that."""
    source, axis, index = call.args[:3]
    axis %= max(source.dim(), 1)
    _lock_cut(flow, [source], index, axis)
    read = _beside(flow, source, axis)
    own = _of_index(flow, index, (tuple(index.shape), list(flow.fields(index))))
    flow.set(call.out, _merged(flow, [read, own], [read]))


@register_rule(*aten("index_fill", IN_PLACE))
def fill_rows(flow: LabelFlow, call: OperatorCall) -> None:
    """Lock the axis whose positions are filled; only a fill with 0 leaves zeros."""
    value = call.args[3]
    flow.lock(flow.fields(call.args[2]), DECIDES)
    axis = call.args[1] % max(call.args[0].dim(), 1)
    replay(flow, call, [axis], PICKED, zero=not isinstance(value, torch.Tensor) and value == 0)


def _beside(flow: LabelFlow, tensor: torch.Tensor, axis: int) -> Operand:
    """Return a tensor's shape and fields without an axis that integers pick from: what lies there is locked or tied."""
    shape = tuple(1 if a == axis else size for a, size in enumerate(tensor.shape))
    return shape, flow.tied_along(axis, flow.fields(tensor), PICKED)


def _of_index(flow: LabelFlow, index: torch.Tensor, operand: Operand) -> Operand:
    """Return the operand of an index with size 1 for axes along which all its values are the same.

    One that was expanded, or repeated as often as there are channels, follows the number that is kept.
    """
    shape, fields = operand
    labeled = {axis for field in fields for axis in field.span}
    sizes = [
        1 if axis not in labeled and size > 1 and _constant(index, axis) else size for axis, size in enumerate(shape)
    ]
    return tuple(sizes), fields


def _constant(index: torch.Tensor, axis: int) -> bool:
    if index.stride(axis) == 0:
        return True
    return not index.is_meta and bool((index == index.narrow(axis, 0, 1)).all())


def _lock_cut(flow: LabelFlow, tensors: Sequence[torch.Tensor], index: torch.Tensor, axis: int) -> None:
    """Lock axes of which an index reaches only the first positions."""
    for tensor in tensors:
        cut = {a for a in range(tensor.dim()) if a != axis and index.shape[a] != tensor.shape[a]}
        flow.lock([field for field in flow.fields(tensor) if cut & set(field.span)], BY_POSITION)


def _merged(flow: LabelFlow, operands: Sequence[Operand], writers: Sequence[Operand]) -> list[Field]:
    """Return merged fields, which are zero where all that is written is: sums, means and extrema of zeros are zero."""
    zeros = [{field.span for field in fields if field.zero} for _, fields in writers]
    fields = flow.pointwise(operands, product=False)
    return [Field(field.labels, all(field.span in spans for spans in zeros)) for field in fields]

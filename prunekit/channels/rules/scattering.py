"""Rules of operators that gather rows of a tensor by integers, or write, add and reduce rows into another tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prunekit.channels.labels import Field
from prunekit.channels.labels.label_flow import LabelFlow, Operand
from prunekit.channels.rules.pointwise import IN_PLACE, is_zero
from prunekit.channels.rules.rule import OperatorCall, aten, register_rule
from prunekit.channels.rules.shape import BY_POSITION, PICKED, replay
from prunekit.hooks.model_copy import has_gradients
from prunekit.utils.tensors import gather as gather_tensors

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


@register_rule("aten.take")
def take(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass the labels of the integers, whose shape the result has; the positions that they pick from are locked."""
    source, index = call.args
    flow.lock(flow.fields(source), PICKED)
    flow.set(call.out, [Field(field.labels, zero=False) for field in flow.fields(index)])


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
    """Return the operand of an index with size 1 for axes along which all its values are the same.

    One that was expanded as often as there are channels follows the number that is kept.
    """
    shape, fields = operand
    labeled = {axis for field in fields for axis in field.span}
    sizes = [
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
    zeros = [{field.span for field in fields if field.zero} for _, fields in writers]
    fields = flow.pointwise(operands, product=False)
    return [Field(field.labels, all(field.span in spans for spans in zeros)) for field in fields]

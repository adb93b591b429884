"""Rules of norms: over each channel by itself, or over several together."""

from collections.abc import Sequence

import numpy as np
import torch

from prunekit.channels.labels.constraints import Normalized
from prunekit.channels.labels.label_flow import Field, LabelFlow, Shape, along, rows_along
from prunekit.channels.rules.rule import OperatorCall, Trait, aten, register_rule
from prunekit.hooks.model_copy import named_tensors

Tensor = torch.Tensor | None

_BATCH_NORMS = aten("native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training")
Trait.AFFINE.declare(*_BATCH_NORMS, *aten("native_layer_norm native_group_norm"))
Trait.LAST_AXIS.declare("aten.native_layer_norm")
TOGETHER = "a norm takes its statistics over these channels together"


@register_rule(*_BATCH_NORMS, *aten("_batch_norm_with_update _batch_norm_no_update batch_norm"))
def batch_norm(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge the parameters and statistics of each channel with the labels of the input."""
    source = call.args[0]
    tensors = [argument if isinstance(argument, torch.Tensor) else None for argument in call.args[1:5]]
    # Without running statistics they are taken over the other axes.
    over = set(range(source.dim())) - {1} if len(tensors) < 3 or tensors[2] is None else set()
    flow.set(source, [flow.tied(field, over) for field in flow.fields(source)])
    fields = _each_channel(flow, call, *tensors)
    _take_statistics(flow, fields, over)
    for vector in call.outs[1:]:
        if tuple(vector.shape) == (source.shape[1],):
            flow.set(vector, [Field(f.labels.reshape(-1), zero=False) for f in fields if f.span == (1,)])


def _each_channel(
    flow: LabelFlow, call: OperatorCall, weight: Tensor, bias: Tensor, mean: Tensor = None, variance: Tensor = None
) -> list[Field]:
    """Merge the tensors of each channel; it stays exactly zero if neither the statistics nor the affine move it."""
    source = call.args[0]
    vectors = [_lifted(flow, v, 1, source.dim()) for v in (weight, bias, mean, variance) if v is not None]
    fields = flow.pointwise([_lifted(flow, source, 0, source.dim()), *vectors], product=False)
    centered = _is_zero(flow, source) and (mean is None or _is_zero(flow, mean))
    masked = (centered or _is_zero(flow, weight)) and (bias is None or _is_zero(flow, bias))
    flow.set(call.outs[0], [Field(field.labels, masked and field.span == (1,)) for field in fields])
    return fields


def _is_zero(flow: LabelFlow, tensor: Tensor) -> bool:
    return any(field.zero for field in flow.fields(tensor))


@register_rule("aten.native_layer_norm", "aten._fused_rms_norm", "aten.rms_norm")
def layer_norm(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass the labels of the last axes, over which it normalizes together, if the running module is a norm."""
    source, shape, *affine = call.args[:4]
    vectors = [argument for argument in affine if isinstance(argument, torch.Tensor)]
    lead = source.dim() - len(shape)
    together = set(range(lead, source.dim()))
    fields = [part for field in flow.fields(source) for part in _parts(flow, field, together)]
    operands = [(tuple(source.shape), fields), *(_lifted(flow, v, lead, source.dim()) for v in vectors)]
    if not vectors and len(shape) > 1:
        flow.lock([f for f in fields if set(f.span) & together], f"{TOGETHER}, and with other axes")
    _normalized(flow, call, operands, together)
    for statistic in call.outs[1:]:  # one for each row
        rows = [field for field in fields if not set(field.span) & together]
        flow.set(statistic, [Field(field.labels, zero=False) for field in rows])


def _parts(flow: LabelFlow, field: Field, together: set[int]) -> list[Field]:
    """Return what a norm over some axes reads of a field: its rows and the positions in them, or the field, tied."""
    if field not in flow.parted:
        inside = [axis for axis in field.span if axis in together]
        alone = len(inside) != 1 or len(field.span) == 1
        flow.parted[field] = [flow.tied(field, together)] if alone else _rows_and_positions(flow, field, inside[0])
    return flow.parted[field]


def _rows_and_positions(flow: LabelFlow, field: Field, axis: int) -> list[Field]:
    """Return the rows of a field, and the positions in them along an axis, with labels of their own."""
    size, rest = field.labels.shape[axis], np.take(field.labels, [0], axis=axis)
    values, index = np.unique(rest, return_inverse=True)
    positions = flow.union.new(size)
    rows = flow.union.new(values.size)[index].reshape(rest.shape)
    flow.constraints.append(Normalized(rows_along(field.labels, axis), rows.reshape(-1), positions))
    return [Field(rows, field.zero), Field(along(positions, axis, field.labels.ndim), field.zero)]


@register_rule("aten.native_group_norm")
def group_norm(flow: LabelFlow, call: OperatorCall) -> None:
    """Tie the same positions of all groups, so that the number of groups stays."""
    source, weight, bias = call.args[:3]
    groups = int(call.args[6])
    spatial = range(2, source.dim())
    flow.set(source, flow.tied_along(spatial, flow.fields(source), "a norm averages over these channels"))
    if groups == source.shape[1]:
        fields = [field for field in _each_channel(flow, call, weight, bias) if field.span == (1,)]
        for statistic in call.out[1:]:  # (N, groups)
            flow.set(statistic, [Field(field.labels.reshape(1, -1), zero=False) for field in fields])
        return
    x, _ = flow.on_axis(source, 1, "channels that are spread over the batch as well")
    if x is not None:
        flow.union.tie(x.reshape(groups, -1), [0])
    vectors = [_lifted(flow, vector, 1, source.dim()) for vector in (weight, bias) if vector is not None]
    _normalized(flow, call, [_lifted(flow, source, 0, source.dim()), *vectors], {1})


def _lifted(flow: LabelFlow, tensor: torch.Tensor, lead: int, ndim: int) -> tuple[Shape, list[Field]]:
    """Return the shape and fields of a tensor as if it had `lead` axes before its own and `ndim` in all."""

    def shaped(shape: Sequence[int]) -> tuple[int, ...]:
        return (1,) * lead + tuple(shape) + (1,) * (ndim - lead - len(shape))

    return shaped(tensor.shape), [f.with_labels(f.labels.reshape(shaped(f.labels.shape))) for f in flow.fields(tensor)]


def _normalized(
    flow: LabelFlow, call: OperatorCall, operands: list[tuple[Shape, list[Field]]], together: set[int]
) -> None:
    fields = flow.pointwise(operands, product=False)
    _take_statistics(flow, fields, together)
    flow.set(call.outs[0], [Field(field.labels, zero=False) for field in fields])


def _take_statistics(flow: LabelFlow, fields: Sequence[Field], together: set[int]) -> None:
    for field in fields:
        if set(field.span) <= together:
            flow.take_statistics(field, TOGETHER)
        elif set(field.span) & together:
            flow.lock([field], TOGETHER)


@register_rule("aten.embedding_renorm_")
def limited_rows(flow: LabelFlow, call: OperatorCall) -> None:
    """Scale rows of a table that are longer than a limit, to which columns of zeros add nothing."""
    table, looked_up = call.args[:2]
    flow.fix(flow.on_axis(table, 0, "channels that are spread over both rows and columns of a table")[0])
    flow.lock(flow.fields(looked_up), "decides which rows of a table are scaled")
    flow.lock([field for field in flow.fields(table) if not field.zero], TOGETHER)


@register_rule("aten.renorm", "aten.renorm_")
def limited_slices(flow: LabelFlow, call: OperatorCall) -> None:
    """Scale slices of an axis that are longer than a limit, to which zeros on other axes add nothing."""
    source, axis = call.args[0], call.args[2] % call.args[0].dim()
    across = [field for field in flow.fields(source) if field.span != (axis,) and not field.zero]
    flow.lock(across, TOGETHER)
    flow.set(call.out, [field for field in flow.fields(source) if field not in across])


DIVIDED = (
    "weight normalization divides by the norm of what computes it here: take it out before pruning, by "
    "torch.nn.utils.remove_weight_norm(module) or torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
)


@register_rule("aten._weight_norm_interface")
def weight_norm(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge the rows of a weight with their lengths; removed rows have length 0, and keep a norm to be divided by.

    Fields on other axes pass if removed entries are exact zeros, which do not change the norms.
    """
    rows, lengths, axis = call.args[0], call.args[1], call.arg(2, "dim", 0) % call.args[0].dim()
    (scaled, norms), others = call.out, [field for field in flow.fields(rows) if axis not in field.span]
    flow.lock([field for field in others if not field.zero], DIVIDED)
    on_rows, _ = flow.on_axis(rows, axis, DIVIDED)
    on_lengths, zero = flow.on_axis(lengths, axis, DIVIDED)
    own = any(tensor is rows for _, tensor in named_tensors(flow.model)) if flow.model is not None else False
    if not (own and zero):  # a computed weight has zeros where a row is removed
        flow.lock([on_rows, on_lengths], DIVIDED)
        on_rows = on_lengths = None
    labels = flow.join(on_rows, on_lengths, DIVIDED)
    fields = [field for field in others if field.zero]
    if labels is not None and on_rows is not None:
        flow.divided.append(on_rows)
        flow.set(norms, [Field(along(labels, axis, norms.dim()), zero=False)])
        fields.append(Field(along(labels, axis, scaled.dim()), zero=True))
    flow.set(scaled, fields)

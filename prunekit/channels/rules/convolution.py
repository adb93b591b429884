"""The rule of convolutions: plain, grouped, depthwise and transposed."""

from __future__ import annotations

import numpy as np
from torch.nn.modules.conv import _ConvNd

from prunekit.channels.constraints import NOT_ZERO, Grouped
from prunekit.channels.labels import Field, Labels, along
from prunekit.channels.rules.rule import OperatorCall, register_rule
from prunekit.channels.tracing.label_flow import LabelFlow

FIXED_PARTNER = "reads channels whose number no parameter decides, such as those of the input"


def whole_groups(groups: int, channels_per_group: int) -> bool:
    """Return whether a grouped convolution loses whole groups (ResNeXt, depthwise), or columns of each (RegNet)."""
    return groups >= channels_per_group


@register_rule("aten.convolution", "aten._convolution", "aten.convolution_overrideable")
def convolution(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge input channels with the weight, and give its output channels to the result, in any number of dimensions."""
    source, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    transposed, groups = bool(call.arg(6, "transposed", False)), int(call.arg(8, "groups", 1))
    untouched = {axis for axis in range(2, source.dim()) if _leaves_alone(call, axis - 2)}
    slid = [axis for axis in range(2, source.dim()) if axis not in untouched]
    fields = flow.tied_along(slid, flow.fields(source), "a convolution slides over these channels")
    fields = [flow.tied(flow.tied(field, untouched), [1] if 0 in field.span else []) for field in fields]
    passing = [field for field in fields if set(field.span) <= untouched]
    rows = [field for field in fields if field.span == (0,)]  # such as heads merged with the batch
    for axis in range(2, weight.dim()):
        flow.fix(flow.on_axis(weight, axis, "channels that are spread over a kernel's positions")[0])
    x, x_zero = flow.vector(fields, 1, "a convolution slides over these channels")
    first, first_zero = flow.on_axis(weight, 0, "channels that are spread over several axes of a kernel")
    second, second_zero = flow.on_axis(weight, 1, "channels that are spread over several axes of a kernel")
    positions = (source if transposed else call.out).shape[2:].numel()
    kernel = weight.shape[2:].numel()
    factors = [rows[0].labels.reshape(-1) if rows else None, first, second]
    sizes = [size for size, labels in zip((len(source), *weight.shape[:2]), factors, strict=True) if labels is None]
    others = [field.labels.reshape(-1) for field in passing]
    constant = positions * kernel * int(np.prod(sizes)) / float(np.prod([labels.size for labels in others]))
    flow.add_macs(constant, [*factors, *others])

    consumer, producer, zero = (first, second, first_zero) if transposed else (second, first, second_zero)
    by_groups = groups > 1 and whole_groups(groups, source.shape[1] // groups)
    if x is not None and not (x_zero or zero or by_groups):  # whole groups are summed over with nothing else
        flow.lock([x], NOT_ZERO)
    if groups == 1:
        flow.join(x, consumer, FIXED_PARTNER)
        out = producer
    elif by_groups:
        flow.fix(second)
        out = _by_whole_groups(flow, x, first, groups, call.out.shape[1], transposed=transposed)
    else:
        out = _by_columns(flow, x, first, second, groups, transposed=transposed)
    b, b_zero = flow.on_axis(bias, 0, "channels that are spread over several axes of a bias")
    if bias is not None:
        out = flow.join(out, b, FIXED_PARTNER)
    produced_zero = first_zero or x_zero if by_groups else second_zero if transposed else first_zero
    channels = [] if out is None else [along(out, 1, call.out.dim())]
    flow.set(call.out, [
        *(Field(field.labels, field.zero and bias is None) for field in (*rows, *passing)),
        *(Field(labels, produced_zero and (bias is None or b_zero)) for labels in channels),
    ])  # fmt: skip


def _leaves_alone(call: OperatorCall, index: int) -> bool:
    """Return whether a convolution leaves a spatial axis alone: kernel size 1, stride 1 and no padding."""
    stride, padding = call.args[3], call.args[4]
    step, added = (given[index if len(given) > 1 else 0] for given in (stride, padding))
    return bool(call.args[1].shape[2 + index] == 1 and step == 1 and added == 0)


def _by_whole_groups(
    flow: LabelFlow, x: Labels | None, first: Labels | None, groups: int, out_channels: int, *, transposed: bool
) -> Labels | None:
    """Couple the inputs, outputs and weights of each group, and return the labels of the output."""
    if x is None or first is None:
        flow.lock([x, first], FIXED_PARTNER)
        return None
    tied = flow.union.tie(x.reshape(groups, -1), [1])
    flow.union.merge(tied, first.reshape(groups, -1))
    return np.repeat(tied.reshape(-1), out_channels // groups) if transposed else first


def _by_columns(
    flow: LabelFlow, x: Labels | None, first: Labels | None, second: Labels | None, groups: int, *, transposed: bool
) -> Labels | None:
    """Couple the same columns of all groups, or leave it to a constraint, and return the labels of the output."""
    if x is not None and first is not None and second is not None and not transposed and _remembers_groups(flow):
        flow.constraints.append(Grouped(x.reshape(groups, -1), first.reshape(groups, -1), second, flow.module))
        return first
    columns = None if x is None else flow.union.tie(x.reshape(groups, -1), [0]).reshape(-1)
    if first is not None:
        rows = flow.union.tie(first.reshape(groups, -1), [0]).reshape(-1)
    if transposed:
        flow.join(columns, None if first is None else rows, FIXED_PARTNER)
        return None if second is None else np.tile(second, groups)
    flow.join(columns, second, FIXED_PARTNER)
    return first


def _remembers_groups(flow: LabelFlow) -> bool:
    """Return whether the running module is torch's, whose number of groups can be set."""
    return flow.model is not None and isinstance(flow.model.get_submodule(flow.module), _ConvNd)

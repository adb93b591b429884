"""The rules of convolutions: plain, grouped, depthwise, transposed, and deformable."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.modules.conv import _ConvNd

from prunekit.channels.labels.constraints import NOT_ZERO, Grouped
from prunekit.channels.labels.label_flow import Field, LabelFlow, along
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.compute import leaves_alone
from prunekit.channels.rules.rule import OperatorCall, Trait, register_rule

SLIDES = "a convolution slides over these channels"
FIXED_PARTNER = "reads channels whose number no parameter decides, such as those of the input"


def whole_groups(groups: int, channels_per_group: int) -> bool:
    """Return whether a grouped convolution loses whole groups (ResNeXt, depthwise), or columns of each (RegNet)."""
    return groups >= channels_per_group


@dataclass(frozen=True)
class _Channels:
    """Labels along the axes that channels lie on, and whether they are zero."""

    source: tuple[Labels | None, bool]  # of the channels that are read
    first: tuple[Labels | None, bool]  # of the weight: channels that are made, or read if it is transposed
    second: tuple[Labels | None, bool]  # of the weight: the others
    bias: tuple[Labels | None, bool] | None


Trait.COUNTED.declare("aten.convolution", "aten._convolution")
Trait.AFFINE.declare("aten.convolution", "aten._convolution")


@register_rule("aten.convolution", "aten._convolution", "aten.convolution_overrideable")
def convolution(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge input channels with the weight, and give its output channels to the result, in any number of dimensions."""
    source, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    transposed, groups = bool(call.arg(6, "transposed", False)), int(call.arg(8, "groups", 1))
    window = weight.shape[2:], call.args[3], call.args[4]
    untouched = {axis for axis in range(2, source.dim()) if leaves_alone(axis - 2, *window)}
    slid = [axis for axis in range(2, source.dim()) if axis not in untouched]
    fields = flow.tied_along(slid, flow.fields(source), SLIDES)
    fields = [flow.tied(flow.tied(field, untouched), [1] if 0 in field.span else []) for field in fields]
    passing = [field for field in fields if set(field.span) <= untouched]
    rows = [field for field in fields if field.span == (0,)]  # such as heads merged with the batch
    labels = _labels(flow, fields, weight, bias)
    positions = (source if transposed else call.out).shape[2:].numel()
    kernel = weight.shape[2:].numel()
    factors = [rows[0].labels.reshape(-1) if rows else None, labels.first[0], labels.second[0]]
    sizes = [size for size, known in zip((len(source), *weight.shape[:2]), factors, strict=True) if known is None]
    others = [field.labels.reshape(-1) for field in passing]
    constant = positions * kernel * int(np.prod(sizes)) / float(np.prod([labels.size for labels in others]))
    flow.add_macs(constant, [*factors, *others])
    flow.set(call.out, [
        *(Field(field.labels, field.zero and bias is None) for field in (*rows, *passing)),
        *_made(flow, call, labels, groups, transposed=transposed),
    ])  # fmt: skip


@register_rule("torchvision.deform_conv2d")
def deformable(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge channels as a convolution does; all that share the places where it reads keep as many channels."""
    source, weight, offset, mask, bias = call.args[:5]
    groups, offset_groups = call.args[11:13]
    flow.lock([*flow.fields(offset), *flow.fields(mask)], "says where a convolution reads")
    fields = flow.tied_along([0, 2, 3], flow.fields(source), SLIDES)
    labels = _labels(flow, fields, weight, bias)
    if labels.source[0] is not None:
        flow.union.tie(labels.source[0].reshape(offset_groups, -1), [0])
    flow.set(call.out, _made(flow, call, labels, groups, transposed=False))


def _labels(flow: LabelFlow, fields: list[Field], weight: torch.Tensor, bias: torch.Tensor | None) -> _Channels:
    """Return the labels that lie on channels, given the fields of what is read, and lock a kernel's positions."""
    for axis in range(2, weight.dim()):
        flow.fix(flow.on_axis(weight, axis, "channels that are spread over a kernel's positions")[0])
    spread = "channels that are spread over several axes of a kernel"
    return _Channels(
        flow.vector(fields, 1, SLIDES),
        flow.on_axis(weight, 0, spread),
        flow.on_axis(weight, 1, spread),
        None if bias is None else flow.on_axis(bias, 0, "channels that are spread over several axes of a bias"),
    )


def _made(flow: LabelFlow, call: OperatorCall, labels: _Channels, groups: int, *, transposed: bool) -> list[Field]:
    """Merge channels that are read with those of the weight, and return the field of those that are made."""
    (x, x_zero), (first, first_zero), (second, second_zero) = labels.source, labels.first, labels.second
    consumer, producer, zero = (first, second, first_zero) if transposed else (second, first, second_zero)
    by_groups = groups > 1 and whole_groups(groups, call.args[0].shape[1] // groups)
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
    made_zero = first_zero or x_zero if by_groups else second_zero if transposed else first_zero
    if labels.bias is not None:
        out = flow.join(out, labels.bias[0], FIXED_PARTNER)
        made_zero = made_zero and labels.bias[1]
    return [] if out is None else [Field(along(out, 1, call.out.dim()), made_zero)]


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
    # Of a module of torch the number of groups can be set.
    sets = flow.model is not None and isinstance(flow.model.get_submodule(flow.module), _ConvNd)
    if x is not None and first is not None and second is not None and not transposed and sets:
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

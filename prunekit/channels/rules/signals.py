"""Rules of operators on signals: images, whose channels become positions or are sampled, and Fourier transforms.

Complex tensors, which Fourier transforms return, are made of real ones and taken apart again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from prunekit.channels.labels.label_flow import Field, LabelFlow, along
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rules.pointwise import keeps_zero, sums, zero_where
from prunekit.channels.rules.rule import OperatorCall, aten, register_rule

SAMPLED = "sampled between places along these channels"


def _channels(flow: LabelFlow, tensor: Any, axis: int) -> tuple[Labels | None, bool]:
    """Return the labels of the channels and their zero flag, and lock fields on the axes of positions alone."""
    fields = flow.tied_along(range(axis + 1, tensor.dim()), flow.fields(tensor), SAMPLED)
    return flow.vector(fields, axis, "channels that are spread over the batch as well")


def _map_channels(
    flow: LabelFlow, call: OperatorCall, axis: int, change: Callable[[Labels], Labels] = lambda labels: labels
) -> None:
    """Give the results the labels of the channels of the first argument, changed by a function."""
    labels, zero = _channels(flow, call.args[0], axis)
    for out in call.outs if labels is not None else ():
        flow.set(out, [Field(along(change(labels), axis, out.dim()), zero)])  # type: ignore[arg-type]


@register_rule(*aten("pixel_shuffle pixel_unshuffle col2im im2col"))
def exchanged(flow: LabelFlow, call: OperatorCall) -> None:
    """Tie channels that become positions of one; repeat the label of one whose positions become several channels."""
    axis = max(call.args[0].dim(), call.out.dim()) - 3
    size, tie = call.out.shape[axis], flow.union.tie
    if size > call.args[0].shape[axis]:
        _map_channels(flow, call, axis, lambda labels: np.repeat(labels, size // labels.size))
    else:
        _map_channels(flow, call, axis, lambda labels: tie(labels.reshape(size, -1), [1]).reshape(-1))


@register_rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(flow: LabelFlow, call: OperatorCall) -> None:
    """Tie the same channels of every group, which are dealt out in turn."""
    groups = call.args[1]
    tie = flow.union.tie
    _map_channels(flow, call, 1, lambda labels: np.repeat(tie(labels.reshape(groups, -1), [0]).reshape(-1), groups))


@register_rule("aten.grid_sampler_2d", "aten.grid_sampler_3d")
def sampled_by_grid(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass channels that are sampled; each sample of the batch, such as a head of attention, has places of its own."""
    source, grid = call.args[:2]
    ndim = source.dim()
    fields = flow.tied_along(range(2, ndim), flow.fields(source), SAMPLED)
    places = flow.tied_along(range(1, ndim), flow.fields(grid), "says where to sample")
    one = (1,) * (ndim - 1)
    together = flow.pointwise([((*source.shape[:2], *one[1:]), fields), ((grid.shape[0], *one), places)], product=False)
    flow.set(call.out, zero_where(together, fields))


@register_rule("torchvision.roi_align", "torchvision.roi_pool")
def sampled(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass channels that are sampled at places which another tensor gives, and lock the batch."""
    flow.lock([field for argument in call.args[1:] for field in flow.fields(argument)], "says where to sample")
    _map_channels(flow, call, 1)
    flow.lock([field for field in flow.fields(call.args[0]) if 0 in field.span], SAMPLED)


register_rule(*aten("_conj _conj_physical conj_physical _neg_view resolve_conj resolve_neg angle"))(keeps_zero)
register_rule("aten.complex")(sums)
PARTS = "real and imaginary parts, both of which stay"


@register_rule(*aten("_fft_r2c _fft_c2c _fft_c2r"))
def transform(flow: LabelFlow, call: OperatorCall) -> None:
    """Mix all positions of the transformed axes; the others pass with their zeros."""
    source, axes = call.args[:2]
    fields = list(flow.fields(source))
    for axis in axes:
        fields = flow.tied_along([axis % source.dim()], fields, "a Fourier transform mixes these channels")
    flow.set(call.out, fields)


@register_rule("aten.view_as_real")
def as_real(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass labels to both parts."""
    flow.set(call.out, [field.with_labels(field.labels[..., None]) for field in flow.fields(call.args[0])])


@register_rule("aten.view_as_complex")
def as_complex(flow: LabelFlow, call: OperatorCall) -> None:
    """Drop the last axis, which holds the two parts."""
    fields = flow.tied_along([call.out.dim()], flow.fields(call.args[0]), PARTS)
    flow.set(call.out, [field.with_labels(np.squeeze(field.labels, -1)) for field in fields])

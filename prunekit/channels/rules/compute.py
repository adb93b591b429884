"""Operators that compute over an axis: matrix products, convolutions, pooling, reductions, softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from prunekit.channels.labels import Field, Labels, along
from prunekit.channels.rules.pointwise import aligned
from prunekit.channels.rules.registry import Call, rule

if TYPE_CHECKING:
    from prunekit.channels.flow import Flow

FIXED_PARTNER = "its partner in this product has a size that does not depend on any parameter"
NOT_ZERO = "sums over values that are not exactly zero where the channel is removed"

_EINSUM = {
    "aten.mm": ("mk", "kn", "mn"),
    "aten.bmm": ("bmk", "bkn", "bmn"),
    "aten.mv": ("mk", "k", "m"),
    "aten.dot": ("k", "k", ""),
}


COUNTED = frozenset({*_EINSUM, "aten.addmm", "aten.baddbmm", "aten.convolution", "aten._convolution"})
"""Operators whose multiply-accumulates count, also where nothing that goes in carries a label."""


@rule(*_EINSUM)
def matrix_product(flow: Flow, call: Call) -> None:
    """Merges along the contracted axis."""
    flow.set(call.out, flow.contract(call.args[0], call.args[1], *_EINSUM[call.name]))


@rule("aten.addmm", "aten.baddbmm")
def added_matrix_product(flow: Flow, call: Call) -> None:
    """A matrix product plus a broadcast bias."""
    axes = _EINSUM["aten.mm" if call.name == "aten.addmm" else "aten.bmm"]
    product = flow.contract(call.args[1], call.args[2], *axes)
    bias = aligned(flow, call.args[0], call.out.dim())
    flow.set(call.out, flow.pointwise([(tuple(call.out.shape), product), bias], product=False))


def whole_groups(groups: int, channels_per_group: int) -> bool:
    """Whether a grouped convolution loses whole groups (ResNeXt, depthwise) or a column of every group (RegNet)."""
    return groups >= channels_per_group


@rule("aten.convolution", "aten._convolution", "aten.convolution_overrideable")
def convolution(flow: Flow, call: Call) -> None:
    """Plain, grouped, depthwise and transposed convolution in any number of spatial axes."""
    source, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    transposed, groups = bool(call.arg(6, "transposed", False)), int(call.arg(8, "groups", 1))
    flow.lock([f for f in flow.fields(source) if set(f.span) - {0, 1}], "labels on the axes a convolution slides over")
    for axis in range(2, weight.dim()):
        flow.fix(flow.on_axis(weight, axis, "labels over a kernel's positions")[0])
    x, x_zero = flow.on_axis(source, 1, "labels over batch and channels jointly")
    first, first_zero = flow.on_axis(weight, 0, "labels over several axes of a kernel")
    second, second_zero = flow.on_axis(weight, 1, "labels over several axes of a kernel")
    positions = (source if transposed else call.out).shape[2:].numel() * call.out.shape[0]
    kernel = weight.shape[2:].numel()
    sizes = [weight.shape[axis] for axis, labels in ((0, first), (1, second)) if labels is None]
    flow.add_macs(float(positions * kernel * int(np.prod(sizes))), [first, second])

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
    b, b_zero = flow.on_axis(bias, 0, "labels of a bias")
    if bias is not None:
        out = flow.join(out, b, FIXED_PARTNER)
    produced_zero = first_zero or x_zero if by_groups else second_zero if transposed else first_zero
    if out is not None:
        flow.set(call.out, [Field(along(out, 1, call.out.dim()), produced_zero and (bias is None or b_zero))])


def _by_whole_groups(
    flow: Flow, x: Labels | None, first: Labels | None, groups: int, out_channels: int, *, transposed: bool
) -> Labels | None:
    """One label for each group: its inputs, its outputs and its slice of the weight."""
    if x is None or first is None:
        flow.lock([x, first], FIXED_PARTNER)
        return None
    tied = flow.union.tie(x.reshape(groups, -1), [1])
    flow.union.merge(tied, first.reshape(groups, -1))
    return np.repeat(tied.reshape(-1), out_channels // groups) if transposed else first


def _by_columns(
    flow: Flow, x: Labels | None, first: Labels | None, second: Labels | None, groups: int, *, transposed: bool
) -> Labels | None:
    """The same columns in every group, so that the number of groups stays."""
    columns = None if x is None else flow.union.tie(x.reshape(groups, -1), [0]).reshape(-1)
    if first is not None:
        rows = flow.union.tie(first.reshape(groups, -1), [0]).reshape(-1)
    if transposed:
        flow.join(columns, None if first is None else rows, FIXED_PARTNER)
        return None if second is None else np.tile(second, groups)
    flow.join(columns, second, FIXED_PARTNER)
    return first


_SPATIAL = {
    f"aten.{name}{n}d{suffix}": n
    for n in (1, 2, 3)
    for suffix in ("", "_with_indices")
    for name in ("max_pool", "avg_pool", "_adaptive_avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
}
_SPATIAL |= {f"aten.{name}{suffix}": n for name, n in (
    ("upsample_nearest1d", 1), ("upsample_nearest2d", 2), ("upsample_nearest3d", 3), ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2), ("upsample_bicubic2d", 2), ("upsample_trilinear3d", 3), ("_upsample_bilinear2d_aa", 2),
    ("_upsample_nearest_exact2d", 2), ("_upsample_nearest_exact1d", 1),
) for suffix in ("", ".vec")}  # fmt: skip


@rule(*_SPATIAL)
def spatial(flow: Flow, call: Call) -> None:
    """Pooling and interpolation work on each channel by itself."""
    source = call.args[0]
    slid = set(range(source.dim() - _SPATIAL[call.name], source.dim()))
    fields = flow.fields(source)
    flow.lock([field for field in fields if set(field.span) & slid], "labels on the axes a pooling slides over")
    for out in call.out if isinstance(call.out, (tuple, list)) else [call.out]:
        flow.set(out, [field for field in fields if not set(field.span) & slid])


_ZERO_OF_ZEROS = frozenset(
    f"aten.{name}" for name in ["sum", "mean", "amax", "amin", "prod", "std", "var", "norm", "linalg_vector_norm"]
)
_STATISTICS = frozenset(
    f"aten.{name}"
    for name in ["sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "norm"]
) | {"aten.linalg_vector_norm"}
_REDUCTIONS = "sum mean amax amin max min var std var_mean std_mean prod all any argmax argmin norm linalg_vector_norm"


@rule(*[f"aten.{name}" for name in _REDUCTIONS.split()])
def reduction(flow: Flow, call: Call) -> None:
    """Axes that stay keep their labels. A plain sum over a removed zero is harmless; anything else locks.

    Unless the module is a norm, which its end tells.
    """
    source = call.args[0]
    ndim = source.dim()
    position = 2 if "norm" in call.name else 1
    dims: Any = call.arg(position, "dim")
    if dims is None or isinstance(dims, bool) or dims == []:
        dims = list(range(ndim))
    reduced = {axis % ndim for axis in ([dims] if isinstance(dims, int) else dims)} if ndim else set()
    kept = []
    for field in flow.fields(source):
        shared = reduced & set(field.span)
        if not shared:
            kept.append(field)
            continue
        if set(field.span) - reduced:  # what is left has all of the reduced axes
            kept.append(field.with_labels(flow.union.tie(field.labels, sorted(shared))))
            continue
        harmless = call.name == "aten.sum" and field.zero
        reason = None if harmless else f"{call.name} over these channels: their number or their zeros would change it"
        if reason is not None and flow.module in flow.substituted:
            flow.lock_if_read(call.out, field.labels, reason)
        elif call.name in _STATISTICS:
            flow.take_statistics(field, reason)
        elif reason is not None:
            flow.lock([field], reason)
    for out in call.out if isinstance(call.out, (tuple, list)) else [call.out]:
        squeeze = out.dim() != ndim
        axes = tuple(sorted(reduced)) if squeeze else ()
        stays = call.name in _ZERO_OF_ZEROS
        flow.set(out, [Field(np.squeeze(field.labels, axes), field.zero and stays) for field in kept])


_ALONG_AXIS = "_softmax _safe_softmax _log_softmax softmax log_softmax cumsum"


@rule(*[f"aten.{name}" for name in _ALONG_AXIS.split()])
def along_axis(flow: Flow, call: Call) -> None:
    """Mixes all positions of one axis: that axis is locked, or tied where it is labelled jointly with others."""
    source = call.args[0]
    axis = call.arg(1, "dim", -1) % max(source.dim(), 1)
    fields = flow.fields(source)
    flow.lock([field for field in fields if field.span == (axis,)], f"{call.name} mixes these channels")
    rest = [field for field in fields if field.span != (axis,)]
    tied = [flow.union.tie(f.labels, [axis]) if axis in f.span else f.labels for f in rest]
    flow.set(call.out, [Field(labels, zero=False) for labels in tied])


@rule("aten.glu")
def gated(flow: Flow, call: Call) -> None:
    """The first half of an axis times the sigmoid of the second: what meets goes together."""
    source = call.args[0]
    axis = call.arg(1, "dim", -1) % source.dim()
    fields = []
    for field in flow.fields(source):
        if axis in field.span:
            first, second = np.split(field.labels, 2, axis)
            flow.union.merge(first, second)
            field = field.with_labels(first)
        fields.append(field)
    flow.set(call.out, fields)

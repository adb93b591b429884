"""How axes pass through operators: which axis of a result is which axis of an operand, by families of operators."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from axis_flow import (
    CONSTANT,
    Axis,
    AxisFlow,
    Result,
    Rule,
    elementwise,
    ids_of,
    part_of,
    resized,
    size_of,
    whole,
)
from torch import Tensor

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators, with and without an underscore for in place."""

    def register(function: Rule) -> Rule:
        RULES.update({name + suffix: function for name in names for suffix in ("", "_")})
        return function

    return register


def named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by the names in its schema, with their defaults."""
    schema = func._schema.arguments
    given = {one.name: one.default_value for one in schema if one.has_default_value()}
    return {**given, **{one.name: value for one, value in zip(schema, args, strict=False)}, **kwargs}


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "view_as")
def _view(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    """Axes that become one have the ids of all; those that one is split into have its ids each."""
    if func._schema.name == "aten::view" and len(args) > 1 and isinstance(args[1], torch.dtype):
        return None
    old = [axis for axis in flow.axes(args[0]) if size_of(axis) != 1]
    sizes = [size for size in outs[0].shape if size != 1]
    if not prod(outs[0].shape):
        return None
    fresh: list[Axis] = []
    while old:
        left, right = [old.pop(0)], [sizes.pop(0)]
        while (have := prod(map(size_of, left))) != (want := prod(right)):
            left.append(old.pop(0)) if have < want else right.append(sizes.pop(0))
        if len(left) == len(right) == 1:
            fresh.append(left[0])
        else:
            one = whole(prod(right), flow.joined(left)) if len(left) > 1 else left[0]
            fresh += flow.split(one, right) if len(right) > 1 else [one]
    found = iter(fresh)
    return [tuple(whole(1, ()) if size == 1 else next(found) for size in outs[0].shape)]


@rule("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "select", "slice", "unbind", "split",
      "split_with_sizes", "swapaxes", "diagonal", "unfold")  # fmt: skip
def _strided(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    name, given = str(func._schema.name).removeprefix("aten::").rstrip("_"), named(func, args, kwargs)
    axes = flow.axes(args[0])
    return VIEWS[name](axes, given, outs)


def _permuted(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    return [tuple(axes[dim] for dim in given["dims"])]


def _transposed(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    order = list(axes)
    if len(order) > 1:
        first, second = given.get("dim0", 0), given.get("dim1", 1)
        order[first], order[second] = order[second], order[first]
    return [tuple(order)]


def _unsqueezed(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    order, dim = list(axes), given["dim"]
    order.insert(dim % (len(axes) + 1), whole(1, ()))
    return [tuple(order)]


def _squeezed(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    dims = given.get("dim", range(len(axes)))
    gone = {dim % max(len(axes), 1) for dim in ([dims] if isinstance(dims, int) else dims)}
    return [tuple(axis for i, axis in enumerate(axes) if i not in gone or size_of(axis) != 1)]


def _expanded(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    padded = (whole(1, ()),) * (outs[0].dim() - len(axes)) + axes
    pairs = zip(padded, outs[0].shape, strict=True)
    return [tuple(axis if size_of(axis) == size else whole(size, (CONSTANT,)) for axis, size in pairs)]


def _selected(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    dim = given.get("dim", 0) % len(axes)
    return [axes[:dim] + axes[dim + 1 :]] * len(outs)


def _sliced(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    dim, full = given["dim"] % len(axes), size_of(axes[given["dim"]])
    start, _, step = slice(given["start"], given["end"], given["step"]).indices(full)
    size = outs[0].shape[dim]
    mine = part_of(axes[dim], start, size) if step == 1 else resized(axes[dim], size)
    return [(*axes[:dim], mine, *axes[dim + 1 :])]


def _split(axes: tuple[Axis, ...], given: dict[str, Any], outs: list[Tensor]) -> Result:
    dim, found, at = given["dim"] % len(axes), [], 0
    for out in outs:
        found.append((*axes[:dim], part_of(axes[dim], at, out.shape[dim]), *axes[dim + 1 :]))
        at += out.shape[dim]
    return found


VIEWS = {"permute": _permuted, "transpose": _transposed, "swapaxes": _transposed, "t": _transposed,
         "unsqueeze": _unsqueezed, "squeeze": _squeezed, "expand": _expanded, "select": _selected, "unbind": _selected,
         "slice": _sliced, "split": _split, "split_with_sizes": _split, "diagonal": lambda *_: None,
         "unfold": lambda *_: None}  # fmt: skip


@rule("cat", "stack", "_cat")
def _joined(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    given, stacked = named(func, args, kwargs), "stack" in func._schema.name
    tensors = [tensor for tensor in given["tensors"] if stacked or tensor.numel() or tensor.dim() > 1]
    dim = given["dim"] % outs[0].dim()
    columns = list(zip(*map(flow.axes, tensors), strict=True))
    if stacked:
        columns.insert(dim, tuple(whole(1, ()) for _ in tensors))
    axes = []
    for i, column in enumerate(columns):
        axis = column[0]
        for other in column[1:]:
            axis = _after(axis, other) if i == dim else flow.combine(axis, other)
        axes.append(axis)
    return [tuple(axes)]


def _after(first: Axis, second: Axis) -> Axis:
    if len(first) and len(second) and first[-1][1] == second[0][1] == frozenset((CONSTANT,)):
        return (*first[:-1], (first[-1][0] + second[0][0], second[0][1]), *second[1:])
    return first + second


@rule("sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "argmax", "argmin",
      "logsumexp", "norm", "linalg_vector_norm", "prod", "any", "all", "median", "mode")  # fmt: skip
def _reduced(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    given = named(func, args, kwargs)
    if isinstance(given.get("other"), Tensor):
        return None
    axes, dims = flow.axes(args[0]), given.get("dim")
    every = range(len(axes)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % max(len(axes), 1) for dim in every}
    if given.get("keepdim"):
        return [tuple(whole(1, ()) if i in gone else axis for i, axis in enumerate(axes))] * len(outs)
    return [tuple(axis for i, axis in enumerate(axes) if i not in gone)] * len(outs)


@rule("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv")
def _multiplied(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    left, right = [value for value in args if isinstance(value, Tensor)][-2:]
    batch = int(left.dim() == 3)
    kept = ([batch] if left.dim() > 1 else [], [batch + 1] if right.dim() > 1 else [])
    flow.product(left, right, [(left.dim() - 1, batch)], kept)
    one, other = flow.axes(left), flow.axes(right)
    axes = tuple(flow.combine(one[i], other[i]) for i in range(batch))
    return [_added(flow, args, (*axes, *(one[i] for i in kept[0]), *(other[i] for i in kept[1])))]


def _added(flow: AxisFlow, args: Any, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The axes of a product to which the first of three operands is added."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    if len(tensors) < 3:
        return axes
    bias = flow.axes(tensors[0])
    padded = (whole(1, ()),) * (len(axes) - len(bias)) + bias
    return tuple(flow.combine(axis, other) for axis, other in zip(axes, padded, strict=True))


@rule("_grouped_mm")
def _of_experts(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    left, right = args[:2]
    if left.dim() != 2 or right.dim() != 3:
        return None
    flow.product(left, right, [(1, 1)], ([0], [2]))
    return [(flow.axes(left)[0], flow.axes(right)[2])]


@rule("convolution", "_convolution", "deform_conv2d")
def _convolved(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    """A convolution in at least as many groups as each has channels loses whole groups, as a depthwise one does."""
    given = named(func, args, kwargs)
    x, weight = args[:2]
    transposed = bool(given.get("transposed"))
    groups = given["groups"] if "groups" in given else x.shape[1] // weight.shape[1]
    reads, makes = (0, 1) if transposed else (1, 0)
    axes, kernel = flow.axes(x), flow.axes(weight)
    by_groups = groups > 1 and groups >= weight.shape[1]
    if groups == 1 or not by_groups:
        pairs = [] if groups > 1 and transposed else [(1, reads)]
        flow.product(x, weight, pairs, ([], [makes] if groups == 1 or not transposed else [0, 1]))
    else:
        flow.product(x, weight, [], ([], [0]))  # axis 0 has the groups, either way
    made = resized(kernel[0 if groups > 1 else makes], outs[0].shape[1])
    if by_groups and len(axes[1]) == len(kernel[0]) == 1:
        flow.combine(whole(2, ids_of(axes[1])), whole(2, ids_of(kernel[0])))
    if isinstance(given.get("bias"), Tensor):
        made = flow.combine(made, flow.axes(given["bias"])[0])
    pixels = tuple(resized(axis, size) for axis, size in zip(axes[2:], outs[0].shape[2:], strict=True))
    return [(axes[0], made, *pixels)]


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_no_update",
      "_batch_norm_with_update", "native_group_norm", "batch_norm", "cudnn_batch_norm",
      "miopen_batch_norm")  # fmt: skip
def _normalized(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    axes = list(flow.axes(args[0]))
    for tensor in args[1:3]:
        if isinstance(tensor, Tensor):
            axes[1] = flow.combine(axes[1], flow.axes(tensor)[0])
    return [tuple(axes)]


@rule("embedding")
def _looked_up(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    weight, positions = args[:2]
    if weight in flow.owned:
        flow.found.tables.add(flow.owned[weight])
    return [(*flow.axes(positions), *flow.axes(weight)[1:])]


@rule("index", "_unsafe_index")
def _indexed(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    axes, at = list(flow.axes(args[0])), [i for i, one in enumerate(args[1]) if one is not None]
    given = [args[1][i] for i in at]
    if any(one.dtype in (torch.bool, torch.uint8) for one in given):
        many = sum(one.dim() for one in given)
        return [(whole(outs[0].shape[0], ids_of(*axes[:many])), *axes[many:])] if at == [0] else None
    shape = torch.broadcast_shapes(*(one.shape for one in given))
    positions = elementwise(flow, given, torch.empty(shape, device="meta"))
    together = at == list(range(at[0], at[0] + len(at)))
    left = [axis for i, axis in enumerate(axes) if i not in at]
    start = at[0] if together else 0
    return [(*left[:start], *positions, *left[start:])]


@rule("index_select")
def _picked(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    axes, dim = list(flow.axes(args[0])), args[1] % args[0].dim()
    axes[dim] = flow.axes(args[2])[0] if args[2].dim() else whole(1, ())
    return [tuple(axes)]


@rule("gather")
def _gathered(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    x, dim, index = args[:3]
    pairs = zip(flow.axes(x), flow.axes(index), strict=True)
    return [tuple(at if i == dim % x.dim() else resized(mine, size_of(at)) for i, (mine, at) in enumerate(pairs))]


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce", "index_put",
      "_index_put_impl", "masked_scatter", "select_scatter", "slice_scatter")  # fmt: skip
def _scattered(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    """What is written into has the axes of what is written, but for the one that is counted off."""
    given = named(func, args, kwargs)
    axes, source = list(flow.axes(args[0])), given.get("src", given.get("source", given.get("values")))
    dim = given.get("dim")
    if not isinstance(source, Tensor) or "masked" in func._schema.name:
        return [tuple(axes)]
    for i, other in zip(range(-source.dim(), 0), flow.axes(source), strict=True):
        at = i % len(axes) if source.dim() <= len(axes) else None
        indexed = "indices" in given and at is not None and at < len(given["indices"])
        if at is not None and not indexed and (dim is None or at != dim % len(axes)):
            axes[at] = flow.combine(axes[at], other)
    return [tuple(axes)]


@rule("repeat")
def _repeated(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    axes = (whole(1, ()),) * (outs[0].dim() - args[0].dim()) + flow.axes(args[0])
    return [tuple(
        resized(axis, size) if size_of(axis) > 1 else whole(size, (CONSTANT,))
        for axis, size in zip(axes, outs[0].shape, strict=True)
    )]  # fmt: skip


@rule("grid_sampler_2d", "grid_sampler_3d", "roi_align", "roi_pool", "ps_roi_align")
def _sampled(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    x, where = args[:2]
    grid = "grid" in func._schema.name
    first = flow.axes(x)[0] if grid else flow.axes(where)[0]
    pixels = flow.axes(where)[1:-1] if grid else tuple(whole(size, (CONSTANT,)) for size in outs[0].shape[2:])
    return [(first, resized(flow.axes(x)[1], outs[0].shape[1]), *pixels)]


@rule("im2col", "col2im")
def _patches(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    axes = flow.axes(args[0])
    at = outs[0].dim() - (3 if "im2col" in func._schema.name else 4)
    pixels = [whole(size, ids_of(*axes[at + 2 :])) for size in outs[0].shape[at + 2 :]]
    head = (resized(axes[0], outs[0].shape[0]),) if outs[0].dim() - len(pixels) == 2 else ()
    return [(*head, whole(outs[0].shape[len(head)], ids_of(axes[len(head)])), *pixels)]


@rule("pixel_shuffle", "pixel_unshuffle")
def _shuffled(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    *batch, channels, high, wide = flow.axes(args[0])
    sizes = outs[0].shape[-3:]
    return [(*batch, *(whole(size, ids_of(axis)) for size, axis in zip(sizes, (channels, high, wide), strict=True)))]


@rule("topk", "sort")
def _sorted(flow: AxisFlow, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> Result:
    return [tuple(resized(axis, size) for axis, size in zip(flow.axes(args[0]), outs[0].shape, strict=True))] * 2

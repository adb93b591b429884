"""Rules of operators that compute over an axis: matrix products, pooling, reductions, softmax."""

from collections.abc import Sequence
from itertools import combinations
from math import gcd
from typing import Any

import numpy as np
import torch

from prunekit.channels.labels.label_flow import Field, LabelFlow, WidthMultiple
from prunekit.channels.rules.pointwise import aligned, zero_where
from prunekit.channels.rules.rule import OperatorCall, Trait, aten, register_rule

_EINSUM = {
    "aten.mm": (("mk", "kn"), "mn"),
    "aten.bmm": (("bmk", "bkn"), "bmn"),
    "aten.mv": (("mk", "k"), "m"),
    "aten.dot": (("k", "k"), ""),
    "aten.vdot": (("k", "k"), ""),
    "aten.outer": (("m", "n"), "mn"),
}
_GROUPED = frozenset({"aten._grouped_mm", "transformers.grouped_mm_fallback"})
Trait.COUNTED.declare(*aten("addmm _sparse_addmm baddbmm"))
Trait.AFFINE.declare("aten.addmm")
Trait.LAST_AXIS.declare("aten.addmm")


_ADDED = {
    "aten.addmm": "aten.mm",
    "aten._sparse_addmm": "aten.mm",
    "aten.baddbmm": "aten.bmm",
    "aten.addmv": "aten.mv",
    "aten.addr": "aten.outer",
}


@register_rule(*_EINSUM, traits=[Trait.COUNTED])
@register_rule(*_ADDED)
def matrix_product(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge along the contracted axis, and with a broadcast bias: of a sparse matrix, zeros of the whole size."""
    axes, out = _EINSUM[_ADDED.get(call.name, call.name)]
    *added, left, right = call.args[: 3 if call.name in _ADDED else 2]
    fields = flow.summed(zip((left, right), axes, strict=True), out)
    for bias in added:
        operands = [(tuple(call.out.shape), fields), aligned(flow, bias, call.out.dim())]
        fields = flow.pointwise(operands, product=False)
    flow.set(call.out, fields)


COUNTS_ROWS = "offsets count these positions: which matrix of a stack they meet depends on their number"
OF_STACK = (
    "one of several matrices is taken for each row, by numbers that are computed from all of them: as many stay, "
    "unless one module holds these and what computes the numbers, and returns none of them"
)
IN_STEPS_OF = {"aten._grouped_mm": 8}
"""Operator -> what its widths have to be multiples of: rows of 16 bytes, also in half precision."""


@register_rule(*_GROUPED, traits=[Trait.COUNTED, Trait.PICKS_FROM_STACK])
def grouped_product(flow: LabelFlow, call: OperatorCall) -> None:
    """Contract like one matrix with one: parts of an axis, which end at offsets, each meet another one of a stack.

    Where neither operand is a stack, each part of the contracted axis gives a matrix of its own.
    """
    left, right = call.args[:2]
    if left.dim() == right.dim() == 3:
        flow.set(call.out, flow.contract(left, right, "bmk", "bkn", "bmn"))
        return
    flow.lock([f for given in (call.arg(2, "offs"), call.arg(3, "bias")) for f in flow.fields(given)], COUNTS_ROWS)
    lefts, rights = _without_stack(flow, left), _without_stack(flow, right)
    if left.dim() == 2:
        lefts = flow.tied_along([1 if right.dim() == 2 else 0], lefts, COUNTS_ROWS)
    if right.dim() == 2:
        rights = flow.tied_along([0 if left.dim() == 2 else 1], rights, COUNTS_ROWS)
    fields = flow.summed([((left.shape[-2:], lefts), "mk"), ((right.shape[-2:], rights), "kn")], "mn")
    for field in (*lefts, *rights):  # one axis is read in rows of memory, the other in gradients
        step = gcd(IN_STEPS_OF.get(call.name, 1), field.labels.size)
        flow.multiples += [WidthMultiple(field.labels.reshape(-1), step)] if step > 1 else []
    flow.set(call.out, [field.behind(call.out.dim() - 2) for field in fields])


def _without_stack(flow: LabelFlow, tensor: torch.Tensor) -> list[Field]:
    """Return the fields of one matrix of a stack, all of whose matrices stay."""
    if tensor.dim() == 2:
        return list(flow.fields(tensor))
    return [f.with_labels(f.labels[0]) for f in flow.tied_along([0], flow.fields(tensor), OF_STACK)]


@register_rule("aten._cdist_forward", "aten._euclidean_dist")
def distances(flow: LabelFlow, call: OperatorCall) -> None:
    """Sum differences over the last axis, to which channels add nothing that are zero in both tensors."""
    batch = "abcdefgh"[: call.out.dim() - 2]
    shared = [batch[len(batch) + 2 - tensor.dim() :] for tensor in call.args[:2]]
    factors = [(call.args[0], f"{shared[0]}mk"), (call.args[1], f"{shared[1]}nk")]
    flow.set(call.out, flow.summed(factors, f"{batch}mn", product=False, count=False))


@register_rule("aten._trilinear")
def trilinear(flow: LabelFlow, call: OperatorCall) -> None:
    """Multiply three tensors in their joint space, as a bilinear layer does, and sum over some of its axes."""
    tensors, added, summed = call.args[:3], call.args[3:6], call.args[6]
    letters = "abcdefgh"[: tensors[0].dim() + len(added[0])]
    axes = ["".join(letter for axis, letter in enumerate(letters) if axis not in fresh) for fresh in added]
    kept = "".join(letter for axis, letter in enumerate(letters) if axis not in summed)
    flow.set(call.out, flow.summed(zip(tensors, axes, strict=True), kept, count=False))


@register_rule("aten._sparse_mm_reduce_impl")
def reduced_rows(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass the columns of a matrix whose rows a sparse one reduces; sums, means and extrema of zeros are zero."""
    sparse, rows = call.args[:2]
    flow.lock(flow.fields(sparse), "decides which rows are reduced")
    columns = flow.tied_along([0], flow.fields(rows), "rows that a sparse matrix reduces")
    flow.set(call.outs[0], columns)
    flow.set(call.outs[1], [Field(field.labels, zero=False) for field in columns])  # where the extrema were


@register_rule("aten.linalg_solve_triangular")
def solved(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass batches of triangular systems, as linear attention solves for positions, and the columns of their values."""
    matrix, values = call.args[:2]
    ndim, mixes = call.out.dim(), "a triangular system mixes these channels"
    if not call.arg(4, "unitriangular", False):  # of which the diagonal is read
        flow.divide_by(matrix)
    sizes = matrix.dim() - 2, matrix.dim() - 1
    flow.lock([field for field in flow.fields(matrix) if set(field.span) & set(sizes)], mixes)
    batches = [field for field in flow.fields(matrix) if not set(field.span) & set(sizes)]
    sides = flow.tied_along([values.dim() - (2 if call.arg(3, "left", True) else 1)], flow.fields(values), mixes)
    operands = [((*matrix.shape[:-2], 1, 1), batches), (tuple(values.shape), sides)]
    placed = [(shape, [field.behind(ndim - len(shape)) for field in fields]) for shape, fields in operands]
    flow.set(call.out, zero_where(flow.pointwise(placed, product=False), placed[1][1]))


_POOLS = " ".join(f"{kind}_pool{n}d" for n in (1, 2, 3)
                  for kind in ("max", "avg", "_adaptive_avg", "adaptive_avg", "adaptive_max"))  # fmt: skip
_UPSAMPLES = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)


def leaves_alone(index: int, *window: Sequence[int] | int) -> bool:
    """Return whether a window that slides over spatial axes, given by size, stride and padding, leaves one alone."""
    return [given if isinstance(given, int) else given[index % len(given)] for given in window] == [1, 1, 0]


@register_rule(*aten(_POOLS, ("", "_with_indices")), *aten(_UPSAMPLES, ("", ".vec")))
def spatial(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass channels through pooling and interpolation, which treat each by itself."""
    source, size, window = call.args[0], call.args[1], None
    if "_pool" in call.name and "adaptive" not in call.name:
        window = size, call.arg(2, "stride", ()) or size, call.arg(3, "padding", 0)
    first = source.dim() - next(int(letter) for letter in call.name if letter.isdecimal())
    slid = [axis for axis in range(first, source.dim()) if window is None or not leaves_alone(axis - first, *window)]
    fields = flow.tied_along(slid, flow.fields(source), "pooling slides over these channels")
    for index, out in enumerate(call.outs):  # the second holds where the largest values were
        flow.set(out, fields if index == 0 else [Field(field.labels, zero=False) for field in fields])


@register_rule("aten.max_unpool2d", "aten.max_unpool3d")
def unpooled(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge values with the indices of where they are put, which were taken from each channel."""
    ndim = call.out.dim()
    slid = range(ndim - (2 if call.name.endswith("2d") else 3), ndim)
    values, places = ([*flow.fields(argument)] for argument in call.args[:2])
    flow.lock([field for field in (*values, *places) if set(field.span) & set(slid)], "put at positions by number")
    shape = tuple(1 if axis in slid else size for axis, size in enumerate(call.out.shape))
    operands = [(shape, [field for field in fields if not set(field.span) & set(slid)]) for fields in (values, places)]
    flow.set(call.out, zero_where(flow.pointwise(operands, product=False), values))


Trait.DROPS_AXES.declare(*aten("norm linalg_vector_norm"))  # weight normalization takes norms over all other axes
_EXTREMA = frozenset(aten("max min"))
_STATISTICS = _EXTREMA | frozenset(aten("sum nansum mean amax amin var std var_mean std_mean norm linalg_vector_norm"))
_ZERO_OF_ZEROS = _STATISTICS | frozenset(aten("aminmax prod any count_nonzero"))


@register_rule(*_STATISTICS, *aten("prod all any argmax argmin aminmax count_nonzero logsumexp"))
def reduction(flow: LabelFlow, call: OperatorCall) -> None:
    """Keep the labels of axes that are not reduced; lock the others unless removed zeros do not change the result.

    Statistics lock only if the module turns out to be no norm when it ends.
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
        if set(field.span) - reduced:  # all of the reduced axes must be there
            kept.append(field.with_labels(flow.union.tie(field.labels, sorted(shared))))
            continue
        harmless = (field.zero and _adds_nothing(call)) or (field.true and call.name == "aten.all")
        reason = None if harmless else f"{call.name} over these channels: their number or their zeros would change it"
        if reason is not None and flow.module in flow.substituted:
            flow.lock_if_read(call.out, field.labels, reason)
        elif call.name in _STATISTICS:
            flow.take_statistics(field, reason)
        elif reason is not None:
            flow.lock([field], reason)
    if call.name in Trait.DROPS_AXES and any(set(a.span) & set(b.span) for a, b in combinations(kept, 2)):
        flow.constraints.extend(flow.crossed(source))
    for index, out in enumerate(call.outs):
        squeeze = out.dim() != ndim
        axes = tuple(sorted(reduced)) if squeeze else ()
        stays = call.name in _ZERO_OF_ZEROS and not (index and call.name in _EXTREMA)  # where the largest value is
        flow.set(out, [Field(np.squeeze(field.labels, axes), field.zero and stays) for field in kept])


def _adds_nothing(call: OperatorCall) -> bool:
    """Return whether a reduction's result is the same with further zeros among its values."""
    if "norm" not in call.name:
        return call.name in ("aten.sum", "aten.nansum", "aten.any", "aten.count_nonzero")
    order = call.arg(1, "p" if call.name == "aten.norm" else "ord", 2)
    return order is None or order >= 0  # the smallest value, or a product, only with a negative one


@register_rule(*aten("_softmax _safe_softmax _log_softmax softmax log_softmax cumsum"))
def along_axis(flow: LabelFlow, call: OperatorCall) -> None:
    """Mix all positions of one axis: that axis is locked, or tied where it is labeled jointly with others."""
    source = call.args[0]
    axis = call.arg(1, "dim", -1) % max(source.dim(), 1)
    tied = flow.tied_along([axis], flow.fields(source), f"{call.name} mixes these channels")
    flow.set(call.out, [Field(field.labels, field.zero and call.name == "aten.cumsum") for field in tied])


@register_rule("aten.glu")
def gated(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge the first half of an axis with the second, by whose sigmoid it is multiplied."""
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

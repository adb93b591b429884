"""Rules of pointwise operators: unary ones pass fields through, the others broadcast and merge them.

Tensors of one number that a forward pass makes, such as the first state of a recurrent layer, are here too.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from prunekit.channels.labels.code_places import Expression
from prunekit.channels.labels.label_flow import BUFFER_INSTEAD, MEETS_FIXED, Field, LabelFlow, Operand, Shape
from prunekit.channels.rules.rule import OperatorCall, Trait, aten, register_rule

IN_PLACE = ("", "_")
KEEPS_ZERO = (
    "relu relu6 hardswish silu gelu elu selu celu leaky_relu tanh sin tan asin atan sinh asinh neg abs sign "
    "sqrt square erf expm1 log1p floor ceil round trunc hardshrink softshrink tanhshrink nan_to_num clone detach alias "
    "_to_copy lift_fresh contiguous positive to isnan isinf mish native_dropout dropout frac sgn rrelu_with_noise"
)
MOVES_ZERO = (
    "sigmoid hardsigmoid exp exp2 log log2 log10 rsqrt reciprocal cos acos cosh softplus log_sigmoid_forward logit "
    "threshold bitwise_not logical_not erfc bernoulli rand_like randn_like ones_like empty_like full_like "
    "fill heaviside logaddexp uniform normal exponential"
)
SUMS = "add sub rsub maximum minimum fmax fmin logical_or bitwise_or atan2 hypot lerp"
PRODUCTS = "mul logical_and bitwise_and div true_divide floor_divide remainder fmod xlogy"
DIVIDES = frozenset(aten("reciprocal rsqrt log log2 log10", ("", "_")))
"""Operators of `MOVES_ZERO` that are not finite at 0."""
KEEPS_NONZERO = frozenset(aten("clone detach alias _to_copy lift_fresh contiguous to"))
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "gt", "le", "ge")}
SLOPES = (
    "tanh_backward sigmoid_backward threshold_backward silu_backward gelu_backward elu_backward softplus_backward "
    "leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward mish_backward"
)

Trait.ADDS.declare(*aten("add", IN_PLACE))
Trait.SCALES.declare(*aten("mul div", IN_PLACE))
Trait.MEETS.declare(*aten("add sub mul div", IN_PLACE))
Trait.COPIES.declare(*aten("clone _to_copy contiguous"))
Trait.KEEPS_CONSTANTS.declare(*aten("clone contiguous alias detach _to_copy"))
Trait.REARRANGES.declare("aten.clone")
Trait.NOISE.declare(*aten("normal normal_ randn randn_like"))
Trait.BELOW_ONE.declare(*aten("uniform uniform_ rand rand_like"))
Trait.RANDOM.declare(*Trait.NOISE.names, *Trait.BELOW_ONE.names, *aten("bernoulli exponential", IN_PLACE))


def aligned(flow: LabelFlow, tensor: torch.Tensor, ndim: int) -> tuple[Shape, list[Field]]:
    """Return the shape and fields of a tensor with leading axes of size 1 added up to `ndim`.

    An expanded axis counts as size 1: `expand_as` takes whatever size is kept.
    """
    lead = ndim - tensor.dim()
    fields = [field.behind(lead) for field in flow.fields(tensor)]
    repeated = {lead + axis for axis, step in enumerate(tensor.stride()) if step == 0}
    repeated -= {axis for field in fields for axis in field.span}
    shape = [1 if axis in repeated else size for axis, size in enumerate((1,) * lead + tuple(tensor.shape))]
    return tuple(shape), fields


def zero_where(fields: Iterable[Field], others: Iterable[Field]) -> list[Field]:
    """Return fields that are zero where others on the same axes are."""
    zero = zero_spans(others)
    return [Field(field.labels, field.span in zero) for field in fields]


def zero_spans(fields: Iterable[Field]) -> set[Shape]:
    """Return the axes of each field that is zero where its labels are removed."""
    return {field.span for field in fields if field.zero}


def broadcast(flow: LabelFlow, operands: Sequence[Any], *, product: bool) -> list[Field]:
    """Return the fields of an elementwise operator over tensors and numbers."""
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    numbers = [operand for operand in operands if isinstance(operand, (int, float, bool, complex))]
    ndim = max(tensor.dim() for tensor in tensors)
    aligned_operands: list[Operand] = [aligned(flow, tensor, ndim) for tensor in tensors]
    here = flow.expression
    if here is not None and len(tensors) == 2:
        aligned_operands = [_taken(flow, tensors, aligned_operands, index, here) for index in (0, 1)]
    return flow.pointwise(aligned_operands, product=product, others_zero=not any(number != 0 for number in numbers))


def _taken(
    flow: LabelFlow, tensors: Sequence[torch.Tensor], operands: Sequence[Operand], index: int, here: Expression
) -> Operand:
    """Return an operand; a tensor that forward makes gets the labels of the axis that it meets."""
    tensor, (shape, fields), (_, others) = tensors[index], operands[index], operands[1 - index]
    live = [field for field in fields if not flow.is_made(field) or flow.union.find(field.labels).any()]
    taken = {axis for field in live for axis in field.span}
    full = {axis for axis, size in enumerate(shape) if size > 1} - taken
    met = [field for field in others if full & set(field.span) and flow.union.find(field.labels).any()]
    if len(met) != 1 or len(met[0].span) != 1 or met[0].span == (0,) or flow.is_made(met[0]):
        return operands[index]
    # not the first axis, which may grow with the batch, nor those of inputs; the tensor keeps its size, and the compact
    # model takes its positions of channels that are left
    axis = met[0].span[0]
    own = axis - len(shape) + tensor.dim()
    place = None if flow.of_input(tensor, own) else here.operand(index, own)
    labels = met[0].labels.reshape(-1)
    if place is None or labels.size != shape[axis]:
        return operands[index]
    flow.state(labels, place, np.arange(labels.size), MEETS_FIXED + BUFFER_INSTEAD)
    return shape, [*live, Field(met[0].labels, zero=False)]


@register_rule(*aten(KEEPS_ZERO, IN_PLACE))
def keeps_zero(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass fields and their zeros, as f(0) = 0."""
    fields = flow.fields(call.args[0])
    same = call.name in KEEPS_NONZERO or not any(field.true for field in fields)
    flow.set(call.outs[0], fields if same else [Field(field.labels, field.zero) for field in fields])


@register_rule(*aten(" ".join(COMPARISONS), IN_PLACE))
def comparisons(flow: LabelFlow, call: OperatorCall) -> None:
    """Compare removed zeros with a number, or with other zeros: the result is the same for all of them."""
    left, right = call.args[:2]
    compare = COMPARISONS[call.name.removeprefix("aten.").removesuffix("_")]
    fields = broadcast(flow, [one for one in (left, right) if isinstance(one, torch.Tensor)], product=False)
    known = 0 if isinstance(right, torch.Tensor) else right
    result = bool(compare(0, known)) if isinstance(left, torch.Tensor) else bool(compare(left, 0))
    flow.set(call.out, [Field(f.labels, f.zero and not result, true=f.zero and result) for f in fields])


@register_rule(*aten(MOVES_ZERO, IN_PLACE))
def moves_zero(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass fields without their zeros, as f(0) may be anything; but noise that a removed channel has is removed."""
    if call.name in DIVIDES:
        flow.divide_by(call.args[0])
    tensors = [argument for argument in call.args if isinstance(argument, torch.Tensor)]
    fields = flow.fields(tensors[0]) if len(tensors) == 1 else broadcast(flow, tensors, product=False)
    flow.set(call.outs[0], [Field(field.labels, zero=call.name in Trait.NOISE) for field in fields])


@register_rule(*aten("clamp clamp_min clamp_max hardtanh", IN_PLACE))
def clamps(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass zeros if the bounds are numbers with 0 between them."""
    limits = (-1, 1) if "hardtanh" in call.name else (None, None)
    low = call.arg(1, "max" if "clamp_max" in call.name else "min_val" if "hardtanh" in call.name else "min", limits[0])
    high = call.arg(2, "max_val" if "hardtanh" in call.name else "max", limits[1])
    if "clamp_max" in call.name:
        low, high = None, low
    if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        moves_zero(flow, call)
        return
    between = (low is None or low <= 0) and (high is None or high >= 0)
    flow.set(call.out, [Field(field.labels, field.zero and between) for field in flow.fields(call.args[0])])


@register_rule("aten.pow", "aten.pow_")
def power(flow: LabelFlow, call: OperatorCall) -> None:
    """Pass zeros if the exponent is a positive number."""
    exponent = call.args[1]
    positive = isinstance(exponent, (int, float)) and exponent > 0
    if isinstance(exponent, (int, float)) and exponent < 0:
        flow.divide_by(call.args[0])
    (keeps_zero if positive else moves_zero)(flow, call)


@register_rule(*aten(SUMS, IN_PLACE))
def sums(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge operands whose sum is zero only if all are; the scale `alpha` does not matter."""
    fields = broadcast(flow, call.args[:2] if "lerp" not in call.name else call.args[:3], product=False)
    flow.set(call.out, [Field(field.labels, field.zero) for field in fields])


@register_rule(*aten(PRODUCTS, IN_PLACE))
def products(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge factors whose product is zero if any is; a quotient, if the numerator is and the denominator is not."""
    fields = broadcast(flow, call.args[:2], product=True)
    if "mul" not in call.name and "and" not in call.name:
        if "xlogy" not in call.name:
            flow.divide_by(call.args[1])
        above, below = (zero_spans(_aligned(flow, operand, call.out.dim())) for operand in call.args[:2])
        finite = [{*field.span}.isdisjoint({axis for span in below for axis in span}) for field in fields]
        fields = [Field(f.labels, f.span in above and is_finite) for f, is_finite in zip(fields, finite, strict=True)]
    flow.set(call.out, fields)


@register_rule(*aten(SLOPES, IN_PLACE), "aten.polar")
def zero_with_first(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge all tensors; the result is zero where the first is.

    It is a gradient in a pointwise backward pass, or the lengths of complex numbers that are given by angles.
    """
    fields = broadcast(flow, [argument for argument in call.args if isinstance(argument, torch.Tensor)], product=False)
    flow.set(call.out, zero_where(fields, _aligned(flow, call.args[0], call.out.dim())))


def _aligned(flow: LabelFlow, operand: Any, ndim: int) -> list[Field]:
    return aligned(flow, operand, ndim)[1] if isinstance(operand, torch.Tensor) else []


@register_rule(*aten("addcmul addcdiv where masked_fill", IN_PLACE), "aten._prelu_kernel")
def ternary(flow: LabelFlow, call: OperatorCall) -> None:
    """Merge all operands; the result is zero where every value that it may be made of is."""
    fields = broadcast(flow, [argument for argument in call.args if isinstance(argument, torch.Tensor)], product=False)
    first, *others = (zero_spans(_aligned(flow, operand, call.out.dim())) for operand in call.args)
    if "addcdiv" in call.name:
        flow.divide_by(call.args[2])
    if "addc" in call.name:
        zero = first & (others[0] | others[1] if "mul" in call.name else others[0] - others[1])
    elif call.name == "aten.where":
        zero = set[tuple[int, ...]]().union(*others)
        for value, spans in zip(call.args[1:], others, strict=True):
            zero = zero if is_zero(value) else zero & spans
    else:  # PReLU maps 0 to 0; masks may fill with another number
        zero = first if "prelu" in call.name or is_zero(call.args[2]) else set()
    flow.set(call.out, [Field(field.labels, field.span in zero) for field in fields])


def is_zero(value: Any) -> bool:
    """Return whether a value is the number 0, if need be as a tensor; what others hold differs from input to input."""
    number = getattr(value, "_prunekit_number", value)
    return not isinstance(number, torch.Tensor) and bool(number == 0)


@register_rule("aten.scalar_tensor", traits=[Trait.MAKES])
def number(flow: LabelFlow, call: OperatorCall) -> None:
    """Remember the number that `torch.where` and others make a tensor of."""
    call.out._prunekit_number = call.args[0]


@register_rule("aten.copy_")
def copy(flow: LabelFlow, call: OperatorCall) -> None:
    """Give the target the fields of the source; axes along which the source is broadcast have no labels."""
    target, source = call.args[:2]
    read = aligned(flow, source, target.dim())[1]
    fields = broadcast(flow, [target, source], product=False) if flow.fields(target) else read
    flow.set(call.out, zero_where(fields, read))


@register_rule(*aten("zeros ones empty full rand randn"), traits=[Trait.MAKES])
def made(flow: LabelFlow, call: OperatorCall) -> None:
    """Give new labels to every axis: what a tensor meets tells which of its sizes are numbers of channels.

    A state of `hidden_size` zeros is then coupled with what it meets; the trial tells whether its size really follows.
    """
    flow.set(call.out, flow.made_labels(call.out, range(call.out.dim()), zero=_is_zero(call)))


def _is_zero(call: OperatorCall) -> bool:
    """Return whether a new tensor has zeros alone, for removed channels at least."""
    value = call.arg(2 if "new_" in call.name else 1, "fill_value") if "full" in call.name else None
    return "zeros" in call.name or call.name in Trait.NOISE or (isinstance(value, (int, float)) and value == 0)


@register_rule(*aten("new_zeros new_ones new_empty new_empty_strided new_full"), traits=[Trait.MAKES])
def made_like(flow: LabelFlow, call: OperatorCall) -> None:
    """Give a new tensor the labels of another if it has its shape, else new labels."""
    if call.out.shape == call.args[0].shape:
        flow.set(call.out, [Field(field.labels, _is_zero(call)) for field in flow.fields(call.args[0])])
    else:
        made(flow, call)


@register_rule("aten.zeros_like", "aten.zero", "aten.zero_")
def zeros(flow: LabelFlow, call: OperatorCall) -> None:
    """Give zeros in the shape of a tensor its labels."""
    flow.set(call.out, [Field(field.labels, zero=True) for field in flow.fields(call.args[0])])

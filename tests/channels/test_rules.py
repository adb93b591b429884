"""Rules one by one: whether a removed channel stays exactly zero is a promise, so it is checked on real zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rule_mode import RuleMode
from torch import Tensor

from prunekit.channels.labels.label_flow import Field, LabelFlow, along
from prunekit.channels.rules.pointwise import KEEPS_ZERO
from prunekit.channels.rules.rule import RULES, register_rule

Operator = Callable[[Tensor], Tensor]
SIZE = 6
ROW, ROWS = torch.tensor([1]), torch.tensor([[1], [0]])

POINTWISE: dict[str, Operator] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh above": lambda x: F.hardtanh(x, 0.5, 2.0),
    "hardswish": F.hardswish,
    "hardswish by hand": lambda x: x * F.relu6(x + 3) / 6,
    "silu": F.silu,
    "silu by hand": lambda x: x * torch.sigmoid(x),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "elu plus one": lambda x: F.elu(x) + 1,
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "leaky": F.leaky_relu,
    "tanh": torch.tanh,
    "softsign": F.softsign,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "cos": torch.cos,
    "sin": torch.sin,
    "erf": torch.erf,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "power": lambda x: x**3,
    "power 0": lambda x: x**0,
    "power -1": lambda x: x**-1,
    "of two": lambda x: 2**x,
    "neg": torch.neg,
    "abs": torch.abs,
    "round": torch.round,
    "nan_to_num": torch.nan_to_num,
    "clamp min": lambda x: x.clamp(min=0),
    "clamp above": lambda x: x.clamp(min=0.1),
    "clamp below": lambda x: x.clamp(max=-0.1),
    "clamp max": lambda x: x.clamp(max=6),
    "clamp both": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: torch.clamp_min(x, 0.1),
    "clamp_max": lambda x: torch.clamp_max(x, -0.1),
    "clamp tensor": lambda x: x.clamp(min=torch.full((1, 1), 0.5, dtype=x.dtype)),
    "threshold": lambda x: F.threshold(x, 0.1, 20),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "plus number": lambda x: x + 1,
    "plus 0": lambda x: x + 0,
    "minus from": lambda x: 1 - x,
    "times number": lambda x: x * 3,
    "over number": lambda x: x / 3,
    "number over": lambda x: 3 / x,
    "over itself": lambda x: x / x,
    "over norm": lambda x: x / x.norm(dim=1, keepdim=True) if x.dim() > 2 else x / x.abs(),
    "over one more": lambda x: x / (x.abs() + 1),
    "plus itself": lambda x: x + x,
    "equal": lambda x: (x == 0).double(),
    "equal to itself": lambda x: (x == x).double(),
    "not equal": lambda x: (x != 0).double(),
    "greater": lambda x: (x > 0).double(),
    "greater or equal": lambda x: (x >= 0).double(),
    "less or equal": lambda x: (x <= 0).double(),
    "less": lambda x: (x < 1).double(),
    "less than itself": lambda x: (x < x).double(),
    "not": lambda x: (~(x > 0)).double(),
    "and": lambda x: ((x > 0) & (x > 0)).double(),
    "maximum": lambda x: torch.maximum(x, x * 2),
    "minimum with number": lambda x: torch.minimum(x, torch.tensor(-1.0, dtype=x.dtype)),
    "atan2": lambda x: torch.atan2(x, x),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "lerp to 1": lambda x: torch.lerp(x, torch.ones(1, 1, dtype=x.dtype), 0.3),
    "remainder": lambda x: x % 2,
    "remainder of two": lambda x: 2 % x,
    "fmod": lambda x: torch.fmod(x, x + 2),
    "xlogy": lambda x: torch.xlogy(x, x),
    "hypot": lambda x: torch.hypot(x, x),
    "logaddexp": lambda x: torch.logaddexp(x, x),
    "heaviside": lambda x: torch.heaviside(x, torch.ones(1, 1, dtype=x.dtype)),
    "frac": torch.frac,
    "isfinite": lambda x: torch.isfinite(x).double(),
    "rrelu": F.rrelu,
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(1.0, dtype=x.dtype)),
    "masked fill": lambda x: x.masked_fill(x <= 0, 1.0),
    "zeros like": torch.zeros_like,
    "ones like": torch.ones_like,
    "new zeros": lambda x: x.new_zeros(x.shape),
    "new ones": lambda x: x.new_ones(x.shape),
    "in place": lambda x: x.clone().add_(1),
    "in place relu": lambda x: x.clone().relu_(),
    "in place fill": lambda x: x.clone().fill_(2),
    "in place noise": lambda x: torch.empty_like(x).uniform_(0.9, 1.1),
    "times noise": lambda x: x * torch.empty_like(x).normal_(),
    "in place zero": lambda x: x.clone().zero_(),
    "float32 and back": lambda x: x.float().double(),
    "detach": lambda x: x.detach() * 1,
    "softmax elsewhere": lambda x: x.softmax(0),
    "cumsum elsewhere": lambda x: x.cumsum(0),
    "sum elsewhere": lambda x: x.sum(0, keepdim=True),
    "mean elsewhere": lambda x: x.mean(0, keepdim=True),
    "amax elsewhere": lambda x: x.amax(0, keepdim=True),
    "var elsewhere": lambda x: x.var(0, keepdim=True),
    "norm elsewhere": lambda x: x.norm(dim=0, keepdim=True),
    "sort elsewhere": lambda x: x.sort(0)[0],
    "order elsewhere": lambda x: x.argsort(0).double(),
    "topk elsewhere": lambda x: x.topk(1, 0)[0],
    "median elsewhere": lambda x: x.median(0).values,
    "cummax elsewhere": lambda x: x.cummax(0).values,
    "prod elsewhere": lambda x: x.prod(0, keepdim=True),
    "any elsewhere": lambda x: (x > 0).any(0, keepdim=True).double(),
    "all elsewhere": lambda x: (x <= 0).all(0, keepdim=True).double(),
    "index_select elsewhere": lambda x: x.index_select(0, ROW),
    "index_add": lambda x: x.index_add(0, ROW, x[1:]),
    "index_add in place": lambda x: x.clone().index_add_(0, ROW, x[1:]),
    "index_add of what is not zero": lambda x: x.index_add(0, ROW, x[1:].cos()),
    "index_add to what is not zero": lambda x: x.cos().index_add(0, ROW, x[1:]),
    "index_copy": lambda x: x.index_copy(0, ROW, x[1:].cos()),
    "index_reduce": lambda x: x.index_reduce(0, ROW, x[1:], "prod", include_self=False),
    "index_fill": lambda x: x.index_fill(0, ROW, 0),
    "index_fill with 1": lambda x: x.index_fill(0, ROW, 1),
    "scatter": lambda x: x.scatter(0, ROWS.expand_as(x), x.cos()),
    "scatter 0": lambda x: x.scatter(0, ROWS.expand_as(x), 0),
    "scatter 1": lambda x: x.scatter(0, ROWS.repeat(1, SIZE), 1),
    "scatter_add": lambda x: x.scatter_add(0, ROWS.expand_as(x), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, ROWS.expand_as(x), x, "amax", include_self=False),
    "scatter_reduce of what is not zero": lambda x: x.scatter_reduce(0, ROWS.expand_as(x), x.exp(), "mean"),
    "gather": lambda x: x.gather(0, ROWS.expand_as(x)),
    "gather by its own order": lambda x: x.gather(0, x.argsort(0)),
    "max elsewhere": lambda x: x.max(0, keepdim=True)[0],
    "place of the max elsewhere": lambda x: x.min(0, keepdim=True)[1].double(),
    "aminmax elsewhere": lambda x: torch.aminmax(x, dim=0, keepdim=True)[1],
    "cumprod elsewhere": lambda x: x.cumprod(0),
    "logcumsumexp elsewhere": lambda x: x.logcumsumexp(0),
    "logsumexp elsewhere": lambda x: x.logsumexp(0, keepdim=True),
    "nonzero counted elsewhere": lambda x: torch.count_nonzero(x, 0).double(),
    "masked fill 0": lambda x: x.masked_fill(ROWS > 0, 0.0),
    "where 0": lambda x: torch.where(ROWS > 0, x, 0.0),
    "where 1": lambda x: torch.where(ROWS > 0, 1.0, x),
    "where both": lambda x: torch.where(ROWS > 0, x, x.relu()),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.exp()),
    "renorm": lambda x: x.renorm(2, 1, 0.1),
    "tril elsewhere": lambda x: x.view(2, SIZE, 1, 1).tril().view(2, SIZE),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.5], dtype=x.dtype)).double(),
    "take": lambda x: torch.arange(9.0).double().take((x > 0).long() + 1),
    "fft elsewhere": lambda x: torch.fft.fft(x, dim=0).real,
    "spectrum elsewhere": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0).conj(), n=2, dim=0),
    "polar": lambda x: torch.view_as_real(torch.polar(x, x.exp()))[..., 1],
    "angle": lambda x: torch.complex(x.exp(), x).angle(),
    "gather of what is not zero": lambda x: x.exp().gather(0, x.argsort(0)),
}


def with_fields(tensor: Tensor, flow: LabelFlow, axis: int = 1) -> Tensor:
    """Gives a tensor labels on one axis, with the promise that removed entries are zero."""
    labels = flow.union.new(tensor.shape[axis])
    flow.set(tensor, [Field(along(labels, axis, tensor.dim()), True)])
    return tensor


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("name", POINTWISE)
def test_a_zero_that_is_promised_is_zero(name: str) -> None:
    flow = LabelFlow()
    removed = with_fields(torch.zeros(2, SIZE, dtype=torch.float64), flow)
    mode = RuleMode(flow)
    with mode:
        out = POINTWISE[name](removed)
    promised = any(field.zero for field in flow.fields(out))
    if promised:
        assert torch.equal(out, torch.zeros_like(out)), f"{name}(0) is not 0"
    assert not flow.locks


USED_AS_CONV_INPUT = [
    "relu",
    "relu6",
    "hardswish by hand",
    "silu by hand",
    "clamp min",
    "square",
    "power",
    "clamp both",
    "sort elsewhere",
    "topk elsewhere",
    "max elsewhere",
    "cumsum elsewhere",
    "cumprod elsewhere",
    "masked fill 0",
    "where both",
    "addcdiv",
    "index_add",
    "scatter_reduce",
    "gather",
    "fft elsewhere",
]


@pytest.mark.parametrize("name", USED_AS_CONV_INPUT)
def test_the_usual_activations_promise_zero(name: str) -> None:
    flow = LabelFlow()
    removed = with_fields(torch.zeros(2, SIZE, dtype=torch.float64), flow)
    with RuleMode(flow):
        out = POINTWISE[name](removed)
    assert [field.zero for field in flow.fields(out)] == [True]


def test_every_zero_keeping_operator_of_the_table_keeps_zero() -> None:
    """The table itself against torch, for all names that take one tensor."""
    called = 0
    for name in KEEPS_ZERO.split():
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, "default", None)
        if overload is None or len([a for a in overload._schema.arguments if not a.has_default_value()]) != 1:
            continue
        out = overload(torch.zeros(3, dtype=torch.float64))
        first = out[0] if isinstance(out, tuple) else out
        assert torch.equal(first, torch.zeros(3, dtype=torch.float64)), name
        called += 1
    assert called > 25


def test_a_second_rule_for_an_operator_is_refused() -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match=r"operator aten\.relu already has a rule"):
        register_rule("aten.relu")(lambda flow, call: None)
    assert before == RULES


@pytest.mark.parametrize("operator", ["add", "mul"])
def test_operands_of_one_size_are_merged(operator: str) -> None:
    flow = LabelFlow()
    a, b = (with_fields(torch.zeros(2, SIZE), flow) for _ in range(2))
    with RuleMode(flow):
        getattr(torch, operator)(a, b)
    assert flow.union.find(flow.fields(b)[0].labels).tolist() == [[1, 2, 3, 4, 5, 6]]


def test_a_fixed_operand_locks_and_a_broadcast_one_does_not() -> None:
    flow = LabelFlow()
    a, b = (with_fields(torch.zeros(2, SIZE), flow) for _ in range(2))
    with RuleMode(flow):
        a * torch.ones(2, 1)
        b * torch.ones(SIZE)
    assert flow.union.find(flow.fields(a)[0].labels).all()
    assert not flow.union.find(flow.fields(b)[0].labels).any()


def test_a_sum_is_zero_only_where_all_operands_are() -> None:
    flow = LabelFlow()
    a, b = (with_fields(torch.zeros(2, SIZE), flow) for _ in range(2))
    with RuleMode(flow):
        both, product = a + b, a.sigmoid() * b
        one = a + b.sigmoid()
    assert flow.fields(both)[0].zero
    assert flow.fields(product)[0].zero
    assert not flow.fields(one)[0].zero


@pytest.mark.parametrize("reduce", ["mean", "amax", "amin", "prod", "var", "std", "argmax", "logsumexp", "softmax"])
def test_reducing_over_the_labels_locks(reduce: str) -> None:
    flow = LabelFlow()
    tensor = with_fields(torch.ones(2, SIZE), flow)
    with RuleMode(flow):
        getattr(torch, reduce)(tensor, 1)
    assert not flow.union.find(flow.fields(tensor)[0].labels).any()


def test_a_sum_over_zeros_is_harmless_and_over_anything_else_locks() -> None:
    flow = LabelFlow()
    zeros, other = (with_fields(torch.zeros(2, SIZE), flow) for _ in range(2))
    with RuleMode(flow):
        assert flow.fields(zeros.sum(1)) == ()
        other.sigmoid().sum((0, 1))
    assert flow.union.find(flow.fields(zeros)[0].labels).all()
    assert not flow.union.find(flow.fields(other)[0].labels).any()


@pytest.mark.parametrize("order", [2, 1, 3.5, 0, float("inf")])
def test_a_norm_of_zeros_is_harmless(order: float) -> None:
    flow = LabelFlow()
    values, zeros = torch.tensor([[-2.0, 3.0, 0.5]]), torch.zeros(1, 3)
    kept, removed, other = with_fields(values, flow), with_fields(zeros, flow), with_fields(values.clone(), flow)
    with RuleMode(flow):
        both = torch.linalg.vector_norm(torch.cat([kept, removed], 1), order, dim=1)
        norm = torch.linalg.vector_norm(kept, order, dim=1)
        torch.linalg.vector_norm(other.cos(), order, dim=1)
    assert torch.equal(both, norm)
    assert flow.union.find(flow.fields(kept)[0].labels).all()
    assert not flow.union.find(flow.fields(other)[0].labels).any()


@pytest.mark.parametrize("order", [-1, float("-inf")])
def test_a_norm_that_zeros_change_locks(order: float) -> None:
    flow = LabelFlow()
    tensor = with_fields(torch.ones(2, SIZE), flow)
    with RuleMode(flow):
        torch.linalg.vector_norm(tensor, order, dim=1)
    assert not flow.union.find(flow.fields(tensor)[0].labels).any()


def test_contraction_over_what_is_not_zero_locks() -> None:
    flow = LabelFlow()
    left = with_fields(torch.zeros(2, SIZE), flow)
    weight = with_fields(torch.zeros(SIZE, 3), flow, axis=0)
    with RuleMode(flow):
        left.exp() @ weight.exp()
    assert not flow.union.find(flow.fields(left)[0].labels).any()


def test_glu_ties_both_halves() -> None:
    flow = LabelFlow()
    tensor = with_fields(torch.zeros(2, SIZE, 3), flow)
    with RuleMode(flow):
        out = F.glu(tensor, 1)
    (field,) = flow.fields(out)
    assert field.labels.reshape(-1).tolist() == [1, 2, 3]
    assert field.zero
    assert flow.union.find(flow.fields(tensor)[0].labels.reshape(-1)).tolist() == [1, 2, 3, 1, 2, 3]


def test_batch_norm_promises_zero_only_where_its_affine_is() -> None:
    flow = LabelFlow()
    x = with_fields(torch.zeros(2, SIZE, 3), flow)
    mean, variance, weight, bias = (with_fields(torch.zeros(SIZE), flow, axis=0) for _ in range(4))
    with RuleMode(flow):
        plain = F.batch_norm(x, mean, variance, weight, bias)
        unscaled = F.batch_norm(x, mean, variance)
        shifted = F.batch_norm(x, mean, variance, weight, bias.exp())
        moved = F.batch_norm(x.exp(), mean, variance)
        scaled = F.batch_norm(x.exp(), mean, variance, weight, bias)
    promises = [[field.zero for field in flow.fields(out)] for out in (plain, unscaled, shifted, moved, scaled)]
    assert promises == [[True], [True], [False], [False], [True]]
    assert flow.union.find(flow.fields(bias)[0].labels).tolist() == [1, 2, 3, 4, 5, 6]

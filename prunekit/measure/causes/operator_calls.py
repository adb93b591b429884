"""Calls of operators in a forward pass, by the module that runs them, with what they cost.

Convolutions and matrix products are recorded so that they can be run on their own, at other widths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.backends.session import OperatorKey, name_of
from prunekit.channels.tracing.execution import ModuleStack
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.measure.operator_costs import bytes_moved, is_idle, macs_of, subnormals
from prunekit.utils.inputs import call


@dataclass(frozen=True)
class OperatorCalls:
    """The calls of an operator in a module during one forward pass.

    Attributes:
        calls: number of them, without views.
        macs: multiply-accumulates of the whole batch; None if no rule is known.
        bytes: of inputs, parameters and results.
        subnormal: subnormal numbers in the results.
        layer: of the first call; None if it cannot be run at other widths.
    """

    calls: int
    macs: int | None
    bytes: int
    subnormal: int
    layer: IsolatedLayer | None


def record_calls(model: nn.Module, inputs: tuple[Any, ...]) -> dict[OperatorKey, OperatorCalls]:
    """Return the operators of one forward pass, with their costs, in the order of the first calls."""
    stack = ModuleStack(model)
    recorder = _CallRecorder(stack)
    with torch.no_grad(), stack, recorder:
        call(model, inputs)
    return {key: _combined(calls) for key, calls in recorder.calls.items()}


def _combined(calls: Sequence[OperatorCalls]) -> OperatorCalls:
    macs = [call.macs for call in calls]
    known = [count for count in macs if count is not None]
    return OperatorCalls(
        calls=sum(call.calls for call in calls),
        macs=sum(known) if len(known) == len(macs) else None,
        bytes=sum(call.bytes for call in calls),
        subnormal=sum(call.subnormal for call in calls),
        layer=calls[0].layer,
    )


class _CallRecorder(OperatorMode):
    def __init__(self, stack: ModuleStack) -> None:
        super().__init__()
        self.stack = stack
        self.calls: dict[OperatorKey, list[OperatorCalls]] = defaultdict(list)

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = run_operator(func, args, kwargs)
        idle = is_idle(func)
        call = OperatorCalls(
            calls=0 if idle else 1,
            macs=macs_of(func, args, kwargs, result),
            bytes=bytes_moved(func, args, kwargs, result),
            subnormal=0 if idle else subnormals(result),
            layer=layer_of(func, args),
        )
        self.calls[(self.stack.current, name_of(func))].append(call)
        return result


Widths = tuple[int, int]
"""Input channels and output channels."""


@dataclass(frozen=True)
class IsolatedLayer:
    """A convolution or matrix product of a model that can be run on its own, at other widths.

    Attributes:
        widths: in the model.
        tied: whether input and output channels are the same ones, as in a depthwise convolution.
        build: returns a call of the operator on random tensors of the given widths.
    """

    widths: Widths
    tied: bool
    build: Callable[[Widths], Callable[[], object]]


def layer_of(operator: Any, args: Sequence[Any]) -> IsolatedLayer | None:
    """Return the layer of a call of an operator; None if it is no layer, or cannot have other widths by itself."""
    rule = _RULES.get(operator.overloadpacket)
    return None if rule is None else rule(args)


aten = torch.ops.aten


def _convolution(args: Sequence[Any]) -> IsolatedLayer | None:
    inputs, weight, bias, *settings, transposed, padding, groups = args
    depthwise = groups == inputs.shape[1] == weight.shape[0]
    if transposed or (groups > 1 and not depthwise):
        return None
    like, kernel, form = _like(inputs), tuple(weight.shape[2:]), _form(inputs)
    batch, pixels, biased = inputs.shape[0], tuple(inputs.shape[2:]), bias is not None

    def build(widths: Widths) -> Callable[[], object]:
        into, out = widths
        x = torch.randn(batch, into, *pixels, **like).to(memory_format=form)
        w = torch.randn(out, 1 if depthwise else into, *kernel, **like).to(memory_format=form)
        b = torch.randn(out, **like) if biased else None
        return lambda: aten.convolution(x, w, b, *settings, False, padding, into if depthwise else 1)

    return IsolatedLayer((inputs.shape[1], weight.shape[0]), depthwise, build)


def _with_bias(args: Sequence[Any]) -> IsolatedLayer | None:
    return _product(args[1], args[2], biased=True)


def _without_bias(args: Sequence[Any]) -> IsolatedLayer | None:
    return _product(args[0], args[1], biased=False)


def _product(inputs: Tensor, matrix: Tensor, *, biased: bool) -> IsolatedLayer | None:
    """Return a product of (N, in) and (in, out), the transpose of a contiguous weight as in a linear layer."""
    rows, like = inputs.shape[0], _like(inputs)

    def build(widths: Widths) -> Callable[[], object]:
        into, out = widths
        x, w = torch.randn(rows, into, **like), torch.randn(out, into, **like).t()
        b = torch.randn(out, **like)
        return (lambda: torch.addmm(b, x, w)) if biased else (lambda: torch.mm(x, w))

    return IsolatedLayer((matrix.shape[0], matrix.shape[1]), False, build)


_RULES: dict[Any, Callable[[Sequence[Any]], IsolatedLayer | None]] = {
    aten.convolution: _convolution,
    aten.addmm: _with_bias,
    aten.mm: _without_bias,
}


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _form(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format

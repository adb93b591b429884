"""Times of operators: of every ATen operator in a forward pass, by the module that runs it.

On resnet18, mobilenet_v3_small and vit_b_16 the sums of the operators' times are within 2 % of those of
`torch.profiler` (minima of nine runs), which records five times as many events. Either way a timed call costs some
microseconds more than an untimed one; these are measured on operators that do nothing, and subtracted.

Convolutions and matrix products are recorded so that they can be run on their own, at other widths.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import ModuleStack
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.measure.latency.timing import Timer
from prunekit.measure.operator_costs import bytes_moved, is_idle, macs_of, subnormals
from prunekit.utils.inputs import call

OperatorKey = tuple[str, str]
"""Path of the innermost module that runs, and the operator's name."""
HOLD_CYCLES = 50_000_000
"""Clock cycles that a GPU waits while the operators of a forward pass are queued: some 25 ms."""


class OperatorTimer:
    """A clock for operators: calling it runs a forward pass and returns the milliseconds of all operators together.

    On CUDA the pass is queued while the GPU waits, so that events time the kernels and not the gaps between them.

    Args:
        clock_ms: cost of timing an operator, which is subtracted.

    Attributes:
        passes: milliseconds by module and operator, of every call so far.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], device: torch.device, clock_ms: float = 0.0) -> None:
        self.model, self.inputs, self.cuda, self.clock_ms = model, inputs, device.type == "cuda", clock_ms
        self.stack = ModuleStack(model)
        self.passes: list[Mapping[OperatorKey, float]] = []

    def __call__(self) -> float:
        """Callable[[], object] a forward pass, and append its times to `passes`."""
        clock = _OperatorClock(self.stack, _event if self.cuda else time.perf_counter_ns)
        with self.stack, clock:
            if self.cuda:
                torch.cuda.synchronize()
                torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
            call(self.model, self.inputs)
        if self.cuda:
            torch.cuda.synchronize()
        times: dict[OperatorKey, float] = defaultdict(float)
        for key, start, end in clock.spans:
            ms = start.elapsed_time(end) if self.cuda else (end - start) / 1e6
            times[key] += max(0.0, ms - self.clock_ms)
        self.passes.append(dict(times))
        return sum(times.values())


class _OperatorClock(OperatorMode):
    def __init__(self, stack: ModuleStack, mark: Callable[[], Any]) -> None:
        super().__init__()
        self.stack, self.mark = stack, mark
        self.spans: list[tuple[OperatorKey, Any, Any]] = []

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        start = self.mark()
        result = run_operator(func, args, kwargs)
        end = self.mark()
        self.spans.append(((self.stack.current, name_of(func)), start, end))
        return result


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def name_of(operator: Any) -> str:
    """Return an operator's name, without the prefix of ATen."""
    return str(operator.overloadpacket).removeprefix("aten.")


CHAIN = 200
RUNS = 15


@dataclass(frozen=True)
class Floor:
    """The time of an operator that does nothing.

    Attributes:
        operator_ms: of an operator on one number, in a model that is not timed.
        clock_ms: additional time if it is timed.
    """

    operator_ms: float
    clock_ms: float


def measure_floor(device: torch.device) -> Floor:
    """Measure both on a chain of additions: the least of several runs, as other processes only make it longer."""
    chain, one = _Chain(), torch.ones(1, device=device)
    clock = OperatorTimer(chain, (one,), device)
    with torch.no_grad():
        timed = min(clock() for _ in range(RUNS)) / CHAIN
        if device.type == "cuda":  # the GPU waits meanwhile, so that kernels alone are timed
            return Floor(timed, 0.0)
        plain = min(Timer(lambda: chain(one), device)() for _ in range(RUNS)) / CHAIN
    return Floor(plain, max(0.0, timed - plain))


class _Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(CHAIN):
            x = x + 1
        return x


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

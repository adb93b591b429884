"""The breakdown of the time of a dense and a pruned model into operators, by the module that runs them.

Convolutions and matrix products are recorded so that they can be run on their own, at other widths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.backends.eager import weight_movers
from prunekit.backends.session import OperatorKey, OperatorTimer, Timer, measure_floor, name_of
from prunekit.channels.tracing.execution import ModuleStack
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.measure.latency.machine import Load
from prunekit.measure.latency.timing import Contention, Estimate, alternate, doubts, paired_ratio, warm_up
from prunekit.measure.model_size import bytes_moved, is_idle, macs_of, subnormals
from prunekit.utils.inputs import call


@dataclass(frozen=True)
class OperatorCalls:
    """The calls of an operator in a module during one forward pass."""

    calls: int  # number of them, without views
    macs: int | None  # multiply-accumulates of the whole batch; None if no rule is known
    bytes: int  # of inputs, parameters and results
    subnormal: int  # subnormal numbers in the results
    layer: IsolatedLayer | None  # of the first call; None if it cannot be run at other widths


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
    """A convolution or matrix product of a model that can be run on its own, at other widths."""

    widths: Widths  # in the model
    tied: bool  # whether input and output channels are the same ones, as in a depthwise convolution
    # returns a call of the operator on random tensors of the given widths
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
    aten.addmm: lambda args: _product(args[1], args[2], biased=True),
    aten.mm: lambda args: _product(args[0], args[1], biased=False),
}


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _form(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format


@dataclass(frozen=True)
class OperatorFigures:
    """The figures of an operator of a module in one of the two models."""

    ms: float  # median of its time in one forward pass of the batch
    calls: int  # number of calls in that pass
    macs: float | None  # multiply-accumulates of one sample; None if no rule is known
    bytes: int  # read and written for the batch, parameters included
    intensity: float | None  # multiply-accumulates per byte; None if there are none


@dataclass(frozen=True)
class OperatorRow:
    """An operator of a module in both models."""

    module: str
    operator: str
    # dense, pruned: its figures; None if the model does not run it
    dense: OperatorFigures | None
    pruned: OperatorFigures | None
    speedup: float | None  # dense over pruned time
    ideal: float | None  # dense over pruned multiply-accumulates; None for operators that have none
    share: float  # of the pruned model's time
    # pruned time beyond the dense time over the ideal; for operators without multiply-accumulates over the ideal of the
    # whole model
    excess_ms: float


@dataclass(frozen=True)
class Breakdown:
    """The times of two models, as they are and operator by operator."""

    # dense_ms, pruned_ms: median of a forward pass of the batch, without an operator clock
    dense_ms: float
    pruned_ms: float
    speedup: Estimate  # dense over pruned, paired
    macs_ratio: float  # dense over pruned multiply-accumulates
    # dense_outside_ms, pruned_outside_ms: time outside of operators: Python, dispatch, and on CUDA the gaps between
    # kernels. The smaller of the median and the difference of the fastest rounds, as other processes only add to it; 0
    # unless the median's 95 % interval lies above 0.
    dense_outside_ms: float
    pruned_outside_ms: float
    # dense_operators_ms, pruned_operators_ms: sum of the medians of all operators. With the time outside it is nearly
    # the whole; the rest was taken by other processes.
    dense_operators_ms: float
    pruned_operators_ms: float
    floor_ms: float  # time of an operator on one number
    rows: tuple[OperatorRow, ...]  # the pruned model's slowest first
    # dense_calls, pruned_calls: calls of operators in each model, for experiments
    dense_calls: Mapping[OperatorKey, OperatorCalls]
    pruned_calls: Mapping[OperatorKey, OperatorCalls]
    contention: Contention | None = None  # for the CPU; None on other devices
    doubts: tuple[str, ...] = ()  # why the times support no claim

    @property
    def shortfall_ms(self) -> float:
        """Time of the pruned model beyond the dense one's over the ratio of their multiply-accumulates."""
        return self.pruned_ms - self.dense_ms / self.macs_ratio


def break_down(
    dense: nn.Module, pruned: nn.Module, inputs: tuple[Any, ...], *, batch: int, rounds: int, device: torch.device
) -> Breakdown:
    """Time two models in eval mode, without gradients; each round times both as a whole and both by operator."""
    calls = [record_calls(model, inputs) for model in (dense, pruned)]
    floor = measure_floor(device)
    clocks = [OperatorTimer(model, inputs, device, floor.clock_ms) for model in (dense, pruned)]
    with torch.no_grad():
        forwards = [partial(call, model, inputs) for model in (dense, pruned)]
        plain = [Timer(forward, device) for forward in forwards]
        runs: list[Callable[[], float]] = [*plain, *clocks]
        for run in runs:
            warm_up(run, device.type)
        for clock in clocks:
            clock.passes.clear()
        load = Load()
        with load.watched(), weight_movers(dense, pruned) as moves:
            times = alternate(runs, rounds, [*moves, *forwards] if device.type == "cpu" else [])
    figures = [_figures(found, clock.passes, batch) for found, clock in zip(calls, clocks, strict=True)]
    dense_ms, pruned_ms = (float(np.median(row)) for row in times[:2])
    macs = [sum(one.macs or 0 for one in by_key.values()) for by_key in figures]
    macs_ratio = macs[0] / macs[1] if all(macs) else 1.0
    operators = [sum(one.ms for one in by_key.values()) for by_key in figures]
    outside = [_outside(plain, whole) for plain, whole in zip(times[:2], times[2:], strict=True)]
    contention = load.contention(torch.get_num_threads()) if device.type == "cpu" else None
    return Breakdown(
        dense_ms=dense_ms,
        pruned_ms=pruned_ms,
        speedup=paired_ratio(times[0], times[1]),
        macs_ratio=macs_ratio,
        dense_outside_ms=outside[0],
        pruned_outside_ms=outside[1],
        dense_operators_ms=operators[0],
        pruned_operators_ms=operators[1],
        floor_ms=floor.operator_ms,
        rows=operator_rows(figures[0], figures[1], macs_ratio, operators[1] + outside[1]),
        dense_calls=calls[0],
        pruned_calls=calls[1],
        contention=contention,
        doubts=tuple(doubts(times[0] / times[1], contention)),
    )


def _outside(plain: np.ndarray[Any, Any], operators: np.ndarray[Any, Any]) -> float:
    """Return the time outside of operators from (N,) whole times and the (N,) sums over their operators."""
    surely = paired_ratio(plain, operators).low > 1
    return max(0.0, min(float(np.median(plain - operators)), float(plain.min() - operators.min()))) if surely else 0.0


def _figures(
    calls: Mapping[OperatorKey, OperatorCalls], passes: Sequence[Mapping[OperatorKey, float]], batch: int
) -> dict[OperatorKey, OperatorFigures]:
    found = {}
    for key, seen in calls.items():
        ms = float(np.median([times.get(key, 0.0) for times in passes]))
        intensity = seen.macs / seen.bytes if seen.macs and seen.bytes else None
        macs = None if seen.macs is None else seen.macs / batch
        found[key] = OperatorFigures(ms, seen.calls, macs, seen.bytes, intensity)
    return found


def operator_rows(
    dense: Mapping[OperatorKey, OperatorFigures],
    pruned: Mapping[OperatorKey, OperatorFigures],
    macs_ratio: float,
    pruned_ms: float,
) -> tuple[OperatorRow, ...]:
    """Return a row for each operator of either model, the pruned model's slowest first."""
    keys = dict.fromkeys((*pruned, *dense))
    rows = [_row(key, dense.get(key), pruned.get(key), macs_ratio, pruned_ms) for key in keys]
    return tuple(sorted(rows, key=lambda row: (row.pruned is None, -(row.pruned or row.dense or _NOTHING).ms)))


_NOTHING = OperatorFigures(0.0, 0, None, 0, None)


def _row(
    key: OperatorKey, dense: OperatorFigures | None, pruned: OperatorFigures | None, macs_ratio: float, pruned_ms: float
) -> OperatorRow:
    before, after = dense or _NOTHING, pruned or _NOTHING
    ideal = before.macs / after.macs if before.macs and after.macs else None
    return OperatorRow(
        module=key[0],
        operator=key[1],
        dense=dense,
        pruned=pruned,
        speedup=before.ms / after.ms if before.ms and after.ms else None,
        ideal=ideal,
        share=after.ms / pruned_ms,
        excess_ms=after.ms - before.ms / (ideal or macs_ratio),
    )

"""The tracer: runs a model on its examples while labels flow through every operator, see `LabelMode`.

A model is traced on a copy whose tensors hold no values, where its code allows. What one trace shows of the model, such
as tensors that are divided by, or experts that no token took, may change what the labels mean: then it is traced again.
"""

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.labels.constraints import Interchangeable, LockRecord, TensorAxis, positions_of
from prunekit.channels.labels.label_flow import Field, LabelFlow, along
from prunekit.channels.labels.label_union import LOCKED, Labels
from prunekit.channels.tracing import execution, kept_state
from prunekit.channels.tracing.cached_state import ModelCalls, model_calls
from prunekit.channels.tracing.channel_norms import NormFinder
from prunekit.channels.tracing.label_mode import LabelMode
from prunekit.channels.tracing.operator_mode import OnMeta
from prunekit.channels.tracing.substitutes import substitute_all
from prunekit.channels.tracing.traced_run import Examples, TracedRun
from prunekit.errors import ModelError, PrunekitError, reason_of, reraise_shortage
from prunekit.hooks.model_copy import has_gradients, named_tensors, with_tensors
from prunekit.utils.context import same_draws, seeded, takes_gradients
from prunekit.utils.display import listed
from prunekit.utils.inputs import InputSpec, example_advice, input_specs, is_batched, sample_count
from prunekit.utils.outputs import ALL_READ, ReadOutputs
from prunekit.utils.tensors import gather, map_tensors

OUTPUT = "output of the model"
LAYERS_NAMED = 4
"""How many layers behind an output the reason of a lock names."""
WIDEST = 8
"""Bytes of the widest integers."""
HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(eq=False)
class Trace:
    """All that a trace found, before its constraints are solved."""

    flow: LabelFlow  # the labels on all tensors, with locks and constraints
    labels: dict[str, tuple[Labels | None, ...]]  # by the name of a parameter or buffer, the labels of each of its axes
    runs: list[TracedRun]  # the operators of every forward pass
    activations: dict[execution.ActivationKey, Labels]  # labels along the channel axis of inputs and outputs of modules
    norms: NormFinder  # modules that take statistics over channels
    model: Callable[[], nn.Module]  # returns the traced model as long as anyone else has it, else the copy that ran
    example: tuple[Any, ...]  # the first example, on meta tensors if these were enough
    tables: dict[Any, Any] = field(default_factory=dict)  # memory tables that were counted later, see `memory_table`
    # modules that the model's own `fuse()` removes, whose multiply-accumulates do not count
    fused_away: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)  # how often a forward pass calls each module, by its path
    # paths of the modules that were called themselves, not as copies that the model makes of them
    ran: set[str] = field(default_factory=set)
    inputs: tuple[InputSpec, ...] = ()  # the tensors of the first example
    read: ReadOutputs = ALL_READ  # the outputs that are read
    state: kept_state.KeptState = kept_state.NO_STATE  # what the model keeps between its calls


def trace_model(
    model: nn.Module,
    examples: Examples,
    *,
    both_modes: bool = True,
    read: ReadOutputs = ALL_READ,
    interchangeable: Sequence[Interchangeable] = (),
) -> Trace:
    """Trace every example in eval mode, and in train mode too if the model reads its mode, as for auxiliary heads.

    The forward passes run on meta tensors, which compute nothing; a model that needs values runs for real, and in
    float32 where its own half precision lacks an operator on its device. Without `both_modes` only eval mode runs.
    `interchangeable` axes share labels, which the modules around them do not lock.

    Raises:
        ModelError: the model does not run on an example, uses none of its parameters, or cannot be copied.
        UsageError: the model has no output of a name that is read.
    """
    how = _Attempt(both_modes, read, tuple(interchangeable))
    with seeded(0):
        trace = None
        with suppress(Exception):  # any failure on meta tensors: the model reads values, or its device
            trace = _trace(model, examples, replace(how, meta=True))
        if trace is None:
            trace = _traced_on_values(model, examples, how)
    if not any(run.uses_own for run in trace.runs) and next(model.parameters(), None) is not None:
        raise ModelError(
            f"{type(model).__name__} runs on the example without using any of its parameters"
            f"{execution.hint_at_child(model)}"
        )
    trace.fused_away = execution.fused_away(model)
    trace.inputs = input_specs(examples[0])
    return trace


@dataclass(frozen=True)
class _Attempt:
    """One way to trace a model, with what earlier attempts found out about it."""

    # both_modes, read, interchangeable: as for `trace_model`
    both_modes: bool
    read: ReadOutputs
    interchangeable: tuple[Interchangeable, ...]
    meta: bool = False  # whether it runs on meta tensors
    gradients: bool = False  # whether gradients are recorded, because forward itself takes some
    wide: bool = False  # whether half precision runs in float32
    # axes of tensors that are divided by; removed entries keep their values under masks
    divided: frozenset[TensorAxis] = frozenset()
    # by the number of a run, operators whose results are kept aside and not read; None before they are known
    aside: Mapping[int, frozenset[int]] | None = None
    # modules that run besides, because others like them do; None before they are known
    alternatives: execution.Alternatives | None = None

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that is traced in place of another: without values on a meta device, else a copy."""
        if self.meta and has_gradients(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return tensor.detach().to(torch.float32 if self.wide and tensor.dtype in HALF else tensor.dtype, copy=True)


def _traced_on_values(model: nn.Module, examples: Examples, how: _Attempt) -> Trace:
    """Return the trace of the first attempt on values that runs: as it is, with gradients, in float32."""
    try:
        try:
            return _trace(model, examples, how)
        except Exception as error:
            if not takes_gradients(error):
                raise
        return _trace(model, examples, replace(how, gradients=True))
    except PrunekitError:
        raise
    except Exception as error:
        reraise_shortage(error)
        if any(tensor.dtype in HALF for _, tensor in named_tensors(model)):
            with suppress(Exception):  # the error in the own precision says more
                return _trace(model, examples, replace(how, wide=True))
        raise ModelError(
            f"{type(model).__name__} does not run on the example inputs: {reason_of(error)}; "
            f"{example_advice(model, examples, reason_of(error))}"
        ) from error


def _trace(model: nn.Module, examples: Examples, how: _Attempt) -> Trace:
    """Return the trace of one attempt; where it finds out more about the model, that of another with it."""
    stand_in, meta = how.stand_in, how.meta
    clone = with_tensors(model, {name: stand_in(tensor) for name, tensor in named_tensors(model)})
    flow = LabelFlow(clone)
    flow.substituted = substitute_all(clone)
    labels = _label_all(flow, clone, how)
    state = kept_state.label_state(clone, map_tensors(examples[0], stand_in), flow, stand_in, meta=meta)
    given = weakref.ref(model)

    def traced() -> nn.Module:
        found = given()
        return clone if found is None else found

    trace = Trace(flow, labels, [], {}, NormFinder(flow), traced, map_tensors(examples[0], stand_in), state=state)
    for index, example in enumerate(examples):
        inputs = map_tensors(example, stand_in)
        with OnMeta() if meta else nullcontext():
            calls = model_calls(clone, inputs, how.read)
        if calls.refused and meta:
            raise ModelError(calls.refused)  # it may run with values
        how = replace(how, read=calls.read)
        run = TracedRun(index, False, gradients=how.gradients, calls=calls, alternatives=how.alternatives or {})
        with execution.mode_for_trace(clone, False), execution.train_mode_watch(clone) as reads:
            _run(clone, inputs, run, trace, how)
        run.asks_mode.update(reads.paths)
        if reads.some and how.both_modes:
            _run_in_train_mode(clone, inputs, run.again(training=True, repeats=True), trace, how)
    if state.labels and is_batched(examples[0]):  # the methods that begin it anew for another number of samples run too
        run = trace.runs[0].again(doubled=True)
        inputs = run.inputs([map_tensors(examples[0], stand_in)])
        if kept_state.runs_on(clone, inputs, meta=meta):
            with execution.mode_for_trace(clone, False):
                _run(clone, inputs, run, trace, how)
        elif meta and kept_state.runs_on(model, run.inputs(examples), meta=False):
            raise ModelError("runs on another number of samples with values alone")
    trace.read = how.read
    return _again(model, examples, how, trace, clone) or trace


def _again(model: nn.Module, examples: Examples, how: _Attempt, trace: Trace, clone: nn.Module) -> Trace | None:
    """Trace a model once more with what its trace shows of it; return None if that is all known by now."""
    if how.aside is None and any(run.aside for run in trace.runs):
        inputs = [map_tensors(example, how.stand_in) for example in examples]
        if unread := kept_state.results_aside(trace.runs, clone, inputs):
            return _trace(model, examples, replace(how, aside=unread))
    divisors = _divisors(trace, model) if trace.flow.divisors else frozenset()
    if not divisors <= how.divided:  # they keep their values under masks, so that what is added to them is not zero
        return _trace(model, examples, replace(how, divided=how.divided | divisors))
    if how.alternatives is None and (
        found := execution.alternatives_of(clone, trace.ran, trace.activations, trace.flow.union)
    ):
        with suppress(Exception):  # some other module does not run on what these were given
            return _trace(model, examples, replace(how, alternatives=found, aside=None))
    return None


def _divisors(trace: Trace, model: nn.Module) -> frozenset[TensorAxis]:
    """Return the axes of parameters and buffers that are divided by, whole and entry by entry."""
    tensors = dict(named_tensors(model))  # of the given model: forward may have replaced buffers of the traced copy
    return frozenset(
        (name, axis)
        for labels, size in trace.flow.divisors
        for name, axes in trace.labels.items()
        for axis, own in enumerate(axes)
        if own is not None and tensors[name].numel() == size and np.array_equal(own, labels)
    )


def _label_all(flow: LabelFlow, clone: nn.Module, how: _Attempt) -> dict[str, tuple[Labels | None, ...]]:
    """Give the parameters and buffers of the copy labels, before any others, and return these by name and axis."""
    tensors = dict(named_tensors(clone))
    fresh = flow.union.new(sum(sum(tensor.shape) for tensor in tensors.values()))
    shared: dict[TensorAxis, Labels] = {}
    for found in how.interchangeable:
        name, axis = found.axes[0]
        flow.interchangeable[found.module] = positions_of(found, tensors[name].shape[axis], flow.union)
        shared.update(dict.fromkeys(found.axes, flow.interchangeable[found.module].labels))
    flow.first_made = flow.union.size
    labels = {}
    for name, tensor in tensors.items():
        own = {axis: vector for (other, axis), vector in shared.items() if other == name}
        nonzero = {axis for other, axis in how.divided if other == name}
        labels[name], fresh = _label(flow, tensor, fresh, own, nonzero)
        flow.divided += [vector for axis, vector in enumerate(labels[name]) if axis in nonzero and vector is not None]
    return labels


def _label(
    flow: LabelFlow, tensor: torch.Tensor, fresh: Labels, shared: Mapping[int, Labels], nonzero: Container[int]
) -> tuple[tuple[Labels | None, ...], Labels]:
    """Give every index of every axis of a tensor a label, fresh or shared; masks keep values along `nonzero`."""
    axes: list[Labels | None] = []
    # masks view entries as integers of their size, to set them to zero
    maskable = has_gradients(tensor) and tensor.element_size() <= WIDEST and tensor.layout == torch.strided
    for axis, size in enumerate(tensor.shape):
        labeled = size > 1 and maskable
        axes.append(shared.get(axis, fresh[:size]) if labeled else None)
        fresh = fresh[size:]
    labeled_axes = [(i, axis) for i, axis in enumerate(axes) if axis is not None]
    flow.set(tensor, [Field(along(axis, i, tensor.dim()), i not in nonzero) for i, axis in labeled_axes])
    return tuple(axes), fresh


def _run_in_train_mode(clone: nn.Module, example: tuple[Any, ...], run: TracedRun, trace: Trace, how: _Attempt) -> None:
    """Run the copy once more in train mode; what only that uses is locked if it does not run."""
    try:
        with execution.mode_for_trace(clone, True):
            _run(clone, example, run, trace, how)
    except Exception as error:  # inputs too small for an auxiliary head, targets that only training needs
        if how.meta:
            raise
        reason = f"train mode does not run on this example ({reason_of(error)}); what only it uses is locked"
        trace.flow.locks.append(LockRecord(reason, trace.flow.module, "", np.zeros(0, dtype=np.int64)))
        trace.norms.abandon()


def _run(clone: nn.Module, example: tuple[Any, ...], run: TracedRun, trace: Trace, how: _Attempt) -> None:
    """Run the copy once, and add what was recorded to the trace."""
    flow = trace.flow
    run.aside = (how.aside or {}).get(len(trace.runs), frozenset())
    calls: dict[tuple[str, str], int] = {}

    def note(path: str, kind: str, module: nn.Module, value: Any) -> None:
        ordinal = calls[path, kind] = calls.get((path, kind), -1) + 1
        if (path, kind, ordinal) in trace.activations:
            return
        tensor = next(iter(gather(value)), None)
        axis = None if tensor is None else execution.channel_axis(module, tensor.dim())
        for on_tensor in flow.fields(tensor):
            if on_tensor.span == (axis,):
                trace.activations[path, kind, ordinal] = on_tensor.labels.reshape(-1)

    def leave(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        trace.norms.leave(path, module, inputs, output)
        note(path, "output", module, output)
        mode.end(path, output)

    def run_other(module: nn.Module, args: Any, named: Any, output: Any) -> None:
        counted, flow.count_macs = flow.count_macs, False
        for one, other in zip(gather(output), gather(module(*args, **named)), strict=True):
            operands = [(tuple(tensor.shape), flow.fields(tensor)) for tensor in (one, other)]
            flow.set(one, flow.pointwise(operands, product=False))
        flow.count_macs = counted

    def enter(path: str, module: nn.Module, inputs: Any) -> None:
        note(path, "input", module, inputs)
        mode.begin(inputs)

    stack = execution.ModuleStack(clone, enter, leave, run.alternatives, run_other)
    flow.running = lambda: stack.paths
    earlier = trace.runs[-1] if run.training else None
    flow.count_macs = not run.training and not trace.runs  # what eval mode runs, and nothing else
    flow.batch = sample_count(example, 1)
    mode = LabelMode(flow, run, stack, earlier, example)
    plain = execution.plain_operators(clone)
    with same_draws(clone), kept_state.same_state(clone), stack, torch.set_grad_enabled(run.gradients), plain, mode:
        for output in run.calls.outputs(clone, example):
            flow.operator, flow.call = "", None
            run.returned.update(mode.makers([tensor for _, tensor in run.calls.read.tensors(output)]))
            _lock_outputs(flow, run.calls, output, trace)
            flow.count_macs = False  # of the first call alone
        if kept := kept_state.kept_tensors(clone, numbers=True).values():
            trace.state = kept_state.with_left(trace.state, flow, clone)
            numbers, others = ([one for one in kept if (one.numel() == 1) is single] for single in (True, False))
            run.aside = run.aside or kept_state.operators_aside(run, mode.makers(numbers), mode.makers(others))
    flow.end_run()  # the trace is kept, and all tensors of the run with it
    trace.calls.update({path: max(count, trace.calls.get(path, 0)) for path, count in stack.counts.items()})
    trace.ran |= stack.ran
    run.repeats = run.repeats and earlier is not None and len(run.operators) == len(earlier.operators)
    trace.runs.append(run)


def _lock_outputs(flow: LabelFlow, calls: ModelCalls, output: Any, trace: Trace) -> None:
    """Lock the labels of the outputs that are read; the reasons name them, and their layers, if there are several."""
    named = list(calls.read.tensors(output))
    several = len({name for name, _ in named}) > 1
    layers = _layers_of(flow, named, trace) if several else {}
    for name, tensor in named:
        flow.read(tensor)
        made = listed(layers[name], LAYERS_NAMED) if several else ""
        which = f", {name!r}{f', made by {made}' if made else ''}{calls.advice_on(name)}" if several else ""
        flow.lock(flow.fields(tensor), OUTPUT + which)


def _layers_of(flow: LabelFlow, named: list[tuple[str, torch.Tensor]], trace: Trace) -> dict[str, list[str]]:
    """Return by the name of an output the paths of the layers whose output channels it has, where they are free yet."""
    rows = {
        name.rpartition(".")[0]: flow.union.find(axes[0])
        for name, axes in trace.labels.items()
        if len(axes) > 1 and axes[0] is not None
    }
    found: dict[str, list[str]] = {name: [] for name, _ in named}
    for name, tensor in named:
        for labels in (one.labels for one in flow.fields(tensor)):
            roots = flow.union.find(labels)
            made = [path for path, own in rows.items() if np.isin(own[own != LOCKED], roots).any()]
            found[name] += [path for path in made if path not in found[name]]
    return found

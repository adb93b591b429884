"""The tracer: runs a model once on example inputs while labels flow through every ATen operator.

It is a dispatch mode, and builds no graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.labels import LOCKED, Field, Labels, along
from prunekit.channels.labels.constraints import FixedPositions, Interchangeable, LockRecord, TensorAxis, positions_of
from prunekit.channels.labels.label_flow import BUFFER_INSTEAD, MEETS_FIXED, LabelFlow, MadeAxes
from prunekit.channels.rules.convolution import FIXED_PARTNER
from prunekit.channels.rules.rule import OperatorCall, Trait, rule_of
from prunekit.channels.tracing.cached_state import ModelCalls, model_calls
from prunekit.channels.tracing.call_sites import RunningExpression, Site, caller_here, site_here, takes_sizes
from prunekit.channels.tracing.channel_norms import NormFinder
from prunekit.channels.tracing.execution import (
    PRUNE_FIRST,
    Alternatives,
    ModuleStack,
    TrainModeWatch,
    alternatives_of,
    channel_axis,
    fused_away,
    hint_at_child,
    is_quantizing,
    mode_for_trace,
    plain_operators,
    quantized_parts,
)
from prunekit.channels.tracing.kept_state import (
    NO_STATE,
    KeptState,
    kept_tensors,
    label_state,
    operators_aside,
    results_aside,
    runs_on,
    same_state,
    with_left,
)
from prunekit.channels.tracing.operator_mode import OnMeta, OperatorMode, run_on_meta, without_randomness
from prunekit.channels.tracing.storages import Storages, inner_of
from prunekit.channels.tracing.substitutes import substitute_all
from prunekit.channels.tracing.traced_run import TracedCall, TracedOperator, TracedRun, is_counted, signature
from prunekit.errors import ModelError, PrunekitError, reason_of, reraise_shortage
from prunekit.hooks.model_copy import has_gradients, named_tensors, owners, with_tensors
from prunekit.utils.context import same_draws, seeded, takes_gradients
from prunekit.utils.display import listed
from prunekit.utils.inputs import InputSpec, example_advice, input_specs, is_batched, sample_count
from prunekit.utils.outputs import ALL_READ, ReadOutputs
from prunekit.utils.tensors import gather, map_tensors

OUTPUT = "output of the model"
INSTEAD_OF_NESTED = "none follows nested tensors: give an example with as many tokens in each sample, without nesting"
LAYERS_NAMED = 4
"""How many layers behind an output the reason of a lock names."""
GIVEN = "input {}: if that is a state, let forward make it where none is given, and give none in the example"
WIDEST = 8
"""Bytes of the widest integers."""
HALF = frozenset({torch.float16, torch.bfloat16})
ActivationKey = tuple[str, str, int]
"""A module path, "input" or "output", and which call of the module it is, from 0."""


@dataclass(eq=False)
class Trace:
    """All that a trace found, before its constraints are solved.

    Attributes:
        flow: the labels on all tensors, with locks and constraints.
        labels: by the name of a parameter or buffer, the labels of each of its axes.
        runs: the operators of every forward pass.
        activations: labels along the channel axis of inputs and outputs of modules.
        norms: modules that take statistics over channels.
        model: returns the traced model as long as anyone else has it, else the copy that ran.
        example: the first example, on meta tensors if these were enough.
        tables: memory tables that were counted later, see `memory_table`.
        fused_away: modules that the model's own `fuse()` removes, whose multiply-accumulates do not count.
        calls: how often a forward pass calls each module, by its path.
        ran: paths of the modules that were called themselves, not as copies that the model makes of them.
        inputs: the tensors of the first example.
        read: the outputs that are read.
        state: what the model keeps between its calls.
    """

    flow: LabelFlow
    labels: dict[str, tuple[Labels | None, ...]]
    runs: list[TracedRun]
    activations: dict[ActivationKey, Labels]
    norms: NormFinder
    model: Callable[[], nn.Module]
    example: tuple[Any, ...]
    tables: dict[Any, Any] = field(default_factory=dict)
    fused_away: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    inputs: tuple[InputSpec, ...] = ()
    read: ReadOutputs = ALL_READ
    state: KeptState = NO_STATE


class LabelMode(OperatorMode):
    """A dispatch mode that applies the rules to every operator that runs inside it."""

    def __init__(
        self, flow: LabelFlow, run: TracedRun, stack: ModuleStack, earlier: TracedRun | None, inputs: Any
    ) -> None:
        super().__init__()
        self.made_by = {id(tensor): -1 for tensor in gather(inputs)}  # no id is reused: the storages hold them
        self.given = {id(tensor) for tensor in gather(inputs)}
        self.made_axes = MadeAxes()
        flow.of_input = lambda tensor, axis: id(tensor) in self.given and not self.made_axes.made(tensor, axis)
        self.beside = {id(tensor): tuple(tensor.shape) for tensor in gather(inputs)[1:]}
        self.flow, self.run, self.stack = flow, run, stack
        self.earlier = earlier.operators if earlier is not None else []
        self.storages = Storages()
        self.owners = owners(stack.model)
        self.names = {id(tensor): name for name, tensor in named_tensors(stack.model)}
        self.quantized = quantized_parts(stack.model)
        self._begun: list[tuple[int, tuple[int | None, ...], bool]] = []

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and let labels flow through it."""
        name = str(func._schema.name).replace("::", ".")
        out = without_randomness(name, run_on_meta(func, name, args, kwargs))  # as in the trial
        self._note(name, args, kwargs, out, counted=is_counted(func, name))
        return out

    def begin(self, inputs: Any) -> None:
        """Note the arguments with which a call of a module begins."""
        args, named = inputs
        made = tuple([self.made_by.get(id(arg)) for arg in args])
        plain = not named and all(arg is None for arg in args[1:])
        self._begun.append((len(self.run.operators), made, plain))

    def end(self, path: str, output: Any) -> None:
        """Record the call of a module that ends."""
        first, made, plain = self._begun.pop()
        outputs, place = self.makers(output), None
        if isinstance(output, tuple):
            tensors = [index for index, value in enumerate(output) if isinstance(value, torch.Tensor)]
            place = (tensors[0] if tensors else 0, len(output))
        self.run.module_calls.append(TracedCall(path, made, outputs, place, first, len(self.run.operators), plain))

    def makers(self, value: Any) -> tuple[int, ...]:
        """Return the numbers of the operators that made the tensors in a value."""
        return tuple([self.made_by[id(tensor)] for tensor in gather(value) if id(tensor) in self.made_by])

    def opaque(self, name: str, tensors: tuple[torch.Tensor, ...], out: Any) -> None:
        """Let labels flow through a higher-order operator as a whole."""
        self._note(name, tensors, {}, out, counted=False)

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], out: Any, *, counted: bool) -> None:
        """Let labels flow through an operator that ran, and record it."""
        flow = self.flow
        flow.module, flow.call, flow.operator = self.stack.current, self.stack.call, name
        inputs = gather((args, kwargs))
        inputs += [inner for tensor in inputs for inner in inner_of(tensor)]
        aside = len(self.run.operators) in self.run.aside
        for tensor in inputs:
            if not aside:
                flow.read(tensor, drops_axes=name in Trait.DROPS_AXES)
            owners = self.owners.get(id(tensor), ())
            self.run.uses_own = self.run.uses_own or bool(owners)
            if flow.module not in owners:
                self.run.borrowed.update([(flow.module, owner) for owner in owners])
        outs = tuple(gather(out))
        before = () if aside else tuple([field for tensor in inputs for field in flow.fields(tensor)])
        target = args[0] if name.endswith("_") and args and isinstance(args[0], torch.Tensor) else None
        self.given.update(map(id, outs) if any(id(tensor) in self.given for tensor in inputs) else ())
        flow.expression = self._expression(name, inputs) if before else None
        call = signature(args, kwargs, outs)
        earlier = len(flow.constraints)
        if aside:
            for tensor in outs:
                flow.set(tensor, ())
        elif not self._repeats(name, before, call, outs):
            self.run.repeats = False
            known, locks = flow.fields(target), len(flow.locks)
            self._apply(name, args, kwargs, out, before)
            if flow.expression and not any(isinstance(one, FixedPositions) for one in flow.constraints[earlier:]):
                self.run.whole.add(flow.expression)
            self._name_given(inputs, outs, locks)
            if flow.module in self.quantized:
                self._advise(locks, {record.reason for record in flow.locks[locks:]}, f"; {PRUNE_FIRST}")
            if name not in Trait.RESHAPES_IN_PLACE:
                self._written(target, known)
        if not aside:
            self._make_axes(OperatorCall(name, args, kwargs, out), inputs, before)
        fields = tuple([flow.fields(o) for o in outs])
        counted = counted and flow.module not in flow.substituted
        place = self._place((before and takes_sizes(name, args)) or name in Trait.MAKES)
        constraints = tuple(flow.constraints[earlier:])
        reads = tuple(dict.fromkeys([self.made_by[id(tensor)] for tensor in inputs if id(tensor) in self.made_by]))
        own = tuple([self.names[id(tensor)] for tensor in inputs if id(tensor) in self.names])
        operator = TracedOperator(
            name, flow.module, fields, before, counted, call, *place, constraints, self.stack.call, reads, own, aside
        )
        self.made_by.update(dict.fromkeys(map(id, outs), len(self.run.operators)))
        self.run.operators.append(operator)
        self.storages.note(operator, target, inputs, outs)

    def _expression(self, name: str, inputs: Sequence[torch.Tensor]) -> RunningExpression | None:
        """Return the running expression, if one of its tensors may be taken at stated positions."""
        takes = name in Trait.PICKS or (name in Trait.MEETS and len(inputs) == 2)
        if not takes or self.flow.module in self.flow.substituted:
            return None
        here = site_here(4)
        return None if here is None else RunningExpression(here[0], self.stack.path_of(here[1]))

    def _make_axes(self, call: OperatorCall, inputs: Sequence[torch.Tensor], before: tuple[Field, ...]) -> None:
        """Follow the axes that the model's code makes on tensors computed from inputs; parameters have their own."""
        given = [tensor for tensor in inputs if id(tensor) in self.given]
        if len(given) == len(inputs) and not any(self.made_axes.fields(tensor) for tensor in given):
            return
        rule = rule_of(call.name) if given and all(self.flow.is_made(field) for field in before) else None
        if rule is not None and not any(tensor.is_nested or inner_of(tensor) for tensor in inputs):
            for tensor in inputs:
                if id(tensor) not in self.given and not self.made_axes.fields(tensor):
                    self.made_axes.add(tensor)
            self.made_axes.module, self.made_axes.operator = self.flow.module, call.name
            rule(self.made_axes, call)

    def _place(self, sized: object) -> tuple[Site | None, str, Site | None, CodeType | None]:
        """Return where a method stands, and the path of its module; or where it called the function that runs."""
        here = site_here(4) if sized else None
        call = caller_here(4) if sized and here is None else None
        site, owner = here or (None, None)
        caller, owner, function = call or (None, owner, None)
        return site, self.stack.path_of(owner), caller, function

    def _apply(self, name: str, args: Any, kwargs: Any, out: Any, before: tuple[Field, ...]) -> None:
        if before or name in Trait.COUNTED or name in Trait.MAKES:
            rule = rule_of(name)
            tensors = gather((args, kwargs, out))
            if rule is None or any(tensor.is_nested or inner_of(tensor) for tensor in tensors):
                self.flow.lock(before, _without_rule(name, tensors))
                for tensor in gather(out):  # in place: what is known of its shape may be wrong now
                    self.flow.set(tensor, ())
            else:
                rule(self.flow, OperatorCall(name, args, kwargs, out))

    def _name_given(self, inputs: list[torch.Tensor], outs: tuple[torch.Tensor, ...], earlier: int) -> None:
        """Say in new locks that further inputs of the model fixed a size, and what to do if they are its states."""
        shape = next((self.beside[id(tensor)] for tensor in inputs if id(tensor) in self.beside), None)
        if shape is None:
            if self.flow.operator in Trait.MEETS and not all(
                id(tensor) in self.given or self.flow.fields(tensor) for tensor in inputs
            ):
                self._advise(earlier, (MEETS_FIXED,), BUFFER_INSTEAD)
        else:
            self.beside.update({id(tensor): shape for tensor in outs if not self.flow.fields(tensor)})
            self._advise(earlier, (MEETS_FIXED, FIXED_PARTNER), f"; {GIVEN.format(shape)}")

    def _advise(self, earlier: int, reasons: Container[str], advice: str) -> None:
        """Add advice to new locks of some reasons."""
        for index, record in enumerate(self.flow.locks[earlier:], earlier):
            if record.reason in reasons and not record.reason.endswith(advice):
                self.flow.locks[index] = replace(record, reason=record.reason + advice)

    def _repeats(self, name: str, before: tuple[Field, ...], call: Any, outs: tuple[torch.Tensor, ...]) -> bool:
        """Return whether the earlier run did exactly this, and if so take over the labels of its results."""
        index = len(self.run.operators)
        if index >= len(self.earlier):
            return False
        twin = self.earlier[index]
        same = twin.name == name and twin.module == self.flow.module and len(twin.inputs) == len(before)
        if not same or any(a is not b for a, b in zip(twin.inputs, before, strict=True)) or twin.call != call:
            return False
        for tensor, fields in zip(outs, twin.outputs, strict=True):
            self.flow.set(tensor, fields)
        return True

    def _written(self, target: Any, known: tuple[Field, ...]) -> None:
        """Record labels that an in-place write brings into a tensor: its size depended on them from the start.

        In a view they are locked, because the other views of its storage do not have them, unless those have labels on
        each of their axes: these are coupled by then. What is no longer zero is not zero in those either.
        """
        spans, axes = {field.span for field in known}, {axis for field in known for axis in field.span}
        fresh = [
            field
            for field in self.flow.fields(target)
            if field.span not in spans and not (len(field.span) > 1 and set(field.span) <= axes)
        ]
        now_zero = {field.span for field in self.flow.fields(target) if field.zero}
        if lost := [field.labels for field in known if field.zero and field.span not in now_zero]:
            self.flow.forget_zeros(self.storages.sharing(target), lost)
        if fresh and self.storages.shared(target):
            self.flow.lock(fresh, "written in place into a view of another tensor")
        elif fresh and (maker := self.storages.maker(target)) is not None:
            maker.outputs = (self.flow.fields(target),)


def _without_rule(name: str, tensors: Iterable[torch.Tensor]) -> str:
    """Return the reason of locks at an operator without a rule, with what an expert would do."""
    every = list(tensors)
    nested, quantizes = any(tensor.is_nested for tensor in every), is_quantizing(name, every)
    advice = INSTEAD_OF_NESTED if nested else PRUNE_FIRST if quantizes else ""
    return f"operator {name} has no rule" + (advice and f"; {advice}")


def trace_model(
    model: nn.Module,
    examples: list[tuple[Any, ...]],
    *,
    both_modes: bool = True,
    read: ReadOutputs = ALL_READ,
    interchangeable: Sequence[Interchangeable] = (),
) -> Trace:
    """Trace every example in eval mode, and in train mode too if the model reads its mode, as for auxiliary heads.

    The forward passes run on meta tensors, which compute nothing; a model that needs values runs for real, and in
    float32 where its own half precision lacks an operator on its device.

    Args:
        model: not changed.
        examples: see `prunekit.utils.inputs.as_example`.
        both_modes: whether train mode is considered.
        interchangeable: axes that share labels, which the modules around them do not lock.
        read: the outputs that are read.

    Raises:
        ModelError: the model does not run on an example, uses none of its parameters, or cannot be copied.
        UsageError: the model has no output of a name that is read.
    """
    trace = _traced(model, examples, both_modes, read, interchangeable)
    if not any(run.uses_own for run in trace.runs) and next(model.parameters(), None) is not None:
        raise ModelError(
            f"{type(model).__name__} runs on the example without using any of its parameters{hint_at_child(model)}"
        )
    trace.fused_away = fused_away(model)
    trace.inputs = input_specs(examples[0])
    return trace


def _traced(
    model: nn.Module,
    examples: list[tuple[Any, ...]],
    both_modes: bool,
    read: ReadOutputs,
    interchangeable: Sequence[Interchangeable],
) -> Trace:
    traced = partial(_trace, model, examples, both_modes=both_modes, read=read, interchangeable=interchangeable)
    with seeded(0):
        try:
            return traced(meta=True)
        except Exception:  # any failure on meta tensors: the model reads values, or its device
            pass
        try:
            try:
                return traced(meta=False)
            except Exception as error:
                if not takes_gradients(error):
                    raise
            return traced(meta=False, gradients=True)
        except PrunekitError:
            raise
        except Exception as error:
            reraise_shortage(error)
            if any(tensor.dtype in HALF for _, tensor in named_tensors(model)):
                with suppress(Exception):  # the error in the own precision says more
                    return traced(meta=False, wide=True)
            raise ModelError(
                f"{type(model).__name__} does not run on the example inputs: {reason_of(error)}; "
                f"{example_advice(model, examples)}"
            ) from error


def _trace(
    model: nn.Module,
    examples: list[tuple[Any, ...]],
    *,
    meta: bool,
    both_modes: bool,
    read: ReadOutputs,
    gradients: bool = False,
    wide: bool = False,
    alternatives: Alternatives | None = None,
    interchangeable: Sequence[Interchangeable] = (),
    divided: frozenset[TensorAxis] = frozenset(),
    aside: Mapping[int, frozenset[int]] | None = None,
) -> Trace:
    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if meta and has_gradients(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return tensor.detach().to(torch.float32 if wide and tensor.dtype in HALF else tensor.dtype, copy=True)

    stand_ins = {name: stand_in(tensor) for name, tensor in named_tensors(model)}
    clone = with_tensors(model, stand_ins)
    flow = LabelFlow(clone)
    flow.substituted = substitute_all(clone)
    fresh = flow.union.new(sum(sum(tensor.shape) for tensor in stand_ins.values()))
    shared: dict[TensorAxis, Labels] = {}
    for found in interchangeable:
        name, axis = found.axes[0]
        flow.interchangeable[found.module] = positions_of(found, stand_ins[name].shape[axis], flow.union)
        shared.update(dict.fromkeys(found.axes, flow.interchangeable[found.module].labels))
    flow.first_made = flow.union.size
    state = label_state(clone, map_tensors(examples[0], stand_in), flow, stand_in, meta=meta)
    labels = {}
    for name, tensor in named_tensors(clone):
        own = {axis: vector for (other, axis), vector in shared.items() if other == name}
        nonzero = {axis for other, axis in divided if other == name}
        labels[name], fresh = _label(flow, tensor, fresh, own, nonzero)
        flow.divided += [vector for axis, vector in enumerate(labels[name]) if axis in nonzero and vector is not None]
    given = weakref.ref(model)

    def traced() -> nn.Module:
        found = given()
        return clone if found is None else found

    trace = Trace(flow, labels, [], {}, NormFinder(flow), traced, map_tensors(examples[0], stand_in), state=state)
    others = alternatives or {}
    for index, example in enumerate(examples):
        inputs = map_tensors(example, stand_in)
        with OnMeta() if meta else nullcontext():
            calls = model_calls(clone, inputs, read)
        if calls.refused and meta:
            raise ModelError(calls.refused)  # it may run with values
        trace.read = read = calls.read
        run = TracedRun(index, training=False, gradients=gradients, calls=calls, alternatives=others)
        run.aside = (aside or {}).get(len(trace.runs), frozenset())
        with mode_for_trace(clone, False), TrainModeWatch(clone) as watch:
            _run(clone, inputs, run, trace)
        run.asks_mode.update(watch.read_by)
        if watch.was_read and both_modes:
            try:
                trained = run.again(training=True, repeats=True)
                trained.aside = (aside or {}).get(len(trace.runs), frozenset())
                with mode_for_trace(clone, True):
                    _run(clone, inputs, trained, trace)
            except Exception as error:  # inputs too small for an auxiliary head, targets that only training needs
                if meta:
                    raise
                reason = f"train mode does not run on this example ({reason_of(error)}); what only it uses is locked"
                flow.locks.append(LockRecord(reason, flow.module, "", np.zeros(0, dtype=np.int64)))
                trace.norms.abandon()
    if state.labels and is_batched(examples[0]):  # the methods that begin it anew for another number of samples run too
        run = trace.runs[0].again(doubled=True)
        run.aside = (aside or {}).get(len(trace.runs), frozenset())
        inputs = run.inputs([map_tensors(examples[0], stand_in)])
        if runs_on(clone, inputs, meta=meta):
            with mode_for_trace(clone, False):
                _run(clone, inputs, run, trace)
        elif meta and runs_on(model, run.inputs(examples), meta=False):
            raise ModelError("runs on another number of samples with values alone")
    traced_again = partial(
        _trace,
        model,
        examples,
        meta=meta,
        both_modes=both_modes,
        read=read,
        gradients=gradients,
        wide=wide,
        interchangeable=interchangeable,
    )
    if aside is None:
        inputs_of = [map_tensors(example, stand_in) for example in examples]
        if unread := results_aside(trace.runs, clone, inputs_of):
            return traced_again(alternatives=alternatives, divided=divided, aside=unread)
    divisors = _divisors(trace, stand_ins)
    if not divisors <= divided:  # they keep their values under masks, so that what is added to them is not zero
        return traced_again(alternatives=alternatives, divided=divided | divisors, aside=aside)
    again = alternatives_of(clone, trace.ran, trace.activations, flow.union) if alternatives is None else {}
    if again:
        with suppress(Exception):  # some other module does not run on what these were given
            return traced_again(alternatives=again, divided=divided)
    return trace


def _divisors(trace: Trace, tensors: Mapping[str, torch.Tensor]) -> frozenset[TensorAxis]:
    """Return the axes of parameters and buffers that are divided by, whole and entry by entry."""
    return frozenset(
        (name, axis)
        for labels, size in trace.flow.divisors
        for name, axes in trace.labels.items()
        for axis, own in enumerate(axes)
        if own is not None and tensors[name].numel() == size and np.array_equal(own, labels)
    )


def _label(
    flow: LabelFlow, tensor: torch.Tensor, fresh: Labels, shared: Mapping[int, Labels], nonzero: Container[int]
) -> tuple[tuple[Labels | None, ...], Labels]:
    """Give every index of every axis of a parameter or float buffer a label of its own, fresh or shared with others.

    Removed entries along the axes `nonzero` keep their values under masks.
    """
    axes: list[Labels | None] = []
    for axis, size in enumerate(tensor.shape):
        labeled = size > 1 and _is_maskable(tensor)
        axes.append(shared.get(axis, fresh[:size]) if labeled else None)
        fresh = fresh[size:]
    labeled_axes = [(i, axis) for i, axis in enumerate(axes) if axis is not None]
    flow.set(tensor, [Field(along(axis, i, tensor.dim()), i not in nonzero) for i, axis in labeled_axes])
    return tuple(axes), fresh


def _is_maskable(tensor: torch.Tensor) -> bool:
    """Return whether masks can zero entries of a tensor, for which they view it as integers of its element size."""
    return has_gradients(tensor) and tensor.element_size() <= WIDEST and tensor.layout == torch.strided


def _run(clone: nn.Module, example: tuple[Any, ...], run: TracedRun, trace: Trace) -> None:
    flow = trace.flow
    calls: dict[tuple[str, str], int] = {}

    def note(path: str, kind: str, module: nn.Module, value: Any) -> None:
        ordinal = calls[path, kind] = calls.get((path, kind), -1) + 1
        if (path, kind, ordinal) in trace.activations:
            return
        tensor = next(iter(gather(value)), None)
        axis = None if tensor is None else channel_axis(module, tensor.dim())
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

    stack = ModuleStack(clone, enter, leave, run.alternatives, run_other)
    flow.running = lambda: stack.paths
    earlier = trace.runs[-1] if run.training else None
    flow.count_macs = not run.training and not trace.runs  # what eval mode runs, and nothing else
    flow.batch = sample_count(example, 1)
    mode = LabelMode(flow, run, stack, earlier, example)
    plain = plain_operators(clone)
    with same_draws(clone), same_state(clone), stack, torch.set_grad_enabled(run.gradients), plain, mode:
        for output in run.calls.outputs(clone, example):
            flow.operator, flow.call = "", None
            run.returned.update(mode.makers([tensor for _, tensor in run.calls.read.tensors(output)]))
            _lock_outputs(flow, run.calls, output, trace)
            flow.count_macs = False  # of the first call alone
        trace.state = with_left(trace.state, flow, clone)
        kept = kept_tensors(clone, numbers=True).values()
        numbers, others = ([one for one in kept if (one.numel() == 1) is single] for single in (True, False))
        run.aside = run.aside or operators_aside(run, mode.makers(numbers), mode.makers(others))
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

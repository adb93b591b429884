"""Runs a model once on example inputs while labels flow through every ATen operator: a dispatch mode, no graph.

Output shapes of the commonest operators on meta tensors, without torch's slower Python kernels for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.constraints import LockRecord
from prunekit.channels.cut.model_copy import fused_away, has_gradients, named_tensors, owners, with_tensors
from prunekit.channels.labels import Field, Labels, along
from prunekit.channels.rewrite.call_sites import Site, caller_here, site_here, takes_sizes
from prunekit.channels.rewrite.substitutes import substitute_all
from prunekit.channels.rules.compute import COUNTED
from prunekit.channels.rules.pointwise import MADE
from prunekit.channels.rules.rule import Call, rule_of
from prunekit.channels.tolerance import without_chance
from prunekit.channels.tracing.dispatch_modes import HALF, OperatorMode, run_operator
from prunekit.channels.tracing.execution import ModuleStack, TrainModeWatch, mode_for_trace, plain_attention
from prunekit.channels.tracing.flow import Flow
from prunekit.channels.tracing.operators import NormWatch, Operator, Run, is_counted, signature
from prunekit.channels.tracing.storages import Storages, inner_of
from prunekit.errors import ModelError, PrunekitError, reason_of
from prunekit.utils.context import same_draws, seeded, takes_gradients
from prunekit.utils.inputs import InputSpec, batch_size_of, call, example_advice, input_specs
from prunekit.utils.tensors import gather, map_tensors, tensors_in

_UNARY = (
    "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "elu", "selu", "leaky_relu", "tanh", "sigmoid",
    "hardsigmoid", "softplus", "mish", "neg", "exp", "clone",
)  # fmt: skip
_BINARY = ["add", "sub", "mul", "div"]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if kwargs else _like(args[0])


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _binary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[:2]
    if not isinstance(right, torch.Tensor) or left.dtype != right.dtype or left.dim() != right.dim():
        return NotImplemented
    if left.shape == right.shape and left.stride() == right.stride():
        return _like(left)
    shape = [max(a, b) if 1 in (a, b) else a for a, b in zip(left.shape, right.shape, strict=True)]
    fits = all(b in (1, size) for b, size in zip(right.shape, shape, strict=True))
    return torch.empty(shape, dtype=left.dtype, device="meta") if fits else NotImplemented


def _binary_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = _binary(args, kwargs)
    return args[0] if out is not NotImplemented and out.shape == args[0].shape else NotImplemented


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _like(args[0]), args[0].new_empty(0), args[0].new_empty(0)


def _batch_norm_eval(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if args[5] else _batch_norm(args, kwargs)


def _convolution(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, weight, _, stride, padding, dilation, transposed, _, groups = args
    spatial = source.dim() - 2
    plain = (
        not kwargs and not transposed and weight.dim() == source.dim() and source.shape[1] == weight.shape[1] * groups
    )
    if not plain or not all(len(values) in (1, spatial) for values in (stride, padding, dilation)):
        return NotImplemented
    sizes = []
    for axis in range(spatial):
        step, pad, spread = (v[axis if len(v) > 1 else 0] for v in (stride, padding, dilation))
        size = (source.shape[axis + 2] + 2 * pad - spread * (weight.shape[axis + 2] - 1) - 1) // step + 1
        if size < 1:
            return NotImplemented
        sizes.append(size)
    return torch.empty((source.shape[0], weight.shape[0], *sizes), dtype=source.dtype, device="meta")


def _layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, shape = args[:2]
    leading = source.dim() - len(shape)
    if not source.is_contiguous() or list(source.shape[leading:]) != list(shape):
        return NotImplemented
    moments = (*source.shape[:leading], *[1] * len(shape))
    return _like(source), source.new_empty(moments), source.new_empty(moments)


def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, left, right = args
    fits = not kwargs and left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]
    if not fits or bias.shape != right.shape[1:] or not bias.dtype == left.dtype == right.dtype:
        return NotImplemented
    return left.new_empty((left.shape[0], right.shape[1]))


def _safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if kwargs or len(args) > 2 or not args[0].is_contiguous() else _like(args[0])


Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]
SHORTCUTS: dict[str, Shortcut] = {
    **{f"aten.{name}": _same for name in _UNARY},
    **{f"aten.{name}_": _written for name in _UNARY if name != "clone"},
    **{f"aten.{name}": _binary for name in _BINARY},
    **{f"aten.{name}_": _binary_written for name in _BINARY},
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten.native_batch_norm": _batch_norm_eval,
    "aten.convolution": _convolution,
    "aten.native_layer_norm": _layer_norm,
    "aten.addmm": _addmm,
    "aten._safe_softmax": _safe_softmax,
}
"""Operator -> its output, or NotImplemented where torch must decide."""


def run_on_meta(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on meta tensors, by a shortcut where there is one and its case is the plain one."""
    shortcut = SHORTCUTS.get(name)
    if shortcut is not None and isinstance(args[0], torch.Tensor) and args[0].is_meta and args[0].is_floating_point():
        out = shortcut(args, kwargs)
        if out is not NotImplemented:
            return out
    return run_operator(func, args, kwargs)


ActivationKey = tuple[str, str, int]


def channel_axis(module: nn.Module, ndim: int) -> int:
    """Return which axis of an activation holds a module's channels: the last one behind linear layers, else axis 1."""
    last = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention)
    return ndim - 1 if isinstance(module, last) or ndim < 2 else 1


@dataclass(eq=False)
class Trace:
    """All that a trace found, before constraints are resolved.

    Attributes:
        model: that was traced, as long as there is anyone else who has it; else the copy that ran.
        example: the first, on meta tensors where these were enough.
        tables: what was counted later, see `memory_table`.
        fused_away: modules that the model's own `fuse()` takes out, whose multiply-accumulates do not count.
        calls: how often a forward pass calls each module, by its path.
        ran: paths of the modules that it calls themselves, not copies that it makes of them.
        inputs: the tensors of the first example.
    """

    flow: Flow
    labels: dict[str, tuple[Labels | None, ...]]
    runs: list[Run]
    activations: dict[ActivationKey, Labels]
    norms: NormWatch
    model: Callable[[], nn.Module]
    example: tuple[Any, ...]
    tables: dict[Any, Any] = field(default_factory=dict)
    fused_away: tuple[str, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    inputs: tuple[InputSpec, ...] = ()


class LabelMode(OperatorMode):
    """Applies the rules to every operator that runs inside it."""

    def __init__(self, flow: Flow, run: Run, stack: ModuleStack, earlier: Run | None, inputs: Any) -> None:
        super().__init__()
        self.made_by = {id(tensor): -1 for tensor in tensors_in(inputs)}  # all of them are held, by the storages
        self.flow, self.run, self.stack = flow, run, stack
        self.earlier = earlier.operators if earlier is not None else []
        self.storages = Storages()
        self.owners = owners(stack.model)

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = str(func._schema.name).replace("::", ".")
        out = without_chance(name, run_on_meta(func, name, args, kwargs))  # the way that a trial takes
        self._note(name, args, kwargs, out, counted=is_counted(func, name))
        return out

    def opaque(self, name: str, tensors: tuple[torch.Tensor, ...], out: Any) -> None:
        self._note(name, tensors, {}, out, counted=False)

    def _note(self, name: str, args: Any, kwargs: dict[str, Any], out: Any, *, counted: bool) -> None:
        """Let labels flow through an operator that ran, and remembers it."""
        flow = self.flow
        flow.module, flow.call, flow.operator = self.stack.current, self.stack.call, name
        inputs = gather((args, kwargs))
        inputs += [inner for tensor in inputs for inner in inner_of(tensor)]
        for tensor in inputs:
            flow.read(tensor)
            lenders = self.owners.get(id(tensor), ())
            self.run.uses_own = self.run.uses_own or bool(lenders)
            if flow.module not in lenders:
                self.run.borrowed.update([(flow.module, owner) for owner in lenders])
        outs = tuple(gather(out))
        before = tuple([field for tensor in inputs for field in flow.fields(tensor)])
        target = args[0] if name.endswith("_") and args and isinstance(args[0], torch.Tensor) else None
        call = signature(args, kwargs, outs)
        earlier = len(flow.constraints)
        if not self._repeats(name, before, call, outs):
            self.run.repeats = False
            known = flow.fields(target)
            self._apply(name, args, kwargs, out, before)
            self._written(target, known)
        fields = tuple([flow.fields(o) for o in outs])
        counted = counted and flow.module not in flow.substituted
        site, caller, owner = self._place(before and takes_sizes(name, args))
        left = tuple(flow.constraints[earlier:])
        reads = tuple(dict.fromkeys([self.made_by[id(tensor)] for tensor in inputs if id(tensor) in self.made_by]))
        operator = Operator(
            name, flow.module, fields, before, counted, call, site, owner, caller, left, self.stack.call, reads
        )
        self.made_by.update(dict.fromkeys(map(id, outs), len(self.run.operators)))
        self.run.operators.append(operator)
        self.storages.note(operator, target, inputs, outs)

    def _place(self, sized: object) -> tuple[Site | None, Site | None, str]:
        """Return where a method stands, or where it called the function that runs; and the module whose method it
        is.
        """
        here = site_here(4) if sized else None
        call = caller_here(4) if sized and here is None else None
        site, owner = here or (None, None)
        caller, owner = call or (None, owner)
        return site, caller, self.stack.path_of(owner)

    def _apply(self, name: str, args: Any, kwargs: Any, out: Any, before: tuple[Field, ...]) -> None:
        if before or name in COUNTED or name in MADE:
            rule = rule_of(name)
            tensors = gather((args, kwargs, out))
            if rule is None or any(tensor.is_nested or inner_of(tensor) for tensor in tensors):
                self.flow.lock(before, f"operator {name} has no rule")
                for tensor in gather(out):  # in place: what is known of its shape may be wrong now
                    self.flow.set(tensor, ())
            else:
                rule(self.flow, Call(name, args, kwargs, out))

    def _repeats(self, name: str, before: tuple[Field, ...], call: Any, outs: tuple[torch.Tensor, ...]) -> bool:
        """Return whether the earlier run did just this: then its labels flowed already, and are taken over."""
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
        """Labels that an in-place write brings into a tensor: its size depended on them from the start.

        They are locked in a view: the other views of its storage do not carry them.
        """
        spans = {field.span for field in known}
        fresh = [field for field in self.flow.fields(target) if field.span not in spans]
        if fresh and self.storages.shared(target):
            self.flow.lock(fresh, "written in place into a view of another tensor")
        elif fresh and (maker := self.storages.maker(target)) is not None:
            maker.outputs = (self.flow.fields(target),)


def trace_model(model: nn.Module, examples: list[tuple[Any, ...]], *, both_modes: bool = True) -> Trace:
    """Trace every example in eval mode, and where the model asks for its mode in train mode too: auxiliary heads.

    The forward passes run on meta tensors, which compute nothing; a model that needs values runs for real, and in
    float32 where its own half precision lacks an operator on its device.

    Args:
        model: not changed.
        examples: see `prunekit.utils.inputs.as_example`.
        both_modes: whether train mode is looked at.

    Raises:
        ModelError: the model does not run on an example, runs something else than itself, or cannot be copied.
    """
    trace = _traced(model, examples, both_modes)
    if not any(run.uses_own for run in trace.runs) and next(model.parameters(), None) is not None:
        raise ModelError(
            f"{type(model).__name__} runs on the example without using any of its parameters{there(model)}"
        )
    trace.fused_away = fused_away(model)
    trace.inputs = input_specs(examples[0])
    return trace


def there(model: nn.Module) -> str:
    """For messages: the child that has all parameters of a model, and may be what is meant; nothing without one."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, child in model.named_children():
        if own == {id(parameter) for parameter in child.parameters()}:
            return f"; its .{name} ({type(child).__name__}) has them all: give that"
    return ""


def _traced(model: nn.Module, examples: list[tuple[Any, ...]], both_modes: bool) -> Trace:
    with seeded(0):
        try:
            return _trace(model, examples, meta=True, both_modes=both_modes)
        except Exception:  # any failure on meta tensors: the model looks at values, or at its device
            pass
        try:
            try:
                return _trace(model, examples, meta=False, both_modes=both_modes)
            except Exception as error:
                if not takes_gradients(error):
                    raise
            return _trace(model, examples, meta=False, both_modes=both_modes, gradients=True)
        except PrunekitError:
            raise
        except Exception as error:
            if any(tensor.dtype in HALF for _, tensor in named_tensors(model)):
                with suppress(Exception):  # whatever it says, what is wrong without it says more
                    return _trace(model, examples, meta=False, both_modes=both_modes, wide=True)
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
    gradients: bool = False,
    wide: bool = False,
) -> Trace:
    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if meta and has_gradients(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return tensor.detach().to(torch.float32 if wide and tensor.dtype in HALF else tensor.dtype, copy=True)

    stand_ins = {name: stand_in(tensor) for name, tensor in named_tensors(model)}
    clone = with_tensors(model, stand_ins)
    flow = Flow(clone)
    flow.substituted = substitute_all(clone)
    fresh = flow.union.new(sum(sum(tensor.shape) for tensor in stand_ins.values()))
    flow.first_made = flow.union.size
    labels = {}
    for name, tensor in named_tensors(clone):
        labels[name], fresh = _label(flow, tensor, fresh)
    given = weakref.ref(model)

    def traced() -> nn.Module:
        found = given()
        return clone if found is None else found

    trace = Trace(flow, labels, [], {}, NormWatch(flow), traced, map_tensors(examples[0], stand_in))
    for index, example in enumerate(examples):
        inputs = map_tensors(example, stand_in)
        with mode_for_trace(clone, False), TrainModeWatch(clone) as watch:
            _run(clone, inputs, Run(index, training=False, gradients=gradients), trace)
        if watch.asked and both_modes:
            try:
                with mode_for_trace(clone, True):
                    _run(clone, inputs, Run(index, training=True, repeats=True, gradients=gradients), trace)
            except Exception as error:  # inputs too small for an auxiliary head, targets that only training needs
                if meta:
                    raise
                reason = f"train mode does not run on this example ({reason_of(error)}); what only it uses stays"
                flow.locks.append(LockRecord(reason, flow.module, "", np.zeros(0, dtype=np.int64)))
                trace.norms.abandon()
    return trace


def _label(flow: Flow, tensor: torch.Tensor, fresh: Labels) -> tuple[tuple[Labels | None, ...], Labels]:
    """Give every index of every axis of a parameter or float buffer a label of its own, from the fresh ones."""
    axes: list[Labels | None] = []
    for size in tensor.shape:
        labeled = size > 1 and tensor.is_floating_point() and tensor.layout == torch.strided
        axes.append(fresh[:size] if labeled else None)
        fresh = fresh[size:]
    flow.set(tensor, [Field(along(axis, i, tensor.dim()), True) for i, axis in enumerate(axes) if axis is not None])
    return tuple(axes), fresh


def _run(clone: nn.Module, example: tuple[Any, ...], run: Run, trace: Trace) -> None:
    flow = trace.flow
    calls: dict[tuple[str, str], int] = {}

    def note(path: str, kind: str, module: nn.Module, value: Any) -> None:
        ordinal = calls[path, kind] = calls.get((path, kind), -1) + 1
        if (path, kind, ordinal) in trace.activations:
            return
        tensor = next(tensors_in(value), None)
        axis = None if tensor is None else channel_axis(module, tensor.dim())
        for on_tensor in flow.fields(tensor):
            if on_tensor.span == (axis,):
                trace.activations[path, kind, ordinal] = on_tensor.labels.reshape(-1)

    def leave(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        trace.norms.leave(path, module, inputs, output)
        note(path, "output", module, output)

    stack = ModuleStack(clone, lambda path, module, inputs: note(path, "input", module, inputs), leave)
    earlier = trace.runs[-1] if run.training else None
    flow.count_macs = not run.training and not trace.runs  # what eval mode runs, and nothing else
    flow.batch = batch_size_of(example)
    mode = LabelMode(flow, run, stack, earlier, example)
    with same_draws(clone), stack, torch.set_grad_enabled(run.gradients), plain_attention(), mode:
        output = call(clone, example)
    flow.operator, flow.call = "", None
    trace.calls.update({path: max(count, trace.calls.get(path, 0)) for path, count in stack.counts.items()})
    trace.ran |= stack.ran
    for tensor in tensors_in(output):
        flow.read(tensor)
        flow.lock(flow.fields(tensor), "output of the model")
    run.repeats = run.repeats and earlier is not None and len(run.operators) == len(earlier.operators)
    trace.runs.append(run)

"""Runs a model once on example inputs while labels flow through every ATen operator: a dispatch mode, no graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.channels.flow import Flow
from prunekit.channels.labels import Field, Labels, along
from prunekit.channels.nested import map_tensors, tensors_in
from prunekit.channels.rules import RULES, Call
from prunekit.channels.running import ModuleStack, mode_for_trace, plain_attention
from prunekit.channels.shortcut import run_on_meta

ActivationKey = tuple[str, str, int]


def channel_axis(module: nn.Module, ndim: int) -> int:
    """Which axis of an activation holds a module's channels: the last one behind linear layers, else axis 1."""
    last = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention)
    return ndim - 1 if isinstance(module, last) or ndim < 2 else 1


@dataclass(eq=False)
class Operator:
    """One operator call of a run: where it ran, and the fields of its outputs and inputs."""

    name: str
    module: str
    outputs: tuple[tuple[Field, ...], ...]
    inputs: tuple[Field, ...]


@dataclass(eq=False)
class Run:
    """The operators of one forward pass, in order."""

    training: bool
    operators: list[Operator] = field(default_factory=list)

    def same_calls(self, other: Run) -> bool:
        """Whether two runs called the same operators in the same modules."""
        return [(o.name, o.module) for o in self.operators] == [(o.name, o.module) for o in other.operators]


@dataclass(eq=False)
class Trace:
    """All that a trace found, before constraints are resolved."""

    flow: Flow
    labels: dict[str, tuple[Labels | None, ...]]
    runs: list[Run]
    activations: dict[ActivationKey, Labels]
    rewritten: frozenset[str]


class LabelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Applies the rules to every operator that runs inside it."""

    def __init__(self, flow: Flow, run: Run, stack: ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow, self.run, self.stack = flow, run, stack
        self.owners: dict[int, set[str]] = {}
        self.aliased: set[int] = set()
        self.alive: list[Any] = []
        self.rewritten: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name).replace("::", ".")
        out = run_on_meta(func, name, args, kwargs)
        flow = self.flow
        flow.module, flow.operator = self.stack.current, name
        inputs = list(tensors_in((args, kwargs)))
        outs = tuple(tensors_in(out))
        before = tuple(field for tensor in inputs for field in flow.fields(tensor))
        target = args[0] if name.endswith("_") and args and isinstance(args[0], torch.Tensor) else None
        known = flow.fields(target)
        if before:
            rule = RULES.get(name)
            if rule is None:
                flow.lock(before, f"operator {name} has no rule")
            else:
                rule(flow, Call(name, args, kwargs, out))
        self._follow_storage(target, known, inputs, outs)
        self.run.operators.append(Operator(name, flow.module, tuple(flow.fields(o) for o in outs), before))
        return out

    def _follow_storage(
        self, target: Any, known: tuple[Field, ...], inputs: list[torch.Tensor], outs: tuple[torch.Tensor, ...]
    ) -> None:
        """Notes views, in-place writes to a module's output, and locks new labels written through a view."""
        if target is not None:
            storage = target.untyped_storage()._cdata
            self.rewritten |= self.owners.get(storage, set())
            spans = {field.span for field in known}
            if storage in self.aliased:
                fresh = [field for field in self.flow.fields(target) if field.span not in spans]
                self.flow.lock(fresh, "written in place into a view of another tensor")
        elif outs:
            sources = {tensor.untyped_storage()._cdata for tensor in inputs}
            self.aliased |= {s for s in (out.untyped_storage()._cdata for out in outs) if s in sources}
        self.alive.extend(outs)

    def owned(self, path: str, output: Any) -> None:
        """Notes that these tensors are a module's output."""
        for tensor in tensors_in(output):
            self.owners.setdefault(tensor.untyped_storage()._cdata, set()).add(path)


def trace_model(model: nn.Module, examples: list[tuple[Any, ...]]) -> Trace:
    """Traces every example in eval mode, and in train mode too, so that auxiliary heads are seen.

    The forward passes run on meta tensors, which compute nothing; a model that needs values runs for real.
    """
    try:
        return _trace(model, examples, meta=True)
    except Exception:  # any failure on meta tensors: the model looks at values, or at its device
        return _trace(model, examples, meta=False)


def _trace(model: nn.Module, examples: list[tuple[Any, ...]], *, meta: bool) -> Trace:
    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta") if meta and tensor.is_floating_point() else tensor.detach()

    clone = with_tensors(model, {name: stand_in(tensor) for name, tensor in named_tensors(model)})
    flow = Flow()
    labels = {name: _label(flow, tensor) for name, tensor in named_tensors(clone)}
    trace = Trace(flow, labels, [], {}, frozenset())
    for example in examples:
        for training in (False, True):
            _run(clone, map_tensors(example, stand_in), training, trace)
    return trace


def _label(flow: Flow, tensor: torch.Tensor) -> tuple[Labels | None, ...]:
    """Gives every index of every axis of a parameter or float buffer a label of its own."""
    if not tensor.is_floating_point():
        return (None,) * tensor.dim()
    axes = tuple(flow.union.new(size) if size > 1 else None for size in tensor.shape)
    flow.set(tensor, [Field(along(axis, i, tensor.dim()), True) for i, axis in enumerate(axes) if axis is not None])
    return axes


def _run(clone: nn.Module, example: tuple[Any, ...], training: bool, trace: Trace) -> None:
    run, flow = Run(training), trace.flow
    calls: dict[tuple[str, str], int] = {}

    def note(path: str, kind: str, module: nn.Module, value: Any) -> None:
        ordinal = calls[path, kind] = calls.get((path, kind), -1) + 1
        tensor = next(tensors_in(value), None)
        if tensor is None or not flow.fields(tensor):
            return
        labels = flow.on_axis(tensor, channel_axis(module, tensor.dim()), "an activation labelled jointly")[0]
        if labels is not None:
            trace.activations.setdefault((path, kind, ordinal), labels)

    def leave(path: str, module: nn.Module, output: Any) -> None:
        note(path, "output", module, output)
        mode.owned(path, output)

    stack = ModuleStack(clone, lambda path, module, args: note(path, "input", module, args), leave)
    mode = LabelMode(flow, run, stack)
    flow.count_macs = not training and not trace.runs
    flow.batch = next((tensor.shape[0] for tensor in tensors_in(example) if tensor.dim()), 1)
    with mode_for_trace(clone, training), stack, torch.no_grad(), plain_attention(), mode:
        output = clone(*example)
    flow.operator = ""
    for tensor in tensors_in(output):
        flow.lock(flow.fields(tensor), "output of the model")
    trace.runs.append(run)
    trace.rewritten |= mode.rewritten

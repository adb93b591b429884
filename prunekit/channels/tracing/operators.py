"""The operators of a forward pass, as a trace records them.

Norms over channels, found while a trace runs: their labels pass, because masked runs normalize over kept ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.channels.constraints import Constraint, LockRecord
from prunekit.channels.labels import Field, Labels
from prunekit.channels.rewrite.call_sites import Site
from prunekit.channels.tracing.execution import ModuleCall
from prunekit.channels.tracing.flow import Flow
from prunekit.channels.tracing.storages import shape_of
from prunekit.utils.tensors import gather


@dataclass(eq=False, slots=True)
class Operator:
    """One operator call of a run: where it ran, what went in, and the fields of its inputs and outputs."""

    name: str
    module: str
    outputs: tuple[tuple[Field, ...], ...]
    inputs: tuple[Field, ...]
    counted: bool  # no view or plain copy, which a model needs or not depending on its widths; not of a substitute
    call: tuple[Any, ...]  # shapes of its tensors, and all other arguments
    site: Site | None = None  # where the model's Python gave it sizes
    owner: str = ""  # the module whose method that was
    caller: Site | None = None  # where a method called the function, outside of any method, in which it ran
    constraints: tuple[Constraint, ...] = ()  # that it left
    module_call: ModuleCall | None = None  # which of the calls of its module it ran in
    reads: tuple[int, ...] = ()  # operators, by their number in the run, whose results it took; -1: the model's inputs


_SAME_VALUES = frozenset(f"aten.{name}" for name in ("clone", "_to_copy", "contiguous", "_unsafe_view", "as_strided_"))


def is_counted(func: Any, name: str) -> bool:
    """Return whether an operator has a number of its own in the trial: views and plain copies do not."""
    return not func.is_view and name not in _SAME_VALUES


def signature(args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Return what decides how labels flow through a call, apart from the labels themselves."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return shape_of(value)
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return [plain(arg) for arg in args], {k: plain(v) for k, v in kwargs.items()}, [shape_of(out) for out in outs]


@dataclass(eq=False)
class Run:
    """The operators of one forward pass, in order, and which of the examples it was for.

    `repeats` says that it did exactly what the run before it did, label for label. `borrowed` are paths of modules that
    used a tensor of another module's while they ran, each with the path of that owner. `gradients` were recorded, as
    forward itself takes some. `uses_own` says that an operator read a parameter or buffer of the model.
    """

    example: int
    training: bool
    repeats: bool = False
    gradients: bool = False
    uses_own: bool = False
    operators: list[Operator] = field(default_factory=list)
    borrowed: set[tuple[str, str]] = field(default_factory=set)


Axes = tuple[tuple[int, Labels], ...]


@dataclass(frozen=True, eq=False)
class Norm:
    """A module that takes statistics over channels: under masks its narrow copy runs, on the kept channels alone.

    Attributes:
        inputs: every labeled axis of its one input tensor with the labels (size,) along it; the last axis is -1.
        outputs: the same of its one output tensor.
    """

    inputs: Axes
    outputs: Axes

    @property
    def axes(self) -> Axes:
        """Labeled axes of input and output."""
        return self.inputs + self.outputs

    def alike(self, other: Norm) -> bool:
        """Return whether another call has its labels on the same axes."""
        return [(axis, labels.shape) for axis, labels in self.axes] == [(a, b.shape) for a, b in other.axes]


class NormWatch:
    """Decides, whenever a module of a traced model ends, what becomes of the statistics that were taken in it.

    A module is a norm if it can run by itself on the kept channels of one tensor: it has one input and one output
    tensor with labels on single axes, in every call of it, and all its tensors are parameters, those of its parts not
    of these channels: they work on the statistics, as in spatial attention. Else what went into them is locked.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.norms: dict[str, Norm] = {}
        self._others: set[str] = set()
        self._emptied: dict[Field, Field] = {}

    def leave(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Called when a module's forward ends, with its arguments and its result."""
        taken, known = self.flow.statistics.pop(path, None), self.norms.get(path)
        if taken is None and known is None:
            self._others.add(path)
            return
        found = "it also runs on other tensors" if path in self._others else norm_of(module, self.flow, inputs, output)
        if isinstance(found, Norm) and known is not None and not known.alike(found):
            found = "it runs on tensors of several shapes"
        if isinstance(found, str):
            self._refuse(path, found, taken or [])
            return
        if path not in self.norms:
            self.norms[path] = found
            self.flow.lock(_of_parts(module, self.flow), "works on statistics over channels")
        for (_, labels), (_, others) in zip(self.norms[path].axes, found.axes, strict=True):
            self.flow.union.merge(labels, others)
        result = gather(output)[0]
        self.flow.set(result, [self._empty(field) for field in self.flow.fields(result)])

    def abandon(self) -> None:
        """Locks what modules that will never end took statistics over."""
        for path in list(self.flow.statistics):
            self._refuse(path, "its module did not end", self.flow.statistics.pop(path))

    def _refuse(self, path: str, why: str, taken: Iterable[LockRecord]) -> None:
        self._others.add(path)
        for record in taken:
            self.flow.locks.append(replace(record, reason=f"{record.reason}; {why}", module=path))
            self.flow.union.lock(record.labels)
        known = self.norms.pop(path, None)
        for _, labels in known.axes if known is not None else ():
            self.flow.locks.append(LockRecord(f"statistics over these channels; {why}", path, "", labels))
            self.flow.union.lock(labels)

    def _empty(self, field: Field) -> Field:
        """Return the field with exact zeros where channels are removed; the same one each time, so that runs can
        repeat.
        """
        return field if field.zero else self._emptied.setdefault(field, Field(field.labels, zero=True))


def norm_of(module: nn.Module, flow: Flow, inputs: Any, output: Any) -> Norm | str:
    """Return the module's call as a norm, or why it cannot be one."""
    name = type(module).__name__
    if any(True for _ in module.buffers()):
        return f"{name} does more than normalize: it has buffers"
    sources, results = gather(inputs), gather(output)
    if len(sources) != 1 or len(results) != 1:
        return f"{name} takes {len(sources)} tensors and returns {len(results)}, where a norm has one of each"
    before, after = (_axes(flow, tensor) for tensor in (*sources, *results))
    if not before or after is None:
        return f"{name} has no labels, or joint ones over several axes, on its input or its output"
    norm = Norm(before, after)
    channels, parts = (_classes(flow, part) for part in ([a for _, a in norm.axes], _of_parts(module, flow)))
    if np.intersect1d(channels, parts).any():
        return f"{name} does more than normalize: it has modules with parameters of these channels"
    return norm


def _of_parts(module: nn.Module, flow: Flow) -> list[Labels]:
    """Return the labels of all parameters of a module's parts."""
    parameters = (parameter for child in module.children() for parameter in child.parameters())
    return [field.labels.reshape(-1) for parameter in parameters for field in flow.fields(parameter)]


def _classes(flow: Flow, labels: Iterable[Labels]) -> Labels:
    return flow.union.find(np.concatenate([np.zeros(1, dtype=np.int64), *labels]))


def _axes(flow: Flow, tensor: torch.Tensor) -> Axes | None:
    """Return the labels by axis; None where a field lies on several axes jointly."""
    found: dict[int, Labels] = {}
    for one in flow.fields(tensor):
        if len(one.span) != 1:
            return None
        axis = -1 if one.span[0] == tensor.dim() - 1 else one.span[0]
        labels = one.labels.reshape(-1)
        flow.union.merge(found.setdefault(axis, labels), labels)
    return tuple(found.items())


def resolved(norms: dict[str, Norm], final: Labels) -> dict[str, Norm]:
    """Return norms with a map's final labels, without those where nothing is free."""

    def renumbered(axes: Axes) -> Axes:
        return tuple((axis, final[labels]) for axis, labels in axes)

    numbered = {path: Norm(renumbered(norm.inputs), renumbered(norm.outputs)) for path, norm in norms.items()}
    return {path: norm for path, norm in numbered.items() if any(np.any(labels) for _, labels in norm.axes)}

"""The channel map: every label of a model resolved, its groups, its locks, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from prunekit.channels.flow import EqualParts, LockRecord, MacTerm, Rectangle
from prunekit.channels.labels import Field, Labels, LabelUnion
from prunekit.channels.trace import ActivationKey, Run, Trace

Keep = NDArray[np.bool_]
Slot = tuple[str, int]


@dataclass(frozen=True)
class Lock:
    """Channels that stay, and why: the module and the operator that need them."""

    reason: str
    module: str
    operator: str
    channels: int


@dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Labels that lie on exactly the same parameter axes."""

    name: str
    labels: Labels
    slots: tuple[Slot, ...]


@dataclass(frozen=True, eq=False)
class ChannelMap:
    """Labels of every parameter and buffer axis; the one thing that knows how channels hang together.

    Attributes:
        labels: name -> one entry for each axis: int64 labels of shape (size,), or None for an axis of size 1. 0 is locked.
        n_labels: labels run from 0 to n_labels - 1.
        shapes: name -> dense shape.
        groups: free labels by the set of axes they lie on, in the order of the model's parameters.
        locks: why the locked ones are locked.
        activations: (module path, "input" or "output", call) -> labels along that activation's channel axis.
        rewritten: module paths whose output is modified in place later in the forward pass.
    """

    labels: Mapping[str, tuple[Labels | None, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    n_labels: int
    groups: tuple[ChannelGroup, ...]
    locks: tuple[Lock, ...]
    activations: Mapping[ActivationKey, Labels]
    rewritten: frozenset[str]
    mac_terms: tuple[MacTerm, ...]
    source: Resolved

    def macs(self, keep: Keep | None = None) -> int:
        """Multiply-accumulates for one sample with the labels in `keep` (bool, (n_labels,)); dense without."""
        return round(sum(self._term(term, keep) for term in self.mac_terms))

    def layer_macs(self, keep: Keep | None = None) -> dict[str, int]:
        """Multiply-accumulates for one sample by module path."""
        layers: dict[str, float] = {}
        for term in self.mac_terms:
            layers[term.module] = layers.get(term.module, 0.0) + self._term(term, keep)
        return {module: round(macs) for module, macs in layers.items()}

    def _term(self, term: MacTerm, keep: Keep | None) -> float:
        value = term.constant
        for factor in term.factors:
            value *= factor.size if keep is None else int(np.count_nonzero(keep[factor]))
        return value

    def parameters_kept(self, keep: Keep, names: Iterable[str]) -> int:
        """Number of entries of the named tensors that a plan keeps."""
        return sum(self._kept_size(name, keep) for name in names)

    def _kept_size(self, name: str, keep: Keep) -> int:
        sizes = [
            size if axis is None else int(np.count_nonzero(keep[axis]))
            for size, axis in zip(self.shapes[name], self.labels[name], strict=True)
        ]
        return int(np.prod(sizes, dtype=np.int64))

    def free_share(self, names: Iterable[str]) -> float:
        """Share of the named tensors' entries that lie on at least one free label."""
        free = total = 0.0
        for name in names:
            size = float(np.prod(self.shapes[name], dtype=np.float64))
            locked = size
            for axis_size, axis in zip(self.shapes[name], self.labels[name], strict=True):
                if axis is not None:
                    locked *= np.count_nonzero(axis == 0) / axis_size
            total, free = total + size, free + size - locked
        return free / total if total else 0.0

    @cached_property
    def group_of(self) -> Labels:
        """Index of each label's group; -1 for label 0."""
        result = np.full(self.n_labels, -1, dtype=np.int64)
        for index, group in enumerate(self.groups):
            result[group.labels] = index
        return result

    def with_locks(self, records: Iterable[LockRecord]) -> ChannelMap:
        """A new map in which further labels, of the trace's own numbering, are locked."""
        return build(self.source.trace, [*self.source.extra, *records], dict(self.shapes))

    def resolve(self, field: Field) -> Labels:
        """Final labels of a field that the trace recorded."""
        return self.source.final[field.labels]


@dataclass(frozen=True, eq=False)
class Resolved:
    """What a map was made from: the trace, locks added since, and trace label -> final label."""

    trace: Trace
    extra: tuple[LockRecord, ...]
    final: Labels

    @property
    def runs(self) -> list[Run]:
        """The traced forward passes."""
        return self.trace.runs


def channel_map(model: nn.Module, trace: Trace) -> ChannelMap:
    """Resolves a trace of a model into its channel map."""
    from prunekit.channels.copying import named_tensors

    return build(trace, [], {name: tuple(tensor.shape) for name, tensor in named_tensors(model)})


def build(trace: Trace, extra: list[LockRecord], shapes: dict[str, tuple[int, ...]]) -> ChannelMap:
    """Locks, resolves constraints to a fixpoint, renumbers the classes and groups them."""
    union = trace.flow.union
    records = [*trace.flow.locks, *extra]
    for record in extra:
        union.lock(record.labels)
    records += _lock_unused(trace)
    while True:
        before = union.find(np.arange(union.size))
        for constraint in trace.flow.constraints:
            if isinstance(constraint, Rectangle):
                _resolve_rectangle(union, constraint.labels)
            else:
                _resolve_equal_parts(union, constraint.labels)
        records += _lock_full_axes(trace)
        if np.array_equal(before, union.find(np.arange(union.size))):
            break
    roots = union.find(np.arange(union.size))
    on_parameters = [axis for axes in trace.labels.values() for axis in axes if axis is not None]
    used = np.unique(roots[np.concatenate([np.zeros(1, dtype=np.int64), *on_parameters])])
    final = np.zeros(union.size, dtype=np.int64)
    final[used] = np.arange(used.size)
    final = final[roots]
    labels = {name: tuple(None if a is None else final[a] for a in axes) for name, axes in trace.labels.items()}
    return ChannelMap(
        labels=labels,
        shapes=shapes,
        n_labels=int(used.size),
        groups=_groups(labels, int(used.size)),
        locks=tuple(_report(records)),
        activations={key: final[axis] for key, axis in trace.activations.items()},
        rewritten=trace.rewritten,
        mac_terms=tuple(
            MacTerm(term.module, term.operator, term.constant, tuple(final[f] for f in term.factors))
            for term in trace.flow.macs
        ),
        source=Resolved(trace, tuple(extra), final),
    )


def _lock_unused(trace: Trace) -> list[LockRecord]:
    """Parameters that no operator touched: they belong to branches that the examples do not take."""
    union = trace.flow.union
    touched = np.zeros(union.size, dtype=bool)
    for run in trace.runs:
        for operator in run.operators:
            for field in operator.inputs:
                touched[field.labels.reshape(-1)] = True
    records = []
    for name, axes in trace.labels.items():
        for axis in axes:
            if axis is not None and not touched[axis].any():
                union.lock(axis)
                module = name.rpartition(".")[0]
                records.append(LockRecord("not used by the example inputs", module, "", axis))
    return records


def _lock_full_axes(trace: Trace) -> list[LockRecord]:
    """A class that fills a whole axis cannot go: nothing would be left."""
    records = []
    for name, axes in trace.labels.items():
        for axis in axes:
            if axis is None:
                continue
            roots = trace.flow.union.find(axis)
            if roots[0] != 0 and (roots == roots[0]).all():
                trace.flow.union.lock(axis[:1])
                reason = "all channels of this axis hang together: none can go alone"
                records.append(LockRecord(reason, name.rpartition(".")[0], "", axis))
    return records


def _resolve_rectangle(union: LabelUnion, labels: Labels) -> None:
    """Whole rows where every row is one class already (attention heads); else whole columns (channel shuffle)."""
    roots = union.find(labels)
    if not (roots == roots[:, :1]).all():
        union.merge(labels, labels[:1])


def _resolve_equal_parts(union: LabelUnion, labels: Labels) -> None:
    """Ties labels across parts, as few as it takes: what every part holds equally often needs no tie.

    The rest is matched by how often a class occurs, so that classes of one size meet.
    """
    roots = union.find(labels)
    parts = [np.unique(row, return_index=True, return_counts=True) for row in roots]
    if all(np.array_equal(parts[0][0], p[0]) and np.array_equal(parts[0][2], p[2]) for p in parts[1:]):
        return
    common: dict[int, int] = {}
    for label in set.intersection(*(set(part[0].tolist()) for part in parts)):
        common[label] = min(int(part[2][part[0] == label][0]) for part in parts)
    rows = []
    for values, first, counts in parts:
        left = [(count - common.get(v, 0), at, v) for v, at, count in
                zip(values.tolist(), first.tolist(), counts.tolist(), strict=True)]  # fmt: skip
        left.sort(key=lambda item: (-item[0], item[1]))
        rows.append(np.array([v for count, _, v in left for _ in range(count)], dtype=np.int64))
    for row in rows[1:]:
        union.merge(rows[0], row)


def _groups(labels: Mapping[str, tuple[Labels | None, ...]], n_labels: int) -> tuple[ChannelGroup, ...]:
    """Groups free labels by their signature: the set of (name, axis) on which they lie."""
    slots = [(name, i) for name, axes in labels.items() for i, axis in enumerate(axes) if axis is not None]
    members: list[list[int]] = [[] for _ in range(n_labels)]
    for index, (name, axis) in enumerate(slots):
        for label in np.unique(labels[name][axis]).tolist():  # type: ignore[arg-type]
            members[label].append(index)
    by_signature: dict[tuple[int, ...], list[int]] = {}
    for label in range(1, n_labels):
        by_signature.setdefault(tuple(members[label]), []).append(label)
    groups = []
    for signature, group in by_signature.items():
        axes = tuple(slots[index] for index in signature)
        groups.append(ChannelGroup(_group_name(axes), np.array(group, dtype=np.int64), axes))
    return tuple(groups)


def _group_name(slots: tuple[Slot, ...]) -> str:
    """The first module that produces the group's channels; else the first that carries them."""
    producers = [name for name, axis in slots if axis == 0] or [slots[0][0]]
    return producers[0].rpartition(".")[0] or producers[0]


def _report(records: Iterable[LockRecord]) -> list[Lock]:
    seen: dict[tuple[str, str, str], Any] = {}
    for record in records:
        key = (record.reason, record.module, record.operator)
        seen[key] = max(seen.get(key, 0), int(record.labels.size))
    return [Lock(*key, channels) for key, channels in seen.items()]

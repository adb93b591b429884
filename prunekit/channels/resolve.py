"""From a trace to a channel map: locks, constraints solved to a fixpoint, classes renumbered and grouped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from torch import nn

from prunekit.channels.constraints import Contracted, Crossed, EqualParts, LockRecord, Nested, Rectangle
from prunekit.channels.copying import named_tensors
from prunekit.channels.costs import MacTerm
from prunekit.channels.joint import numbered
from prunekit.channels.labels import Labels, LabelUnion
from prunekit.channels.map import ChannelMap, Lock, Resolved, SizeAttribute, group_labels
from prunekit.channels.norms import resolved
from prunekit.channels.tracing import Trace


def channel_map(model: nn.Module, trace: Trace) -> ChannelMap:
    """Resolves a trace of a model into its channel map."""
    return build(trace, [], {name: tuple(tensor.shape) for name, tensor in named_tensors(model)})


def with_locks(channel_map: ChannelMap, records: Iterable[LockRecord]) -> ChannelMap:
    """A new map in which further labels, of the trace's own numbering, are locked."""
    source = channel_map.traced
    return build(source.trace, [*source.extra, *records], dict(channel_map.shapes), source.sizes)


def with_constraints(channel_map: ChannelMap, constraints: Iterable[EqualParts]) -> ChannelMap:
    """A new map in which further labels, of the trace's own numbering, go in equal numbers."""
    source = channel_map.traced
    return build(source.trace, [*source.extra, *constraints], dict(channel_map.shapes), source.sizes)


def with_sizes(channel_map: ChannelMap, sizes: Iterable[SizeAttribute]) -> ChannelMap:
    """A new map that knows further attributes, with labels in the trace's own numbering, to be sizes."""
    source = channel_map.traced
    known = (*source.sizes, *sizes)
    return replace(channel_map, sizes=_renumbered(known, source.final), source=replace(source, sizes=known))


def _renumbered(sizes: Iterable[SizeAttribute], final: Labels) -> tuple[SizeAttribute, ...]:
    return tuple(replace(size, labels=final[size.labels]) for size in sizes)


def build(
    trace: Trace,
    extra: list[LockRecord | EqualParts],
    shapes: dict[str, tuple[int, ...]],
    sizes: tuple[SizeAttribute, ...] = (),
) -> ChannelMap:
    """Locks, resolves constraints to a fixpoint, renumbers the classes and groups them."""
    axes = _Axes(trace)
    heads, records = _resolved(trace, extra, axes)
    positions = heads
    if any(isinstance(constraint, Contracted) for constraint in trace.flow.constraints):
        positions, _ = _resolved(trace, extra, axes, whole_heads=False)
    numbers = numbered(heads, positions, axes.all)
    final = numbers.final
    labels = {name: tuple(None if a is None else final[a] for a in axes) for name, axes in trace.labels.items()}
    return ChannelMap(
        labels=labels,
        shapes=shapes,
        n_labels=numbers.n_labels,
        groups=group_labels(labels, numbers.n_labels, numbers.joint),
        joint=numbers.joint,
        locks=tuple(_report(records)),
        activations={key: final[axis] for key, axis in trace.activations.items()},
        mac_terms=tuple(
            MacTerm(term.module, term.operator, term.constant, tuple(final[f] for f in term.factors))
            for term in trace.flow.macs
        ),
        source=Resolved(trace, tuple(extra), sizes, final),
        norms=resolved(trace.norms.norms, final),
        sizes=_renumbered(sizes, final),
    )


def _resolved(
    trace: Trace, extra: Iterable[LockRecord | EqualParts], axes: _Axes, *, whole_heads: bool = True
) -> tuple[Labels, list[LockRecord]]:
    """The class of every label with all constraints solved, 0 for locked ones; and all locks.

    Args:
        whole_heads: what is summed over its positions loses whole heads; else positions, in all heads alike.
    """
    union = trace.flow.union.copy()  # a trace serves several maps, and one map's locks are not another's
    records = [*trace.flow.locks, *(record for record in extra if isinstance(record, LockRecord))]
    for record in records:
        if not (whole_heads and record.positions):
            union.lock(record.labels)
    for constraint in trace.flow.constraints:
        if isinstance(constraint, Contracted):
            _resolve_contracted(union, constraint, whole_heads=whole_heads)
    records += _lock_unused(trace, axes, union)
    rank = {Contracted: 0, Nested: 1}
    asked = [part for part in extra if isinstance(part, EqualParts)]
    constraints = sorted([*trace.flow.constraints, *asked], key=lambda constraint: rank.get(type(constraint), 2))
    while True:
        before = union.find(np.arange(union.size))
        for constraint in constraints:
            if isinstance(constraint, Rectangle):
                _resolve_rectangle(union, constraint.labels)
            elif isinstance(constraint, Crossed):
                records += _resolve_crossed(union, constraint)
            elif isinstance(constraint, Nested):
                records += _resolve_nested(union, constraint)
            elif isinstance(constraint, EqualParts):
                _resolve_equal_parts(union, constraint.labels)
        records += _lock_full_axes(axes, union)
        after = union.find(np.arange(union.size))
        if np.array_equal(before, after):
            return after, records


class _Axes:
    """All labelled parameter axes end to end, so that one NumPy call looks at all of them."""

    def __init__(self, trace: Trace) -> None:
        pairs = [(name, axis) for name, axes in trace.labels.items() for axis in axes if axis is not None]
        self.modules = [name.rpartition(".")[0] for name, _ in pairs]
        self.axes = [axis for _, axis in pairs]
        sizes = [axis.size for axis in self.axes]
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.all: Labels = np.concatenate([np.zeros(0, dtype=np.int64), *self.axes])


def _lock_unused(trace: Trace, axes: _Axes, union: LabelUnion) -> list[LockRecord]:
    """Parameters that no operator touched: they belong to branches that the examples do not take."""
    touched = np.zeros(union.size, dtype=bool)
    inputs = [f.labels.reshape(-1) for run in trace.runs for operator in run.operators for f in operator.inputs]
    if inputs:
        touched[np.concatenate(inputs)] = True
    records = []
    for index in np.flatnonzero(~np.logical_or.reduceat(touched[axes.all], axes.starts)) if axes.axes else ():
        union.lock(axes.axes[index])
        records.append(LockRecord("not used by the example inputs", axes.modules[index], "", axes.axes[index]))
    return records


def _lock_full_axes(axes: _Axes, union: LabelUnion) -> list[LockRecord]:
    """A class that fills a whole axis cannot go: nothing would be left."""
    if not axes.axes:
        return []
    roots = union.find(axes.all)
    least, most = np.minimum.reduceat(roots, axes.starts), np.maximum.reduceat(roots, axes.starts)
    records = []
    for index in np.flatnonzero((least == most) & (least != 0)):
        union.lock(axes.axes[index][:1])
        reason = "all channels of this axis hang together: none can go alone"
        records.append(LockRecord(reason, axes.modules[index], "", axes.axes[index]))
    return records


def _resolve_contracted(union: LabelUnion, contracted: Contracted, *, whole_heads: bool) -> None:
    """A head is one class with what is left of it; or a position is one class in all heads, and all of these stay."""
    if whole_heads:
        union.merge(contracted.labels, contracted.part[None])
    else:
        union.tie(contracted.labels, [1])
        union.lock(contracted.part)
        if not contracted.zero:
            union.lock(contracted.labels)


def _resolve_rectangle(union: LabelUnion, labels: Labels) -> None:
    """Whole rows where every row is one class already (attention heads); else whole columns (channel shuffle)."""
    roots = union.find(labels)
    if not (roots == roots[:, :1]).all():
        union.merge(labels, labels[:1])


def _resolve_crossed(union: LabelUnion, crossed: Crossed) -> list[LockRecord]:
    """Locks both axes, unless one is locked anyway, as a kernel's positions are."""
    both = [crossed.first, crossed.second]
    if not all(union.find(record.labels).any() for record in both):
        return []
    for record in both:
        union.lock(record.labels)
    return both


def _resolve_nested(union: LabelUnion, nested: Nested) -> list[LockRecord]:
    """Whole rows stay what they are, and what they met needs another partner; anything else loses whole columns.

    Where what they met is locked, rows are all that can go.
    """
    roots = union.find(nested.labels)
    whole_rows = (roots == roots[:, :1]).all() and (roots != roots[0, 0]).any()
    free = union.find(nested.part.labels).any()
    if not whole_rows and free:
        union.merge(nested.labels, nested.part.labels[None])
    elif not whole_rows:
        union.tie(nested.labels, [1])
    elif free and not nested.matched:
        union.lock(nested.part.labels)
        return [nested.part]
    return []


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


def _report(records: Iterable[LockRecord]) -> list[Lock]:
    seen: dict[tuple[str, str, str], int] = {}
    for record in records:
        key = (record.reason, record.module, record.operator)
        seen[key] = max(seen.get(key, 0), int(record.labels.size))
    return [Lock(*key, channels) for key, channels in seen.items()]

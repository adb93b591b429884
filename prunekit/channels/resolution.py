"""From a trace to a channel map: locks, constraints solved to a fixpoint, classes renumbered and grouped.

How constraints are solved: each merges or locks labels, as few as it takes, by what hangs together already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.channel_map import ChannelMap, Lock, Resolved, SizeAttribute, group_labels
from prunekit.channels.constraints import (
    Constraint,
    Contracted,
    Crossed,
    EqualParts,
    Flattened,
    Grouped,
    LockRecord,
    Nested,
    Padded,
    Rectangle,
    numbered,
)
from prunekit.channels.cut.model_copy import is_inside, named_tensors
from prunekit.channels.labels import Labels, LabelUnion, MacTerm, Stored
from prunekit.channels.rewrite.call_sites import Place
from prunekit.channels.rewrite.size_expressions import avoidable
from prunekit.channels.tracing.operators import resolved
from prunekit.channels.tracing.tracer import Trace
from prunekit.utils.display import listed


def solve_contracted(union: LabelUnion, contracted: Contracted, *, whole_heads: bool) -> None:
    """A head is one class with what is left of it; or a position is one class in all heads, and all of these stay."""
    if whole_heads:
        union.merge(contracted.labels, contracted.part[None])
    else:
        union.tie(contracted.labels, [1])
        union.lock(contracted.part)
        if not contracted.zero:
            union.lock(contracted.labels)


def in_order(constraints: Iterable[Constraint]) -> list[Constraint]:
    """Return those first that say what hangs together, and last what only follows that."""
    return sorted(constraints, key=lambda constraint: _RANK.get(type(constraint), 3))


def solve(union: LabelUnion, constraint: Constraint) -> Iterable[LockRecord]:
    """Solve one constraint for the classes as they are now; return the locks that a user should know of.

    A contraction is solved once, see `solve_contracted`.
    """
    return _SOLVERS[type(constraint)](union, constraint)


def _nested(union: LabelUnion, nested: Nested) -> Iterable[LockRecord]:
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


def _rectangle(union: LabelUnion, rectangle: Rectangle) -> Iterable[LockRecord]:
    """Whole rows where every row is one class already (attention heads); else whole columns (channel shuffle)."""
    roots = union.find(rectangle.labels)
    if not (roots == roots[:, :1]).all():
        union.merge(rectangle.labels, rectangle.labels[:1])
    return []


def _crossed(union: LabelUnion, crossed: Crossed) -> Iterable[LockRecord]:
    """Locks both axes, unless one is locked anyway, as a kernel's positions are."""
    both = [crossed.first, crossed.second]
    if not all(union.find(record.labels).any() for record in both):
        return []
    for record in both:
        union.lock(record.labels)
    return both


def _flattened(union: LabelUnion, flattened: Flattened) -> Iterable[LockRecord]:
    """An entry goes with the one axis that loses anything, whatever its place on those that stay: a kernel's positions.

    Where several could, nothing tells them apart.
    """
    able = [labels for labels in flattened.factors if union.find(labels).any()]
    for labels in able:
        union.merge(labels, flattened.whole)
    if not able:
        union.lock(flattened.whole)
    return []


def _equal_parts(union: LabelUnion, equal: EqualParts) -> Iterable[LockRecord]:
    """Tie labels across parts, as few as it takes: what every part holds equally often needs no tie.

    The rest is matched by how often a class occurs, so that classes of one size meet.
    """
    roots = union.find(equal.labels)
    parts = [np.unique(row, return_index=True, return_counts=True) for row in roots]
    if all(np.array_equal(parts[0][0], p[0]) and np.array_equal(parts[0][2], p[2]) for p in parts[1:]):
        return []
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
    return []


def _padded(union: LabelUnion, padded: Padded) -> Iterable[LockRecord]:
    """Return what was added to a head goes with the head where that goes whole, and else stays."""
    roots = union.find(padded.labels)
    if (roots == roots[:1]).all():
        union.merge(padded.part, padded.labels[0])
    else:
        union.lock(padded.part)
    return []


def _grouped(union: LabelUnion, grouped: Grouped) -> Iterable[LockRecord]:
    """Whole groups where the channels of each go together already, as those of a head do; else columns of every one."""
    if any(_in_whole_rows(union.find(labels)) for labels in (grouped.inputs, grouped.outputs)):
        union.tie(grouped.inputs, [1])
        union.merge(grouped.outputs, grouped.inputs[:, :1])
        union.lock(grouped.columns)
    else:
        union.merge(grouped.inputs, grouped.columns[None])
        union.tie(grouped.outputs, [0])
    return []


def _in_whole_rows(roots: Labels) -> bool:
    """Return whether every row is one class, and there are several."""
    return bool(roots.shape[1] > 1 and (roots == roots[:, :1]).all() and (roots != roots[0, 0]).any())


_SOLVERS: dict[type, Callable[[LabelUnion, Any], Iterable[LockRecord]]] = {
    Contracted: lambda union, contracted: (),
    Nested: _nested,
    Rectangle: _rectangle,
    Crossed: _crossed,
    Flattened: _flattened,
    EqualParts: _equal_parts,
    Padded: _padded,
    Grouped: _grouped,
}
_RANK = {Contracted: 0, Flattened: 1, Nested: 1, Grouped: 2, Padded: 4}


TOGETHER = "all channels of this axis hang together: none can go alone"

NAMED = 3
"""How many calls of a module a lock names."""


def channel_map(model: nn.Module, trace: Trace) -> ChannelMap:
    """Resolve a trace of a model into its channel map."""
    tensors = dict(named_tensors(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stored = {name: Stored(t.element_size(), isinstance(t, nn.Parameter)) for name, t in tensors.items()}
    return build(Resolved(trace, (), (), np.zeros(0, dtype=np.int64)), shapes, stored)


def with_locks(channel_map: ChannelMap, records: Iterable[LockRecord]) -> ChannelMap:
    """Return a new map in which further labels, of the trace's own numbering, are locked."""
    source = channel_map.traced
    return build(replace(source, extra=(*source.extra, *records)), channel_map.shapes, channel_map.stored)


def with_constraints(channel_map: ChannelMap, constraints: Iterable[EqualParts]) -> ChannelMap:
    """Return a new map in which further labels, of the trace's own numbering, go in equal numbers."""
    source = channel_map.traced
    return build(replace(source, extra=(*source.extra, *constraints)), channel_map.shapes, channel_map.stored)


def with_ties(channel_map: ChannelMap) -> ChannelMap:
    """Return a new map that leaves no constraint out."""
    return build(replace(channel_map.traced, ties=True), channel_map.shapes, channel_map.stored)


def with_plain(channel_map: ChannelMap) -> ChannelMap:
    """Return a new map that states no size and no order in a module's Python."""
    source = channel_map.traced
    sizes = tuple(size for size in source.sizes if Place.named(size.name) is None)
    return build(replace(source, ties=True, sizes=sizes), channel_map.shapes, channel_map.stored)


def with_sizes(channel_map: ChannelMap, sizes: Iterable[SizeAttribute]) -> ChannelMap:
    """Return a new map that knows further attributes, with labels in the trace's own numbering, to be sizes."""
    source, new = channel_map.traced, tuple(sizes)
    known = (*channel_map.sizes, *_renumbered(new, source.final))
    return replace(channel_map, sizes=known, source=replace(source, sizes=(*source.sizes, *new)))


def _renumbered(sizes: Iterable[SizeAttribute], final: Labels) -> tuple[SizeAttribute, ...]:
    return tuple(replace(size, labels=final[size.labels]) for size in sizes)


def build(source: Resolved, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored]) -> ChannelMap:
    """Locks, resolves constraints to a fixpoint, renumbers the classes and groups them.

    Args:
        source: its `final` and `stated` are made anew.
    """
    trace = source.trace
    axes = _Axes(trace)
    constraints, sizes, heads, records = _least_locked(source, axes)
    positions = heads
    if any(isinstance(constraint, Contracted) for constraint in constraints):
        positions, _ = _resolved(trace, source.extra, axes, constraints, whole_heads=False)
    numbers = numbered(heads, positions, axes.all)
    final = numbers.final
    labels = {name: tuple(None if a is None else final[a] for a in axes) for name, axes in trace.labels.items()}
    return ChannelMap(
        labels=labels,
        shapes=shapes,
        n_labels=numbers.n_labels,
        groups=group_labels(labels, numbers.n_labels, numbers.joint),
        joint=numbers.joint,
        locks=tuple(_report(records, trace.calls)),
        activations={key: final[axis] for key, axis in trace.activations.items()},
        mac_terms=tuple(
            MacTerm(term.module, term.operator, term.constant, tuple(final[f] for f in term.factors))
            for term in trace.flow.macs
            if not is_inside(term.module, trace.fused_away)
        ),
        source=replace(source, final=final, stated=bool(sizes)),
        norms=resolved(trace.norms.norms, final),
        sizes=_renumbered([*_of_groups(trace, final), *sizes, *source.sizes], final),
        stored=stored,
        inputs=trace.inputs,
        divided=frozenset(
            (name, index)
            for name, axes in trace.labels.items()
            for index, axis in enumerate(axes)
            if axis is not None and any(np.array_equal(axis, one) for one in trace.flow.divided)
        ),
    )


def _of_groups(trace: Trace, final: Labels) -> Iterator[SizeAttribute]:
    """Yield what convolutions remember of groups that may go."""
    for grouped in trace.flow.constraints:
        if isinstance(grouped, Grouped):
            rows = np.sort(final[grouped.inputs], axis=1)
            if not (rows == rows[0]).all():
                yield SizeAttribute(grouped.module, "groups", None, grouped.inputs)
                yield SizeAttribute(grouped.module, "in_channels", None, grouped.inputs.reshape(-1, 1))


def _least_locked(
    source: Resolved, axes: _Axes
) -> tuple[list[Constraint], list[SizeAttribute], Labels, list[LockRecord]]:
    """Constraints, what is stated in place of others, and what both lead to.

    A model runs as it is where all hold; so none is left out unless together they lock whole axes.
    """
    trace, every = source.trace, source.trace.flow.constraints
    heads, records = _resolved(trace, source.extra, axes, every)
    locked = not source.ties and any(record.reason == TOGETHER for record in records)
    found = avoidable(trace.runs) if locked else []
    if found:
        needless = {constraint for one in found for constraint in one.constraints}
        needed = [constraint for constraint in every if constraint not in needless]
        free, others = _resolved(trace, source.extra, axes, needed)
        if np.count_nonzero(free[axes.all]) > np.count_nonzero(heads[axes.all]):
            return needed, [size for one in found for size in one.sizes], free, others
    return every, [], heads, records


def _resolved(
    trace: Trace,
    extra: Iterable[LockRecord | EqualParts],
    axes: _Axes,
    constraints: Sequence[Constraint],
    *,
    whole_heads: bool = True,
) -> tuple[Labels, list[LockRecord]]:
    """Return the class of every label with all constraints solved, 0 for locked ones; and all locks.

    Args:
        whole_heads: what is summed over its positions loses whole heads; else positions, in all heads alike.
    """
    union = trace.flow.union.copy()  # a trace serves several maps, and one map's locks are not another's
    records = [*trace.flow.locks, *(record for record in extra if isinstance(record, LockRecord))]
    for record in records:
        if not (whole_heads and record.positions):
            union.lock(record.labels)
    for constraint in constraints:
        if isinstance(constraint, Contracted):
            solve_contracted(union, constraint, whole_heads=whole_heads)
    records += _lock_unused(trace, axes, union)
    asked = [part for part in extra if isinstance(part, EqualParts)]
    ordered = in_order([*constraints, *asked])
    while True:
        before = union.find(np.arange(union.size))
        for constraint in ordered:
            records += solve(union, constraint)
        records += _lock_full_axes(axes, union)
        after = union.find(np.arange(union.size))
        if np.array_equal(before, after):
            return after, records


class _Axes:
    """All labeled parameter axes end to end, so that one NumPy call looks at all of them."""

    def __init__(self, trace: Trace) -> None:
        pairs = [(name, axis) for name, axes in trace.labels.items() for axis in axes if axis is not None]
        self.modules = [name.rpartition(".")[0] for name, _ in pairs]
        self.axes = [axis for _, axis in pairs]
        sizes = [axis.size for axis in self.axes]
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.all: Labels = np.concatenate([np.zeros(0, dtype=np.int64), *self.axes])


def _lock_unused(trace: Trace, axes: _Axes, union: LabelUnion) -> list[LockRecord]:
    """Return parameters that no operator touched: they belong to branches that the examples do not take."""
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
    """Return a class that fills a whole axis cannot go: nothing would be left."""
    if not axes.axes:
        return []
    roots = union.find(axes.all)
    least, most = np.minimum.reduceat(roots, axes.starts), np.maximum.reduceat(roots, axes.starts)
    records = []
    for index in np.flatnonzero((least == most) & (least != 0)):
        union.lock(axes.axes[index][:1])
        records.append(LockRecord(TOGETHER, axes.modules[index], "", axes.axes[index]))
    return records


def _report(records: Iterable[LockRecord], calls: Mapping[str, int]) -> list[Lock]:
    seen: dict[tuple[str, str, str], list[LockRecord]] = {}
    for record in records:
        seen.setdefault((record.reason, record.module, record.operator), []).append(record)
    return [
        Lock(reason + _which(alike, calls.get(module, 0)), module, operator, max(int(one.labels.size) for one in alike))
        for (reason, module, operator), alike in seen.items()
    ]


def _which(records: Iterable[LockRecord], count: int) -> str:
    """Return which of a module's calls, where these are not all."""
    found = {record.call.number: record.call for record in records if record.call is not None}
    if len(found) == count or not found:
        return ""
    named = listed((f"{number} at {call}" for number, call in sorted(found.items())), NAMED)
    return f" (of {count} calls of this module, number {named})"

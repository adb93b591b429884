"""The constraint solver: merges and locks labels, as few as it takes, until every constraint of a trace holds.

Attention can lose whole heads, or positions in all of its heads, and either leaves a model that runs. So it can lose
both: an entry stays if its head stays and its position does. Where heads of keys serve several query heads each, it can
lose as many of these for every one: an entry of the queries then stays if that choice does as well. Each kind is solved
by itself; an entry that several kinds decide on gets a *joint label*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.channels.labels import Labels, LabelUnion
from prunekit.channels.labels.constraints import (
    Constraint,
    Contracted,
    Crossed,
    EqualParts,
    FixedPositions,
    Flattened,
    Grouped,
    LockRecord,
    Nested,
    Normalized,
    Padded,
    Rectangle,
    Removal,
    Repeated,
)
from prunekit.channels.labels.label_flow import LabelFlow

WHOLE_AXIS = "all channels of this axis are coupled: none can be removed alone"


class LabeledAxes:
    """All labeled parameter axes end to end, so that one NumPy call looks at all of them."""

    def __init__(self, labels: Mapping[str, tuple[Labels | None, ...]]) -> None:
        pairs = [(name, axis) for name, axes in labels.items() for axis in axes if axis is not None]
        self.modules = [name.rpartition(".")[0] for name, _ in pairs]
        self.axes = [axis for _, axis in pairs]
        sizes = [axis.size for axis in self.axes]
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.all: Labels = np.concatenate([np.zeros(0, dtype=np.int64), *self.axes])


def solve(
    flow: LabelFlow,
    axes: LabeledAxes,
    constraints: Sequence[Constraint],
    extra: Sequence[LockRecord | EqualParts],
    unused: Sequence[LockRecord],
    *,
    removal: Removal = Removal.HEADS,
) -> tuple[Labels, list[LockRecord]]:
    """Return the class of every label with all constraints solved, 0 for locked ones; and all locks.

    Args:
        extra: further locks and constraints, which trials found.
        unused: locks of what no operator read.
        removal: what is removed where labels are summed or repeated: whole heads, the same positions in all heads, or
            the same copies of every head.
    """
    union = flow.union.copy()
    records = [*flow.locks, *(record for record in extra if isinstance(record, LockRecord))]
    for record in records:
        if record.only in (None, removal):
            union.lock(record.labels)
    whole_heads = removal != Removal.POSITIONS
    for constraint in constraints:
        if isinstance(constraint, Repeated):
            _solve_repeated(union, constraint, removal)
    for constraint in constraints:
        if isinstance(constraint, Contracted):
            _solve_contracted(union, constraint, whole_heads=whole_heads)
        elif isinstance(constraint, Normalized):
            _solve_normalized(union, constraint, whole_heads=whole_heads)
    for record in unused:
        union.lock(record.labels)
    records += unused
    equal = [part for part in extra if isinstance(part, EqualParts)]
    # First the constraints that say what is coupled, last those that only follow it.
    ordered = sorted(constraints, key=lambda constraint: _RANK.get(type(constraint), 4))
    while True:
        before = union.find(np.arange(union.size))
        for constraint in ordered:
            found = _SOLVERS[type(constraint)](union, constraint, whole_heads)
            records += [record for record in found if not flow.only_made(record.labels)]
        for part in equal:
            _solve_equal_sizes(union, part)
        records += _lock_full_axes(axes, union)
        after = union.find(np.arange(union.size))
        if np.array_equal(before, after):
            return after, records


def _solve_equal_sizes(union: LabelUnion, equal: EqualParts) -> None:
    """Tie labels of axes that a trial found to need one size; one whose labels are one class, as in a head, stays."""
    roots = union.find(equal.labels)
    whole = (roots == roots[:, :1]).all(axis=1)
    if whole.any():
        union.lock(equal.labels[~whole])
    else:
        _solve_equal_parts(union, equal, whole_heads=True)


def _lock_full_axes(axes: LabeledAxes, union: LabelUnion) -> list[LockRecord]:
    """Lock every class that fills a whole axis: without it nothing would be left there."""
    if not axes.axes:
        return []
    roots = union.find(axes.all)
    least, most = np.minimum.reduceat(roots, axes.starts), np.maximum.reduceat(roots, axes.starts)
    records = []
    for index in np.flatnonzero((least == most) & (least != 0)):
        union.lock(axes.axes[index][:1])
        records.append(LockRecord(WHOLE_AXIS, axes.modules[index], "", axes.axes[index]))
    return records


def _solve_repeated(union: LabelUnion, repeated: Repeated, removal: Removal) -> None:
    """Make copies one class with their source, or with the same copies of others, and lock the source."""
    if removal == Removal.QUERIES:
        union.merge(repeated.copies, repeated.repeats)
        union.lock(repeated.source)
    else:
        union.merge(repeated.copies, repeated.source)


def _solve_contracted(union: LabelUnion, contracted: Contracted, *, whole_heads: bool) -> None:
    """Make a head one class with what is left of it; or a position one class in all heads, and lock what is left.

    Where all that is left has to stay, as what the model returns does, only positions can be removed.
    """
    if whole_heads and union.find(contracted.part).any():
        union.merge(contracted.labels, contracted.part[None])
    else:
        union.tie(contracted.labels, [1])
        union.lock(contracted.part)
        if not contracted.zero:
            union.lock(contracted.labels)


def _solve_normalized(union: LabelUnion, normalized: Normalized, *, whole_heads: bool) -> None:
    """Make a row one class and lock the positions, or a position one class in all rows and lock these."""
    if whole_heads:
        union.merge(normalized.labels, normalized.rows[None])
        union.lock(normalized.positions)
    else:
        union.merge(normalized.labels, normalized.positions[:, None])
        union.lock(normalized.rows)


# Each of the following solves one constraint for the classes as they are now, and returns the locks to report;
# `whole_heads` is False where positions in all heads are removed.


def _solve_nested(union: LabelUnion, nested: Nested, whole_heads: bool) -> Iterable[LockRecord]:
    """Leave whole rows as they are, and lock what they met unless it has a partner; otherwise merge whole columns.

    Where what they met is locked, only rows can be removed.
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


def _solve_rectangle(union: LabelUnion, rectangle: Rectangle, whole_heads: bool) -> Iterable[LockRecord]:
    """Keep whole rows where every row is one class already (attention heads), else whole columns (channel shuffle)."""
    roots = union.find(rectangle.labels)
    if not (roots == roots[:, :1]).all():
        union.merge(rectangle.labels, rectangle.labels[:1])
    return []


def _solve_crossed(union: LabelUnion, crossed: Crossed, whole_heads: bool) -> Iterable[LockRecord]:
    """Lock the second axis where whole heads are removed, else the first; neither if one is locked already."""
    both = [crossed.first, crossed.second]
    if not all(union.find(record.labels).any() for record in both):
        return []
    union.lock(both[whole_heads].labels)
    return [] if whole_heads else [both[0]]


def _solve_flattened(union: LabelUnion, flattened: Flattened, whole_heads: bool) -> Iterable[LockRecord]:
    """Merge the entries with the one axis that loses anything; their place on the others, as in a kernel, is the same.

    Where several axes could lose entries, nothing tells them apart.
    """
    able = [labels for labels in flattened.factors if union.find(labels).any()]
    for labels in able:
        union.merge(labels, flattened.whole)
    if not able:
        union.lock(flattened.whole)
    return []


def _solve_equal_parts(union: LabelUnion, equal: EqualParts, whole_heads: bool) -> Iterable[LockRecord]:
    """Tie labels across parts, as few as it takes: a class that every part holds equally often needs no tie.

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


def _solve_padded(union: LabelUnion, padded: Padded, whole_heads: bool) -> Iterable[LockRecord]:
    """Merge what was added to a head with the head where that is removed as a whole, else lock it."""
    roots = union.find(padded.labels)
    if (roots == roots[:1]).all():
        union.merge(padded.part, padded.labels[0])
    else:
        union.lock(padded.part)
    return []


def _solve_grouped(union: LabelUnion, grouped: Grouped, whole_heads: bool) -> Iterable[LockRecord]:
    """Couple whole groups if the channels of each are coupled already, as those of a head, else columns of each."""
    if any(_in_whole_rows(union.find(labels)) for labels in (grouped.inputs, grouped.outputs)):
        union.tie(grouped.inputs, [1])
        union.merge(grouped.outputs, grouped.inputs[:, :1])
        union.lock(grouped.columns)
    else:
        union.merge(grouped.inputs, grouped.columns[None])
        union.tie(grouped.outputs, [0])
    return []


def _solve_fixed_positions(union: LabelUnion, fixed: FixedPositions, whole_heads: bool) -> Iterable[LockRecord]:
    """Lock channels whose positions the model's Python fixes."""
    if not union.find(fixed.record.labels).any():
        return []
    union.lock(fixed.record.labels)
    return [fixed.record]


def _in_whole_rows(roots: Labels) -> bool:
    """Return whether every row is one class, and there are several."""
    return bool(roots.shape[1] > 1 and (roots == roots[:, :1]).all() and (roots != roots[0, 0]).any())


_SOLVERS: dict[type, Callable[[LabelUnion, Any, bool], Iterable[LockRecord]]] = {
    Repeated: lambda union, repeated, whole_heads: (),  # solved once, before all others
    Contracted: lambda union, contracted, whole_heads: (),  # the same
    Normalized: lambda union, normalized, whole_heads: (),  # the same
    Nested: _solve_nested,
    Rectangle: _solve_rectangle,
    Crossed: _solve_crossed,
    Flattened: _solve_flattened,
    EqualParts: _solve_equal_parts,
    Padded: _solve_padded,
    Grouped: _solve_grouped,
    FixedPositions: _solve_fixed_positions,
}
_RANK = {
    FixedPositions: 0,
    Repeated: 0,
    Contracted: 0,
    Crossed: 1,
    Flattened: 2,
    Nested: 2,
    Grouped: 3,
    Padded: 5,
}


NOT_JOINT: Labels = np.zeros((0, 3), dtype=np.int64)


def deciders(n_labels: int, joint: Labels) -> list[Labels]:
    """Return arrays (n_labels,) of the labels that decide on each: itself alone, or one of each kind, 0 for none.

    `joint`, (n, 1 + kinds), has a row for each joint label: itself, and by `Removal` those that decide on it, or 0.
    """
    result = [np.arange(n_labels), *(np.zeros(n_labels, dtype=np.int64) for _ in range(2, joint.shape[1]))]
    for choice, column in zip(result, joint.T[1:], strict=True):
        choice[joint[:, 0]] = column
    return result


@dataclass(frozen=True, eq=False)
class Numbering:
    """Labels of a trace as labels of a map, 0 .. n_labels - 1.

    Attributes:
        final: for each label of the trace.
        joint: (n, 1 + solutions), see `deciders`.
    """

    final: Labels
    joint: Labels
    n_labels: int


def numbered(solutions: Sequence[Labels], on_axes: Labels) -> Numbering:
    """Return the classes of several solutions numbered in the order of the trace, as one where they agree.

    Args:
        solutions: class of each label of a trace, 0 for locked ones, where each kind of channels is removed, by
            `Removal`; the same array as the first where there is no choice.
    """
    heads, *others = solutions
    used = np.zeros(heads.size, dtype=bool)
    used[heads[on_axes]] = True
    found = [np.where(used[heads], heads, 0)]
    together = found[0]
    for classes in others:
        found.append(np.zeros_like(heads) if classes is heads else _where_free(together, classes, on_axes))
        together = _pairs(together, found[-1])
    # In the order of the trace, and a head before a position that begins with the same label.
    classes = np.zeros((heads.size, len(found)), dtype=bool)
    for kind, one in enumerate(found):
        classes[one, kind] = True
    classes[0] = [True, *[False] * len(others)]
    number = (np.cumsum(classes.reshape(-1)) - 1).reshape(classes.shape)
    deciding = np.stack([np.where(one > 0, number[one, kind], 0) for kind, one in enumerate(found)], axis=1)
    final, count = deciding.max(axis=1), int(classes.sum())
    several = np.flatnonzero(np.count_nonzero(deciding, axis=1) > 1)
    _, first, index = np.unique(_pairs(*deciding[several].T), return_index=True, return_inverse=True)
    final[several] = count + index
    joint = np.concatenate([count + np.arange(first.size)[:, None], deciding[several[first]]], axis=1)
    return Numbering(final, joint, count + first.size)


def _pairs(first: Labels, *others: Labels) -> Labels:
    """Return one number for each different choice of classes, in their order; 0 where all are 0."""
    for other in others:
        if other.any():
            size = int(other.max()) + 1
            _, index = np.unique(np.append(first * size + other, 0), return_inverse=True)
            first = index[:-1].astype(np.int64)
    return first


def _where_free(heads: Labels, positions: Labels, on_axes: Labels) -> Labels:
    """Return the class of positions where every head has every one of several, a choice of its own; 0 elsewhere."""
    free = np.zeros(heads.size, dtype=bool)
    free[positions[on_axes[heads[on_axes] == 0]]] = True
    pairs = np.unique(heads[on_axes] * heads.size + positions[on_axes])
    a, b = pairs // heads.size, pairs % heads.size
    a, b = a[(a != 0) & (b != 0)], b[(a != 0) & (b != 0)]
    together = LabelUnion()
    together.new(2 * heads.size)
    together.merge(a, b + heads.size)
    which = together.find(a)
    n_heads, n_positions = (_classes(which, classes, heads.size) for classes in (a, b))
    n_pairs = np.bincount(which, minlength=heads.size)
    complete = (n_positions > 1) & (n_heads * n_positions == n_pairs)
    free[b[complete[which]]] = True
    free[0] = False
    return np.where(free[positions], positions, 0)


def _classes(which: Labels, classes: Labels, size: int) -> Labels:
    """Return the number of classes of each component, (size,)."""
    return np.bincount(np.unique(which * size + classes) // size, minlength=size)

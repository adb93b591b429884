"""How constraints are solved: each merges or locks labels, as few as it takes, by what hangs together already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

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
)
from prunekit.channels.labels import Labels, LabelUnion


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
    """Those first that say what hangs together, and last what only follows that."""
    return sorted(constraints, key=lambda constraint: _RANK.get(type(constraint), 3))


def solve(union: LabelUnion, constraint: Constraint) -> Iterable[LockRecord]:
    """Solves one constraint for the classes as they are now; returns the locks that a user should know of.

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
    """Ties labels across parts, as few as it takes: what every part holds equally often needs no tie.

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
    """What was added to a head goes with the head where that goes whole, and else stays."""
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
    """Whether every row is one class, and there are several."""
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

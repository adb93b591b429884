"""The constraint solver: merges and locks labels, as few as it takes, until every constraint of a trace holds.

    merges and locks of the trace
    --> begin: each constraint that asks only which kind of channels is removed
    --> solve: each constraint, in the order of `rank`; then lock what fills a whole axis; again until no class changes

1. Classes only grow and locks stay, so the passes come to an end.
2. A constraint looks at the classes as they are now. Those that say what is coupled therefore come before those that
   only follow it: a rectangle keeps whole rows where something else made each row one class.
3. A class that fills a whole axis is locked: without it nothing would be left there.

Attention can lose whole heads, or positions in all of its heads, and either leaves a model that runs. So it can lose
both: an entry stays if its head stays and its position does. Where heads of keys serve several query heads each, it can
lose as many of these for every one: an entry of the queries then stays if that choice does as well. Each kind is solved
by itself (`Removal`); an entry that several kinds decide on gets a *joint label* (`numbered`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prunekit.channels.labels.constraints import Constraint, EqualParts, LockRecord, Removal, Repeated
from prunekit.channels.labels.label_flow import LabelFlow
from prunekit.channels.labels.label_union import Labels, LabelUnion

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

    `extra` are further locks and constraints, which trials found; `unused` are locks of what no operator read.
    """
    union = flow.union.copy()
    records = [*flow.locks, *(record for record in extra if isinstance(record, LockRecord))]
    for record in records:
        if record.only in (None, removal):
            union.lock(record.labels)
    whole_heads = removal != Removal.POSITIONS
    for constraint in sorted(constraints, key=lambda constraint: not isinstance(constraint, Repeated)):
        constraint.begin(union, removal)
    for record in unused:
        union.lock(record.labels)
    records += unused
    equal = [part for part in extra if isinstance(part, EqualParts)]
    ordered = sorted(constraints, key=lambda constraint: constraint.rank)
    while True:
        before = union.find(np.arange(union.size))
        for constraint in ordered:
            found = constraint.solve(union, whole_heads)
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
        equal.solve(union, whole_heads=True)


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


NOT_JOINT: Labels = np.zeros((0, 4), dtype=np.int64)


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
    """Labels of a trace as labels of a map, 0 .. n_labels - 1."""

    final: Labels  # for each label of the trace
    joint: Labels  # (n, 1 + solutions), see `deciders`
    n_labels: int


def numbered(solutions: Sequence[Labels], on_axes: Labels) -> Numbering:
    """Return the classes of several solutions numbered in the order of the trace, as one where they agree.

    A solution, by `Removal`, has the class of each label of the trace, 0 for locked ones; it is the same array as the
    first where there is no choice.
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
    size = heads.size
    n_heads, n_positions = (np.bincount(np.unique(which * size + one) // size, minlength=size) for one in (a, b))
    n_pairs = np.bincount(which, minlength=heads.size)
    complete = (n_positions > 1) & (n_heads * n_positions == n_pairs)
    free[b[complete[which]]] = True
    free[0] = False
    return np.where(free[positions], positions, 0)

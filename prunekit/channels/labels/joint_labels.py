"""Joint labels: labels that several others decide on, as the whole head and the position in all heads.

Attention can lose whole heads, or positions in all of its heads, and either leaves a model that runs. So it can lose
both: an entry stays if its head stays and its position does. Where heads of keys serve several query heads each, it can
lose as many of these for every one: an entry of the queries then stays if that choice does as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunekit.channels.labels import Labels, LabelUnion

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

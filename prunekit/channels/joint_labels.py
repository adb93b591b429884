"""Joint labels: labels that two others decide on, the whole head and the position in all heads.

Attention can lose whole heads, or positions in all of its heads, and either leaves a model that runs. So it can lose
both: an entry stays if its head stays and its position does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prunekit.channels.labels import Labels, LabelUnion

NOT_JOINT: Labels = np.zeros((0, 3), dtype=np.int64)


def deciders(n_labels: int, joint: Labels) -> tuple[Labels, Labels]:
    """Return for each label the one that decides on it, itself or the first of two; and the second of two, or 0.

    `joint`, (n, 3), has a row for each joint label: itself and the two that decide on it.
    """
    first, second = np.arange(n_labels), np.zeros(n_labels, dtype=np.int64)
    first[joint[:, 0]], second[joint[:, 0]] = joint[:, 1], joint[:, 2]
    return first, second


@dataclass(frozen=True, eq=False)
class Numbering:
    """Labels of a trace as labels of a map, 0 .. n_labels - 1.

    Attributes:
        final: for each label of the trace.
        joint: (n, 3), see `deciders`.
    """

    final: Labels
    joint: Labels
    n_labels: int


def numbered(heads: Labels, positions: Labels, on_axes: Labels) -> Numbering:
    """Return the classes of two solutions numbered in the order of the trace, as one where both agree.

    Args:
        heads: class of each label of a trace where whole heads are removed, 0 for locked ones.
        positions: the same where positions are removed in all heads; the same array where there is no choice.
        on_axes: the labels that lie on parameter axes; no others count.
    """
    used = np.zeros(heads.size, dtype=bool)
    used[heads[on_axes]] = True
    first = np.where(used[heads], heads, 0)
    second = np.zeros_like(first) if positions is heads else _where_free(heads, positions, on_axes)
    # In the order of the trace, and a head before a position that begins with the same label.
    classes = np.zeros((heads.size, 2), dtype=bool)
    classes[first, 0] = classes[second, 1] = True
    classes[0] = True, False
    number = (np.cumsum(classes.reshape(-1)) - 1).reshape(-1, 2)
    final = np.where(first > 0, number[first, 0], number[second, 1])
    both = np.flatnonzero((first > 0) & (second > 0))
    deciding = number[first[both], 0], number[second[both], 1]
    count = int(classes.sum())
    pairs, index = np.unique(deciding[0] * count + deciding[1], return_inverse=True)
    final[both] = count + index
    joint = np.stack([count + np.arange(pairs.size), pairs // count, pairs % count], axis=1)
    return Numbering(np.where((first > 0) | (second > 0), final, 0), joint, count + pairs.size)


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

"""What a trace leaves for the resolution: labels that are locked, and choices that depend on what hangs together.

Labels that two others decide on: what two ways of resolving one trace have in common.

Attention can lose whole heads, or positions in all of its heads, and either leaves a model that runs. So it can lose
both: an entry stays if its head stays and its position does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prunekit.channels.labels import Labels, LabelUnion
from prunekit.channels.tracing.execution import ModuleCall

NOT_ZERO = "sums over values that are not exactly zero where the channel is removed"
"""Why channels are locked that a layer adds up."""


@dataclass(frozen=True, eq=False)
class LockRecord:
    """Labels that must stay, and why; with `positions`, whole heads of them may go, but no position in the heads.

    `call` is the module's call in which they were met; None where it is no call in particular.
    """

    reason: str
    module: str
    operator: str
    labels: Labels
    positions: bool = False
    call: ModuleCall | None = None


@dataclass(frozen=True, eq=False)
class Rectangle:
    """A labeled axis was viewed as rows x columns: what is kept must be whole rows or whole columns."""

    labels: Labels  # (rows, columns)


@dataclass(frozen=True, eq=False)
class EqualParts:
    """A labeled axis was cut into equal parts: as many channels must stay in every part."""

    labels: Labels  # (parts, size)


@dataclass(frozen=True, eq=False)
class Crossed:
    """Two labeled axes became one: an entry there is removed by either, which one label cannot say; one is locked."""

    first: LockRecord
    second: LockRecord


@dataclass(frozen=True, eq=False)
class Flattened:
    """An axis that several became met an axis that has one label for each entry, as a flattened kernel meets a vector.

    Attributes:
        factors: labels of each of the axes that became one, repeated along it.
        whole: of what they met.
    """

    factors: tuple[Labels, ...]
    whole: Labels


@dataclass(frozen=True, eq=False)
class Nested:
    """A field met another on part of its axes: it has one label along them, or it goes with the other.

    So query heads, each with one label, leave the table of a rotary embedding alone, which then stays.

    Attributes:
        labels: of the wider field, (others, shared).
        part: of the narrower one, (shared,).
        matched: whether the narrower one has a partner on just its axes.
    """

    labels: Labels
    part: LockRecord
    matched: bool


@dataclass(frozen=True, eq=False)
class Contracted:
    """A field was summed over some of its axes, as queries and keys are over the positions in each head.

    A head goes with all its labels, and then what is left of it goes too; or a position goes, in all heads.

    Attributes:
        labels: (positions, heads).
        part: what is left, (heads,): labels of its own.
        zero: whether what is removed is exactly zero; else no position may go.
        module: where.
    """

    labels: Labels
    part: Labels
    zero: bool
    module: str


@dataclass(frozen=True, eq=False)
class Padded:
    """Positions were added to every head: they go with it where it goes whole, and else stay.

    Attributes:
        labels: (positions, heads).
        part: of what was added, (heads,): labels of its own.
    """

    labels: Labels
    part: Labels


@dataclass(frozen=True, eq=False)
class Grouped:
    """A convolution of few groups with many channels each: it loses whole groups, or a column of every one.

    Attributes:
        inputs: (groups, channels of each).
        outputs: (groups, channels of each).
        columns: of the weight, (channels of each group,).
        module: the convolution.
    """

    inputs: Labels
    outputs: Labels
    columns: Labels
    module: str


Constraint = Rectangle | EqualParts | Crossed | Flattened | Nested | Contracted | Padded | Grouped


NOT_JOINT: Labels = np.zeros((0, 3), dtype=np.int64)


def deciders(n_labels: int, joint: Labels) -> tuple[Labels, Labels]:
    """For each label which one decides on it, itself or the first of two; and the second of two or 0.

    Args:
        joint: (n, 3), rows of a label and the two that decide on it.
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
    """Return numbers the classes of two resolutions in the order of the trace; one class where both say the same.

    Args:
        heads: class of each label of a trace where whole heads go, 0 for locked ones.
        positions: the same where positions in all heads go; the same array where there is no choice.
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
    """Return the classes of positions where these are a choice of their own: every head has every one of several;
    else 0.
    """
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
    """Return how many classes each component has, (size,)."""
    return np.bincount(np.unique(which * size + classes) // size, minlength=size)

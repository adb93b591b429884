"""Constraints that a trace leaves: locked labels, and choices that depend on which labels are coupled in the end.

`prunekit.channels.labels.constraint_solver` solves them. Positions that may change places inside of one module, such as
experts, are no constraint, but keep operators inside from locking them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from prunekit.channels.labels import Labels, LabelUnion
from prunekit.channels.labels.code_places import CodePlace, Expression, ModuleCall

NOT_ZERO = "sums over values that are not exactly zero where the channel is removed"
"""The reason of locks on channels that a layer sums over."""


class Removal(IntEnum):
    """Kinds of channels that attention can lose, each in a solution of its own.

    Queries are as many query heads of every head of keys and values, which all stay.
    """

    HEADS = 0
    POSITIONS = 1
    QUERIES = 2


@dataclass(frozen=True, eq=False)
class LockRecord:
    """Labels that must stay, and why.

    With `only`, they stay where this kind is removed, and may go with others. `call` is the call of the module in which
    they were met, None if it is no call in particular.
    """

    reason: str
    module: str
    operator: str
    labels: Labels
    only: Removal | None = None
    call: ModuleCall | None = None


@dataclass(frozen=True, eq=False)
class Rectangle:
    """A labeled axis was viewed as rows x columns: only whole rows or whole columns can be kept."""

    labels: Labels  # (rows, columns)


@dataclass(frozen=True, eq=False)
class EqualParts:
    """A labeled axis was cut into equal parts: as many channels must stay in every part."""

    labels: Labels  # (parts, size)


@dataclass(frozen=True, eq=False)
class Crossed:
    """Two labeled axes became one: removing from either removes entries, which one label cannot say."""

    first: LockRecord
    second: LockRecord


@dataclass(frozen=True, eq=False)
class Repeated:
    """A labeled axis was repeated, as heads of keys are for the query heads that they serve.

    Either copies are removed with their source, or the same copies of every source, which stays.

    Attributes:
        source: labels of what was repeated, in the place of each of the copies.
        repeats: labels of the number of repetitions, the same.
        copies: labels of the copies.
    """

    source: Labels
    repeats: Labels
    copies: Labels


@dataclass(frozen=True, eq=False)
class Flattened:
    """An axis made of several met one with a label for each entry, as a flattened kernel meets a vector.

    Attributes:
        factors: labels of each of the axes that became one, repeated along it.
        whole: labels of the axis that they met.
    """

    factors: tuple[Labels, ...]
    whole: Labels


@dataclass(frozen=True, eq=False)
class Nested:
    """A field met another on part of its axes: it has one label along them, or it is coupled with the other.

    Query heads, each with one label, leave the table of a rotary embedding as it is, which is then locked.

    Attributes:
        labels: of the wider field, (others, shared).
        part: of the narrower field, (shared,).
        matched: whether the narrower field has a partner on exactly its axes.
    """

    labels: Labels
    part: LockRecord
    matched: bool


@dataclass(frozen=True, eq=False)
class Contracted:
    """A field was summed over some of its axes, as queries and keys are over the positions in each head.

    Either a head is removed with all its labels and with what is left of it, or a position is removed in all heads.

    Attributes:
        labels: (positions, heads).
        part: labels of the sum, (heads,).
        zero: whether removed entries are exactly zero; if not, no position may be removed.
        module: path of the module that computes the sum.
    """

    labels: Labels
    part: Labels
    zero: bool
    module: str


@dataclass(frozen=True, eq=False)
class Normalized:
    """A field was normalized over one of its axes: whole rows of it are removed, or a position in all rows.

    Queries lose whole heads, or positions in all of them; tokens made from one vector lose channels.

    Attributes:
        labels: (positions, rows).
        rows: labels of the result's rows, (rows,).
        positions: labels of the result's positions, (positions,).
    """

    labels: Labels
    rows: Labels
    positions: Labels


@dataclass(frozen=True, eq=False)
class Padded:
    """Positions were added to every head: they are removed with a whole head, and stay otherwise.

    Attributes:
        labels: (positions, heads).
        part: labels of the added positions, (heads,).
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
        module: path of the convolution.
    """

    inputs: Labels
    outputs: Labels
    columns: Labels
    module: str


@dataclass(frozen=True, eq=False)
class FixedPositions:
    """Channels that stay unless the compact model states which positions an expression takes of a tensor.

    An index that the model stores keeps its numbers, and a table that forward computes keeps its size.

    Attributes:
        record: the lock unless the positions are stated, with a label for each position of the axis.
        expression: the expression in whose place they can be stated.
        place: of the tensor in it, with its axis.
        order: from which position of the axis each one comes.
    """

    record: LockRecord
    expression: Expression
    place: CodePlace
    order: Labels


Constraint = (
    Rectangle
    | EqualParts
    | Crossed
    | Repeated
    | Flattened
    | Nested
    | Contracted
    | Normalized
    | Padded
    | Grouped
    | FixedPositions
)


TensorAxis = tuple[str, int]
"""The name of a tensor, and one of its axes."""


@dataclass(frozen=True)
class Interchangeable:
    """Axes of a module's tensors whose positions may change places, all together, without a change of its results.

    Attributes:
        module: its path.
        axes: of tensors inside of it.
        parts: into how many equal parts they fall; the same positions of all parts belong together.
        least: the fewest positions of a part with which the module runs.
        sizes: whole numbers to set: path and name of an attribute, and whether it is the size of one part.
    """

    module: str
    axes: tuple[TensorAxis, ...]
    parts: int
    least: int
    sizes: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True, eq=False)
class Positions:
    """Interchangeable positions with their labels, (size,), which no others lie between.

    Operators inside of the module do not lock them: the module runs narrow as a whole where some are removed.
    """

    known: Interchangeable
    labels: Labels

    def hold(self, labels: Labels) -> bool:
        """Return whether all of some labels are of these positions."""
        return bool(self.labels[0] <= labels.min() and labels.max() <= self.labels[-1])


def positions_of(found: Interchangeable, size: int, union: LabelUnion) -> Positions:
    """Return new labels for axes of a size, the same in each part."""
    return Positions(found, np.tile(union.new(size // found.parts), found.parts))


def around(path: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it, without the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]

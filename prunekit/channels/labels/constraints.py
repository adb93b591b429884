"""Constraints that a trace leaves: locked labels, and choices that depend on which labels are coupled in the end.

`prunekit.channels.labels.constraint_solver` solves them. Positions that may change places inside of one module, such as
experts, are no constraint, but keep operators inside from locking them. `EqualWidths` are constraints of another kind,
which no trace leaves: groups that keep the same share, because layers repeat or a configuration says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import reduce
from operator import and_
from typing import ClassVar

import numpy as np

from prunekit.channels.labels.code_places import CodePlace, Expression, ModuleCall
from prunekit.channels.labels.label_union import Labels, LabelUnion

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
    """Labels that must stay, and why."""

    reason: str
    module: str
    operator: str
    labels: Labels
    only: Removal | None = None  # they stay where this kind is removed, and may go with others
    call: ModuleCall | None = None  # the call of the module in which they were met; None if none in particular


def _in_whole_rows(roots: Labels) -> bool:
    """Return whether every row is one class, and there are several."""
    return bool(roots.shape[1] > 1 and (roots == roots[:, :1]).all() and (roots != roots[0, 0]).any())


class Constraint:
    """A condition on which labels are coupled in the end, which the solver makes hold by merges and locks."""

    rank: ClassVar[int] = 4  # those that say what is coupled are solved first, those that only follow it last

    def begin(self, union: LabelUnion, removal: Removal) -> None:
        """Couple what depends on nothing but the kind of channels that is removed; done once, before all others."""

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Make it hold for the classes as they are now, and return the locks to report.

        `whole_heads` is False where positions in all heads are removed.
        """
        return ()


@dataclass(frozen=True, eq=False)
class Rectangle(Constraint):
    """A labeled axis was viewed as rows x columns: only whole rows or whole columns can be kept."""

    labels: Labels  # (rows, columns)

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Keep whole rows if each is one class already (attention heads), else whole columns (channel shuffle)."""
        roots = union.find(self.labels)
        if not (roots == roots[:, :1]).all():
            union.merge(self.labels, self.labels[:1])
        return []


@dataclass(frozen=True, eq=False)
class EqualParts(Constraint):
    """A labeled axis was cut into equal parts: as many channels must stay in every part."""

    labels: Labels  # (parts, size)

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Tie labels across parts, as few as it takes: a class that every part holds equally often needs no tie.

        The rest is matched by how often a class occurs, so that classes of one size meet.
        """
        counts = [Counter(row) for row in union.find(self.labels).tolist()]  # of each class in each part
        if all(own == counts[0] for own in counts[1:]):
            return []
        common = reduce(and_, counts)
        rest = [(own - common).most_common() for own in counts]
        rows = [np.array([one for one, n in classes for _ in range(n)], dtype=np.int64) for classes in rest]
        for row in rows[1:]:
            union.merge(rows[0], row)
        return []


@dataclass(frozen=True, eq=False)
class Crossed(Constraint):
    """Two labeled axes became one: removing from either removes entries, which one label cannot say."""

    first: LockRecord
    second: LockRecord
    rank: ClassVar[int] = 1

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Lock the second axis where whole heads are removed, else the first; neither if one is locked already."""
        both = [self.first, self.second]
        if not all(union.find(record.labels).any() for record in both):
            return []
        union.lock(both[whole_heads].labels)
        return [] if whole_heads else [both[0]]


@dataclass(frozen=True, eq=False)
class Repeated(Constraint):
    """A labeled axis was repeated, as heads of keys are for the query heads that they serve.

    Either copies are removed with their source, or the same copies of every source, which stays.
    """

    source: Labels  # for each copy, the label of what was repeated
    repeats: Labels  # for each copy, a label that all first copies share, another of all second ones, ...
    copies: Labels  # a label of its own for each copy
    rank: ClassVar[int] = 0

    def begin(self, union: LabelUnion, removal: Removal) -> None:
        """Make copies one class with their source, or with the same copies of others, and lock the source."""
        if removal == Removal.QUERIES:
            union.merge(self.copies, self.repeats)
            union.lock(self.source)
        else:
            union.merge(self.copies, self.source)


@dataclass(frozen=True, eq=False)
class Flattened(Constraint):
    """An axis made of several met one with a label for each entry, as a flattened kernel meets a vector."""

    factors: tuple[Labels, ...]  # labels of each of the axes that became one, repeated along it
    whole: Labels  # labels of the axis that they met
    rank: ClassVar[int] = 2

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Merge the entries with the one axis that loses anything; their place on the others stays, as in a kernel.

        Where several axes could lose entries, nothing tells them apart.
        """
        able = [labels for labels in self.factors if union.find(labels).any()]
        for labels in able:
            union.merge(labels, self.whole)
        if not able:
            union.lock(self.whole)
        return []


@dataclass(frozen=True, eq=False)
class Nested(Constraint):
    """A field met another on part of its axes: it has one label along them, or it is coupled with the other.

    Query heads, each with one label, leave the table of a rotary embedding as it is, which is then locked.
    """

    labels: Labels  # of the wider field, (others, shared)
    part: LockRecord  # of the narrower field, (shared,)
    matched: bool  # whether the narrower field has a partner on exactly its axes
    rank: ClassVar[int] = 2

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Leave whole rows as they are, and lock what they met unless it has a partner; otherwise merge whole columns.

        Where what they met is locked, only rows can be removed.
        """
        roots = union.find(self.labels)
        whole_rows = (roots == roots[:, :1]).all() and (roots != roots[0, 0]).any()
        free = union.find(self.part.labels).any()
        if not whole_rows and free:
            union.merge(self.labels, self.part.labels[None])
        elif not whole_rows:
            union.tie(self.labels, [1])
        elif free and not self.matched:
            union.lock(self.part.labels)
            return [self.part]
        return []


@dataclass(frozen=True, eq=False)
class Contracted(Constraint):
    """A field was summed over some of its axes, as queries and keys are over the positions in each head.

    Either a head is removed with all its positions and its entry in the sum, or a position is removed in all heads.
    """

    labels: Labels  # (positions, heads)
    part: Labels  # labels of the sum, (heads,)
    zero: bool  # whether removed entries are exactly zero; if not, no position may be removed
    module: str  # path of the module that computes the sum
    rank: ClassVar[int] = 0

    def begin(self, union: LabelUnion, removal: Removal) -> None:
        """Make each head one class with its label in the sum; or each position one in all heads, and lock the sum.

        Where the whole sum has to stay, as what the model returns does, only positions can be removed.
        """
        if removal != Removal.POSITIONS and union.find(self.part).any():
            union.merge(self.labels, self.part[None])
        else:
            union.tie(self.labels, [1])
            union.lock(self.part)
            if not self.zero:
                union.lock(self.labels)


@dataclass(frozen=True, eq=False)
class Normalized(Constraint):
    """A field was normalized over one of its axes: whole rows of it are removed, or a position in all rows.

    Queries lose whole heads, or positions in all of them; tokens made from one vector lose channels.
    """

    labels: Labels  # (positions, rows)
    rows: Labels  # labels of the result's rows, (rows,)
    positions: Labels  # labels of the result's positions, (positions,)

    def begin(self, union: LabelUnion, removal: Removal) -> None:
        """Make each row one class and lock the positions; or each position one class in all rows, and lock the rows."""
        if removal != Removal.POSITIONS:
            union.merge(self.labels, self.rows[None])
            union.lock(self.positions)
        else:
            union.merge(self.labels, self.positions[:, None])
            union.lock(self.rows)


@dataclass(frozen=True, eq=False)
class Padded(Constraint):
    """Positions were added to every head: they are removed with a whole head, and stay otherwise."""

    labels: Labels  # (positions, heads)
    part: Labels  # labels of the added positions, (heads,)
    rank: ClassVar[int] = 5

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Merge what was added to a head with the head where that is removed as a whole, else lock it."""
        roots = union.find(self.labels)
        if (roots == roots[:1]).all():
            union.merge(self.part, self.labels[0])
        else:
            union.lock(self.part)
        return []


@dataclass(frozen=True, eq=False)
class Grouped(Constraint):
    """A convolution of few groups with many channels each: it loses whole groups, or a column of every one."""

    inputs: Labels  # (groups, channels of each)
    outputs: Labels  # (groups, channels of each)
    columns: Labels  # of the weight, (channels of each group,)
    module: str  # path of the convolution
    rank: ClassVar[int] = 3

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Couple whole groups if the channels of each are coupled already, as those of a head, else columns of each."""
        if any(_in_whole_rows(union.find(labels)) for labels in (self.inputs, self.outputs)):
            union.tie(self.inputs, [1])
            union.merge(self.outputs, self.inputs[:, :1])
            union.lock(self.columns)
        else:
            union.merge(self.inputs, self.columns[None])
            union.tie(self.outputs, [0])
        return []


@dataclass(frozen=True, eq=False)
class FixedPositions(Constraint):
    """Channels that stay unless the compact model states which positions an expression takes of a tensor.

    An index that the model stores keeps its numbers, and a table that forward computes keeps its size.
    """

    record: LockRecord  # the lock unless the positions are stated, with a label for each position of the axis
    expression: Expression  # the expression in whose place they can be stated
    place: CodePlace  # of the tensor in it, with its axis
    order: Labels  # from which position of the axis each one comes
    rank: ClassVar[int] = 0

    def solve(self, union: LabelUnion, whole_heads: bool) -> Iterable[LockRecord]:
        """Lock channels whose positions the model's Python fixes."""
        if not union.find(self.record.labels).any():
            return []
        union.lock(self.record.labels)
        return [self.record]


TensorAxis = tuple[str, int]
"""The name of a tensor, and one of its axes."""


@dataclass(frozen=True)
class Interchangeable:
    """Axes of a module's tensors whose positions may change places, all together, without a change of its results."""

    module: str  # its path
    axes: tuple[TensorAxis, ...]  # of tensors inside of it
    parts: int  # into how many equal parts they fall; the same positions of all parts belong together
    least: int  # the fewest positions of a part with which the module runs
    # whole numbers to set: path and name of an attribute, and whether it is the size of one part
    sizes: tuple[tuple[str, str, bool], ...]

    def at(self, path: str) -> Interchangeable:
        """Return the same of a module at a path of a model, given that of the module alone."""
        axes = tuple((f"{path}.{name}", axis) for name, axis in self.axes)
        sizes = tuple((f"{path}.{inner}" if inner else path, name, part) for inner, name, part in self.sizes)
        return replace(self, module=path, axes=axes, sizes=sizes)


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


Family = frozenset[tuple[str, int]]
"""Parameter axes with `#` in place of the numbers in their paths, as a group has them in each of several layers."""

OF_KIND = -1
"""In place of an axis: what the channels are, heads or positions in them, which may lie on the same axes."""


@dataclass(frozen=True, eq=False)
class EqualWidths:
    """Families of groups that keep the same share together, and those that stay whole."""

    together: tuple[frozenset[Family], ...] = ()  # families of which each keeps the same share as the others
    whole: Mapping[Family, str] = field(default_factory=dict)  # families that stay whole, with the reason
    # families with the number that the count of what they keep has to be a multiple of
    multiples: Mapping[Family, int] = field(default_factory=dict)

    def holds_for(self, families: Set[Family]) -> bool:
        """Return whether all families that keep the same share are still among those of a model."""
        return all(each <= families for each in self.together)

    def with_family(self, family: Family) -> frozenset[Family]:
        """Return the families that keep the same share as one, with itself."""
        return next((each for each in self.together if family in each), frozenset({family}))


NO_EQUAL_WIDTHS = EqualWidths()


def family_of(slots: Iterable[tuple[str, int]], kind: str) -> Family:
    """Return the family of a group on some parameter axes, of channels of a kind.

    Example:
        >>> family_of([("layers.0.fc1.weight", 0)], "") == family_of([("layers.1.fc1.weight", 0)], "")
        True
    """
    axes = {(re.sub(r"(?<![^.])\d+(?![^.])", "#", name), axis) for name, axis in slots}
    return frozenset(axes | {(kind, OF_KIND)})


def family_name(family: Family) -> str:
    """Return the name of a family for messages: the first module that makes its channels, and their kind."""
    made = sorted(name for name, axis in family if axis == 0) or sorted(name for name, axis in family if axis > 0)
    kind = "".join(name for name, axis in family if axis == OF_KIND)
    return f"{kind} {made[0].rpartition('.')[0] or made[0]}".strip()

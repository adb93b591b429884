"""What a trace leaves for the resolution: labels that are locked, and choices that depend on what hangs together."""

from __future__ import annotations

from dataclasses import dataclass

from prunekit.channels.labels import Labels
from prunekit.channels.running import ModuleCall

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

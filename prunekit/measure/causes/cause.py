"""A cause, with its evidence and the change that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

from prunekit.measure.causes.breakdown import OperatorRow, Side
from prunekit.utils.display import listed

LEAST = 0.02
"""Share of the pruned model's time below which nothing is worth a sentence."""
NAMED = 3


@dataclass(frozen=True)
class Cause:
    """Why time is spent that the multiply-accumulates do not explain.

    Attributes:
        name: what tables call it.
        ms: of a forward pass of the pruned model, estimated from what was measured; causes overlap, so that they do not
            add up. 0 for what was found and makes no difference here.
        evidence: what was measured, in sentences.
        fix: the change to make.
        modules: paths that it was found at, the slowest first; empty for the whole model.
    """

    name: str
    ms: float
    evidence: str
    fix: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ran:
    """Operators that the pruned model ran, taken together.

    Attributes:
        rows: the slowest first.
        sides: what each did in the pruned model.
    """

    rows: tuple[OperatorRow, ...]
    sides: tuple[Side, ...]

    @staticmethod
    def those(rows: Iterable[OperatorRow], wanted: Callable[[OperatorRow, Side], bool]) -> Ran:
        """Of all rows those that the pruned model ran and that are wanted."""
        found = [(row, row.pruned) for row in rows if row.pruned is not None and wanted(row, row.pruned)]
        return Ran(tuple(row for row, _ in found), tuple(side for _, side in found))

    @cached_property
    def ms(self) -> float:
        """What they take."""
        return sum(side.ms for side in self.sides)

    @cached_property
    def excess_ms(self) -> float:
        """What they take beyond their ideal."""
        return sum(max(0.0, row.excess_ms) for row in self.rows)

    @cached_property
    def calls(self) -> int:
        """How often they ran."""
        return sum(side.calls for side in self.sides)

    @cached_property
    def bytes(self) -> int:
        """What they moved."""
        return sum(side.bytes for side in self.sides)

    @property
    def kinds(self) -> str:
        """Some of the operators' names."""
        return some([row.operator for row in self.rows])

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that run them."""
        return tuple(dict.fromkeys(row.module for row in self.rows))


class Saving(Protocol):
    """A layer and what it would save another way."""

    @property
    def saved_ms(self) -> float:
        """Milliseconds of a forward pass of the pruned model."""


L = TypeVar("L", bound=Saving)


def worth_naming(layers: Iterable[L], pruned_ms: float) -> list[L]:
    """Return the layers by what they would save, the most first; none where all together are not worth a sentence."""
    found = sorted(layers, key=lambda layer: -layer.saved_ms)
    return found if sum(layer.saved_ms for layer in found) >= LEAST * pruned_ms else []


def some(names: Sequence[str], shown: int = NAMED) -> str:
    """Return the first of several names, and how many more there are."""
    return listed(dict.fromkeys(name or "(root)" for name in names), shown)

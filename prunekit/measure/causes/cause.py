"""A cause of lost time, with its evidence and its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from prunekit.measure.causes.breakdown import OperatorFigures, OperatorRow
from prunekit.utils.display import listed

LEAST = 0.02
"""Smallest share of the pruned model's time that is worth reporting."""


@dataclass(frozen=True)
class Cause:
    """A cause of time that the multiply-accumulates do not explain.

    Attributes:
        name: for tables.
        ms: estimate of the time in a forward pass of the pruned model; causes overlap, so that these do not add up. 0
            for a cause that makes no difference here.
        evidence: the measurements, in sentences.
        fix: the change to make.
        modules: paths of the modules concerned, the slowest first; empty for the whole model.
    """

    name: str
    ms: float
    evidence: str
    fix: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class OperatorGroup:
    """Operators that the pruned model ran, taken together.

    Attributes:
        rows: the slowest first.
        figures: of each in the pruned model.
    """

    rows: tuple[OperatorRow, ...]
    figures: tuple[OperatorFigures, ...]

    @staticmethod
    def select(rows: Iterable[OperatorRow], wanted: Callable[[OperatorRow, OperatorFigures], bool]) -> OperatorGroup:
        """Return the operators that the pruned model ran and that are wanted."""
        found = [(row, row.pruned) for row in rows if row.pruned is not None and wanted(row, row.pruned)]
        return OperatorGroup(tuple(row for row, _ in found), tuple(figures for _, figures in found))

    @cached_property
    def ms(self) -> float:
        """Their milliseconds together."""
        return sum(one.ms for one in self.figures)

    @cached_property
    def excess_ms(self) -> float:
        """Their milliseconds beyond the ideal."""
        return sum(max(0.0, row.excess_ms) for row in self.rows)

    @cached_property
    def calls(self) -> int:
        """Number of their calls."""
        return sum(one.calls for one in self.figures)

    @cached_property
    def bytes(self) -> int:
        """Bytes that they moved."""
        return sum(one.bytes for one in self.figures)

    @property
    def kinds(self) -> str:
        """Some of the operators' names."""
        return first_names([row.operator for row in self.rows])

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that run them."""
        return tuple(dict.fromkeys(row.module for row in self.rows))


def first_names(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    return listed(dict.fromkeys(name or "(root)" for name in names), 3)

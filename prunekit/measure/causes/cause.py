"""A cause, with its evidence and the change that fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prunekit.measure.breakdown import OperatorRow

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


def excess(rows: Iterable[OperatorRow]) -> float:
    """Milliseconds that operators take beyond their ideal."""
    return sum(max(0.0, row.excess_ms) for row in rows)


def spent(rows: Iterable[OperatorRow]) -> float:
    """Milliseconds of operators in the pruned model."""
    return sum(row.pruned.ms for row in rows if row.pruned is not None)


def some(names: Sequence[str], shown: int = NAMED) -> str:
    """The first of several names, and how many more there are."""
    distinct = list(dict.fromkeys(name or "(root)" for name in names))
    more = len(distinct) - shown
    return ", ".join(distinct[:shown]) + (f" and {more} more" if more > 0 else "")


def plural(count: int, word: str) -> str:
    """A count with its word, e.g. 2 layers."""
    return f"{count:,} {word}{'s'[: count != 1]}"

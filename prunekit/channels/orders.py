"""Expressions that put channels in another order, as a channel shuffle does: a view, a transpose and a view back.

What is left of the channels need not be rectangular if the compact model states the order instead (channel shuffle:
ShuffleNet, 2017).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

import numpy as np

from prunekit.channels.constraints import Constraint, EqualParts, Rectangle
from prunekit.channels.expressions import size_expressions
from prunekit.channels.labels import Labels
from prunekit.channels.map import Keep
from prunekit.channels.operators import Operator, Run
from prunekit.channels.places import Place, place_of
from prunekit.channels.sites import expression_at


@dataclass(frozen=True, eq=False)
class Rearranged:
    """Channels that an expression in a module's Python puts in another order.

    Attributes:
        owner: path of the module.
        place: the expression, with the axis.
        labels: of the channels as they come, (size,); no two alike.
        order: from which position each one comes, (size,).
        constraints: what must stay rectangular if the order is not stated.
    """

    owner: str
    place: Place
    labels: Labels
    order: Labels
    constraints: tuple[Rectangle, ...]

    def runs_with(self, keep: Keep, final: Labels) -> bool:
        """Whether the expression itself leaves what is kept in the same order: where it is rectangular."""
        kept = [keep[final[rectangle.labels]] for rectangle in self.constraints]
        return all(bool((grid == grid[:1]).all() or (grid == grid[:, :1]).all()) for grid in kept)


def rearranged(runs: Iterable[Run]) -> list[Rearranged]:
    """All expressions that only rearrange one axis of channels."""
    found = []
    for run in runs:
        for start in range(0 if not run.repeats else len(run.operators), len(run.operators)):
            if any(isinstance(constraint, Rectangle) for constraint in run.operators[start].constraints):
                found += [one for one in _rearranged(list(_chain(run.operators, start))) if one is not None][:1]
    return found


def avoidable(runs: Iterable[Run]) -> set[Constraint]:
    """Constraints that stated sizes and orders make unnecessary: of equal parts, and of what only rearranges."""
    runs = list(runs)
    found: set[Constraint] = {constraint for one in rearranged(runs) for constraint in one.constraints}
    for operator in (operator for run in runs for operator in run.operators):
        equal = [constraint for constraint in operator.constraints if isinstance(constraint, EqualParts)]
        if equal and any(size.position is not None for size in size_expressions(operator, ())):
            found.update(equal)
    return found


_MOVES = frozenset(
    f"aten.{name}" for name in ("view", "_unsafe_view", "permute", "transpose", "clone", "unsqueeze", "squeeze")
)


def _chain(operators: Sequence[Operator], start: int) -> Iterator[Operator]:
    """Operators that move what the one before them moved, and nothing else."""
    yield operators[start]
    for before, operator in zip(operators[start:], operators[start + 1 :], strict=False):
        (fields,) = before.outputs
        if operator.name not in _MOVES or len(fields) != 1 or operator.inputs != fields:
            return
        yield operator


def _rearranged(chain: Sequence[Operator]) -> Iterator[Rearranged | None]:
    """The chain up to its first end at which the channels are on their axis again."""
    first = chain[0]
    for end, last in enumerate(chain[1:], 1):
        if len(first.inputs) != 1 or len(last.outputs[0]) != 1 or last.call[2][0] != first.call[0][0]:
            continue
        before, after = first.inputs[0], last.outputs[0][0]
        site = _expression(first, last)
        if site is None or len(before.span) != 1 or after.span != before.span:
            continue
        labels, moved = before.labels.reshape(-1), after.labels.reshape(-1)
        place = place_of(*site)
        if place is not None and len(np.unique(labels)) == labels.size:
            order = np.argsort(labels)[np.searchsorted(np.sort(labels), moved)]
            left = [c for one in chain[: end + 1] for c in one.constraints if isinstance(c, Rectangle)]
            where = Place(place.function, place.line, place.column, place.text, before.span[0])
            yield Rearranged(first.owner, where, labels, order, tuple(left))


def _expression(first: Operator, last: Operator) -> tuple[CodeType, ast.expr] | None:
    """The call of a function in which both ran, or the chain of methods from one to the other; with its method."""
    if first.caller is not None and first.caller == last.caller and first.owner == last.owner:
        node = expression_at(first.caller)
        return (first.caller.method, node) if isinstance(node, ast.Call) and node.args else None
    if first.site is None or last.site is None or first.site.method is not last.site.method:
        return None
    inner, outer = expression_at(first.site), expression_at(last.site)
    chained = inner is not None and outer is not None and inner in ast.walk(outer)
    return (first.site.method, outer) if chained and isinstance(outer, ast.Call) else None

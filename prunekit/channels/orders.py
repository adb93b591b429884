"""Expressions that put channels in another order, as a channel shuffle does: a view, a transpose and a view back.

What is left of the channels need not be rectangular if the compact model states the order instead (channel shuffle:
ShuffleNet, 2017).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType

import numpy as np

from prunekit.channels.constraints import Constraint, EqualParts, Rectangle
from prunekit.channels.expressions import part_sizes
from prunekit.channels.labels import Labels
from prunekit.channels.map import SizeAttribute
from prunekit.channels.operators import Operator, Run
from prunekit.channels.places import place_of
from prunekit.channels.sites import expression_at


@dataclass(frozen=True, eq=False)
class Avoidable:
    """Constraints that are none if a compact model is told sizes or an order in place of an expression."""

    sizes: tuple[SizeAttribute, ...]
    constraints: tuple[Constraint, ...]


def avoidable(runs: Iterable[Run]) -> list[Avoidable]:
    """What equal parts and shuffles ask for, by the expressions that make them, where these always do the same."""
    found: dict[tuple[str, str], list[Avoidable]] = {}
    for run in runs:
        for index, operator in enumerate(run.operators):
            if any(isinstance(constraint, EqualParts) for constraint in operator.constraints):
                one: Avoidable | None = Avoidable(tuple(part_sizes(operator)), operator.constraints)
            elif any(isinstance(constraint, Rectangle) for constraint in operator.constraints):
                one = next(_rearranged(list(_chain(run.operators, index))), None)
            else:
                continue
            if one is not None and one.sizes:
                found.setdefault((one.sizes[0].module, one.sizes[0].name), []).append(one)
    return [_together(every) for every in found.values() if all(_alike(one, every[0]) for one in every)]


def _together(every: Sequence[Avoidable]) -> Avoidable:
    return Avoidable(every[0].sizes, tuple(constraint for one in every for constraint in one.constraints))


def _alike(left: Avoidable, right: Avoidable) -> bool:
    pairs = list(zip(left.sizes, right.sizes, strict=False))
    same = all(np.array_equal(a.labels, b.labels) and np.array_equal(_order(a), _order(b)) for a, b in pairs)
    return same and len(left.sizes) == len(right.sizes)


def _order(size: SizeAttribute) -> Labels:
    return np.arange(len(size.labels)) if size.order is None else size.order


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


def _rearranged(chain: Sequence[Operator]) -> Iterator[Avoidable]:
    """What the chain does up to each end at which the channels are on their axis again."""
    first = chain[0]
    for end, last in enumerate(chain[1:], 1):
        if len(first.inputs) != 1 or len(last.outputs[0]) != 1 or last.call[2][0] != first.call[0][0]:
            continue
        before, after = first.inputs[0], last.outputs[0][0]
        site = _expression(first, last)
        place = None if site is None else place_of(*site)
        labels, moved = before.labels.reshape(-1), after.labels.reshape(-1)
        if place is None or before.span == (0,) or len(before.span) != 1 or after.span != before.span:
            continue
        if len(np.unique(labels)) < labels.size:
            continue
        order = np.argsort(labels)[np.searchsorted(np.sort(labels), moved)]
        where = replace(place, axis=before.span[0])
        left = tuple(constraint for operator in chain[: end + 1] for constraint in operator.constraints)
        yield Avoidable((SizeAttribute(first.owner, str(where), None, labels[:, None], order),), left)


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

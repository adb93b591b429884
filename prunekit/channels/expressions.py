"""Sizes that stand in a module's Python: which expressions called an operator, and how many of which labels they say.

So `x.reshape(B, N, C)`, the parts of a split, the bounds of a slice, and the scale that attention makes of a width.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from prunekit.channels.labels import Field, Labels, rows_along
from prunekit.channels.map import SizeAttribute
from prunekit.channels.operators import Operator
from prunekit.channels.places import Place, attribute_read, place_of
from prunekit.channels.rules.shape import axis_groups
from prunekit.channels.sites import expression_at
from prunekit.channels.syntax import (
    is_chunk,
    is_unscaled_attention,
    parts_argument,
    shape_arguments,
    slice_of_axis,
)


@dataclass(frozen=True, eq=False)
class SizeExpression:
    """An expression that says how many of some labels there are; or, at a position, one part of a list that it makes.

    Labels of 0 stand for positions that stay whatever is pruned. The expression needs to be replaced where channels of
    `decides` go. `reads` is the attribute that it reads, as in `part.width`.
    """

    place: Place
    position: int | None
    labels: Labels  # (size, n), as in `SizeAttribute`
    decides: Labels
    reads: str | None = None


def size_expressions(operator: Operator, varying: Container[int]) -> Iterator[SizeExpression]:
    """The sizes in the expression that called an operator, where it stands in a method of a module.

    Args:
        varying: axes of the operator's first result whose sizes depend on the input; these are left alone.
    """
    site = operator.site
    node = None if site is None else expression_at(site)
    if site is None or node is None:
        return
    name = operator.name.removeprefix("aten.")
    if name == "mul":
        sizes = _of_scale
    else:
        sizes = _of_slice if name == "slice" else _of_split if name.startswith("split") else _of_shape
    found = list(sizes(operator, node))
    whole = not any(position is not None and axis in varying for axis, _, position, _ in found)
    for axis, expression, position, labels in found if whole else ():
        place = place_of(site.method, expression)
        if axis not in varying and place is not None and labels.size:
            if name == "mul":
                yield SizeExpression(place, None, np.zeros_like(labels[:, :1]), labels)
            else:
                yield SizeExpression(place, position, labels, labels, attribute_read(site.method, expression))


Sized = tuple[int, ast.expr, int | None, Labels]


def _of_shape(operator: Operator, node: ast.expr) -> Iterator[Sized]:
    """Sizes of axes that are labeled, or that came of one that is: heads are, and with them their width."""
    old, new = operator.call[0][0], operator.call[2][0]
    linked = set()
    for left, right in axis_groups(old, new) if operator.name != "aten.expand" else ():
        spans = [axis for field in operator.inputs for axis in field.span if axis in left]
        linked |= set(right) if spans else set()
    for axis, expression, position in shape_arguments(node, len(new)):
        rows = _rows(operator.outputs[0], axis)
        if rows is None and (position is not None or (axis in linked and not isinstance(expression, ast.Constant))):
            rows = np.zeros((new[axis], 1), dtype=np.int64)
        if rows is not None and not _is_rest(expression):
            yield axis, expression, position, rows


def _of_split(operator: Operator, node: ast.expr, *, equal: bool = False) -> Iterator[Sized]:
    expression = node if is_chunk(node) else parts_argument(node)
    axis = _axis(operator, 2)
    rows = [_rows(fields, axis) for fields in operator.outputs]
    if expression is None or not rows or any(part is None for part in rows):
        return
    if is_chunk(node) and len({len(part) for part in rows}) == 1 and not equal:  # type: ignore[arg-type]
        return  # as many stay in each
    if operator.name == "aten.split" and not is_chunk(node):
        yield axis, expression, None, rows[0]  # type: ignore[misc]
    elif isinstance(expression, (ast.List, ast.Tuple)):
        yield from ((axis, element, None, part) for element, part in zip(expression.elts, rows, strict=False))  # type: ignore[misc]
    else:
        yield from ((axis, expression, position, part) for position, part in enumerate(rows))  # type: ignore[misc]


def part_sizes(operator: Operator) -> list[SizeAttribute]:
    """The sizes of equal parts into which an expression cuts an axis, where it can be told one for each.

    But for the first axis, which may grow with the batch.
    """
    site = operator.site
    node = None if site is None else expression_at(site)
    if site is None or node is None or not is_chunk(node):
        return []
    place = place_of(site.method, node)
    found = _of_split(operator, node, equal=True) if place is not None else ()
    return [SizeAttribute(operator.owner, str(place), position, labels) for axis, _, position, labels in found if axis]


def _of_scale(operator: Operator, node: ast.expr) -> Iterator[Sized]:
    """Attention multiplies by a power of the width of a head unless it is told a scale: it keeps the dense one."""
    axis = len(operator.call[2][0]) - 1
    rows = _rows(operator.inputs, axis)
    if rows is not None and is_unscaled_attention(node):
        yield axis, node, None, rows


def _of_slice(operator: Operator, node: ast.expr) -> Iterator[Sized]:
    shape, *given = operator.call[0]
    axis = _axis(operator, 1)
    bounds = slice_of_axis(node, axis, len(shape))
    rows = _rows(operator.inputs, axis)
    if bounds is None or rows is None or bounds.step is not None:
        return
    start, stop = (slice(*given[1:3]) if len(given) > 2 else slice(given[1], None)).indices(len(rows))[:2]
    for expression, position in ((bounds.lower, start), (bounds.upper, stop)):
        if expression is not None:
            yield axis, expression, None, rows[:position]


def _axis(operator: Operator, argument: int) -> int:
    args, named, outs = operator.call
    axis = args[argument] if len(args) > argument else named.get("dim", 0)
    return int(axis) % len(outs[0])


def _rows(fields: Iterable[Field], axis: int) -> Labels | None:
    """The labels along an axis, a row for each position, of the first field there; None where there are none."""
    for field in fields:
        if axis in field.span:
            return rows_along(field.labels, axis)
    return None


def _is_rest(node: ast.expr) -> bool:
    """Whether a size is given as -1: what is left."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)

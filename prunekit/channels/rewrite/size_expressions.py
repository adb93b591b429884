"""Size expressions: sizes stated in a module's Python, as in `x.reshape(B, N, C)`, and the labels that they count.

Sizes are stated in views, in the parts of a split, in the bounds of a slice, and in the scale that attention makes of a
width. Expressions that reorder channels, as a channel shuffle does (ShuffleNet, 2017), are here too: if the compact
model states the order, the kept channels need not be rectangular. `StatedSizes` collects the sizes of a class that
change under a plan, over all its modules and all their calls.
"""

import ast
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType

import numpy as np
from torch import nn

from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.labels.constraints import Constraint, EqualParts, FixedPositions, Rectangle
from prunekit.channels.labels.label_flow import Field, rows_along
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.rewrite.source_rewriter import can_state, integers
from prunekit.channels.rules.rule import Trait
from prunekit.channels.rules.shape import axis_groups
from prunekit.channels.tracing.call_sites import (
    attribute_read,
    definition,
    expression_at,
    is_chunk,
    is_unscaled_attention,
    made_sizes,
    number,
    parts_argument,
    place_of,
    shape_arguments,
    slice_of_axis,
)
from prunekit.channels.tracing.channel_map import ChannelMap, Keep, SizeAttribute
from prunekit.channels.tracing.traced_run import TracedOperator
from prunekit.channels.tracing.tracer import Trace


@dataclass(frozen=True, eq=False)
class SizeExpression:
    """An expression that counts some labels; or one item of the list that it makes, at `position`."""

    place: CodePlace
    position: int | None
    labels: Labels  # (size, n), as in `SizeAttribute`; 0 stands for a position that always stays
    decides: tuple[Labels, ...]  # the expression has to be replaced if positions of one of these are removed
    reads: str | None = None  # the attribute that it reads, such as `part.width`
    alone: bool = False  # it stays where another size of the same call changes, as the height of a new map does
    labeled: bool = True  # False: the axis has no labels in this call, as one of tokens, and only its size counts


def size_expressions(operator: TracedOperator, varying: Container[int]) -> Iterator[SizeExpression]:
    """Yield the sizes in the expression that called an operator, if it is in a method of a module.

    Sizes of the axes `varying` of the operator's first result depend on the input, and are left alone, except for the
    width in a product such as `B * self.width`; other sizes may follow from them, as the width of a head does where
    heads and batch are one axis.
    """
    site = operator.site
    node = None if site is None else expression_at(site)
    if site is None or node is None:
        return
    name, made = operator.name.removeprefix("aten."), operator.name in Trait.MAKES
    of_name = {"mul": _of_scale, "slice": _of_slice, "split": _of_split, "split_with_sizes": _of_split}
    found = list((_of_made if made else of_name.get(name, _of_shape))(operator, node))
    whole = not any(position is not None and axis in varying for axis, _, position, _ in found)
    merged = [_rows(operator.outputs[0], axis) for axis in range(len(operator.call[2][0])) if axis in varying]
    beside = tuple(rows for rows in merged if rows is not None)
    if name not in of_name and not made:
        yield from _unlabeled(operator, node, found)
    for axis, expression, position, labels in found if whole else ():
        if axis in varying and position is None:
            yield from _factors(site.method, expression, labels, beside)
        place = place_of(site.method, expression)
        if axis not in varying and place is not None and labels.size:
            if name == "mul":
                yield SizeExpression(place, None, np.zeros_like(labels[:, :1]), (labels,))
            else:
                reads = attribute_read(site.method, expression)
                yield SizeExpression(place, position, labels, (labels, *beside), reads, alone=made)


def _factors(
    method: CodeType, expression: ast.expr, labels: Labels, beside: tuple[Labels, ...]
) -> Iterator[SizeExpression]:
    """Yield the width in a product of it and a number of samples, as in `B * self.width`."""
    if not (isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mult)):
        return
    width = len(np.unique(labels, axis=0))
    samples = len(labels) // width
    if samples < 2 or not np.array_equal(labels, np.tile(labels[:width], (samples, 1))):
        return
    for factor in (expression.left, expression.right):
        reads, place = attribute_read(method, factor), place_of(method, factor)
        if place is not None and (reads is not None or number(factor) == width):
            yield SizeExpression(place, None, labels[:width], (labels[:width], *beside), reads)


Sized = tuple[int, ast.expr, int | None, Labels]


def _of_shape(operator: TracedOperator, node: ast.expr) -> Iterator[Sized]:
    """Yield the sizes of axes that have labels, or are made from one that has, as heads and their width are."""
    old, new = operator.call[0][0], operator.call[2][0]
    linked = set()
    for left, right in axis_groups(old, new) if operator.name != "aten.expand" else ():
        spans = [axis for field in operator.inputs for axis in field.span if axis in left]
        linked |= set(right) if spans else set()
    found = None if operator.site is None else definition(operator.site.method)
    for axis, expression, position in shape_arguments(node, len(new), found and found[0]):
        rows = _rows(operator.outputs[0], axis)
        # An axis of size 1 can be anywhere in a view: unless its size is computed, it is no part of a labeled one.
        fixed = isinstance(expression, ast.Constant) or (new[axis] == 1 and not isinstance(expression, ast.BinOp))
        if rows is None and (position is not None or (axis in linked and not fixed)):
            rows = np.zeros((new[axis], 1), dtype=np.int64)
        is_rest = isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub)  # as -1 is
        if rows is not None and not is_rest:
            yield axis, expression, position, rows


def _unlabeled(operator: TracedOperator, node: ast.expr, found: Iterable[Sized]) -> Iterator[SizeExpression]:
    """Yield the sizes of axes without labels in the shape that an operator makes."""
    known, shape, site = {axis for axis, *_ in found}, operator.call[2][0], operator.site
    made = None if site is None else definition(site.method)
    for axis, expression, position in shape_arguments(node, len(shape), made and made[0]):
        if site is not None and axis not in known and (place := place_of(site.method, expression)) is not None:
            yield SizeExpression(place, position, np.zeros((shape[axis], 1), dtype=np.int64), (), labeled=False)


def _of_made(operator: TracedOperator, node: ast.expr) -> Iterator[Sized]:
    for axis, expression, position in made_sizes(node, len(operator.call[2][0])):
        rows = _rows(operator.outputs[0], axis)
        if rows is not None:
            yield axis, expression, position, rows


def _of_split(operator: TracedOperator, node: ast.expr, *, equal: bool = False) -> Iterator[Sized]:
    expression = node if is_chunk(node) else parts_argument(node)
    axis = operator.axis(2)
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


def part_sizes(operator: TracedOperator) -> list[SizeAttribute]:
    """Return the sizes of equal parts into which an expression cuts an axis, if one can be stated for each.

    Not of the first axis, which may grow with the batch.
    """
    site = operator.site
    node = None if site is None else expression_at(site)
    if site is None or node is None or not is_chunk(node):
        return []
    place = place_of(site.method, node)
    found = _of_split(operator, node, equal=True) if place is not None else ()
    return [SizeAttribute(operator.owner, str(place), position, labels) for axis, _, position, labels in found if axis]


def _of_scale(operator: TracedOperator, node: ast.expr) -> Iterator[Sized]:
    """Yield the width of a head, of which attention makes its scale unless one is given: it keeps the dense one."""
    axis = len(operator.call[2][0]) - 1
    rows = _rows(operator.inputs, axis)
    if rows is not None and is_unscaled_attention(node):
        yield axis, node, None, rows


def _of_slice(operator: TracedOperator, node: ast.expr) -> Iterator[Sized]:
    shape, *given = operator.call[0]
    axis = operator.axis(1)
    bounds = slice_of_axis(node, axis, len(shape))
    rows = _rows(operator.inputs, axis)
    if bounds is None or rows is None or bounds.step is not None:
        return
    start, stop = (slice(*given[1:3]) if len(given) > 2 else slice(given[1], None)).indices(len(rows))[:2]
    for expression, position in ((bounds.lower, start), (bounds.upper, stop)):
        if expression is not None:
            yield axis, expression, None, rows[:position]


def _rows(fields: Iterable[Field], axis: int) -> Labels | None:
    """Return the labels along an axis, a row for each position, of the first field that spans it; None without one."""
    for field in fields:
        if axis in field.span:
            return rows_along(field.labels, axis)
    return None


@dataclass(frozen=True, eq=False)
class AvoidableConstraints:
    """Constraints that a model does not need if sizes or an order are stated in place of an expression."""

    sizes: tuple[SizeAttribute, ...]
    constraints: tuple[Constraint, ...]
    fixed: bool = False


def avoidable(trace: Trace) -> list[AvoidableConstraints]:
    """Return the constraints of equal parts, shuffles and fixed positions whose expressions do the same in every call.

    Those of fixed positions are marked as `fixed`.
    """
    found: dict[tuple[str, str], list[AvoidableConstraints]] = {}
    for run in trace.runs:
        for index, operator in enumerate(run.operators):
            kinds = {type(constraint): constraint for constraint in reversed(operator.constraints)}
            one: AvoidableConstraints | None = None
            if isinstance(fixed := kinds.get(FixedPositions), FixedPositions):
                one = _fixed(fixed, trace)
            elif EqualParts in kinds:
                one = AvoidableConstraints(tuple(part_sizes(operator)), operator.constraints)
            elif Rectangle in kinds:
                one = next(_rearranged(list(_chain(run.operators, index))), None)
            if one is not None and one.sizes:
                found.setdefault((one.sizes[0].module, one.sizes[0].name), []).append(one)
    return [
        replace(every[0], constraints=tuple(constraint for one in every for constraint in one.constraints))
        for every in found.values()
        if all(_alike(one, every[0]) for one in every)
    ]


def _fixed(fixed: FixedPositions, trace: Trace) -> AvoidableConstraints | None:
    """Return the positions to state for a constraint, if the class's Python can be compiled with them."""
    model = trace.flow.model
    if model is None or any(fixed.expression in run.whole for run in trace.runs):
        return None
    owner = fixed.expression.owner
    module = model.get_submodule(owner)
    if not can_state(type(module), fixed.place):
        return None
    # A model that was pruned before takes some positions already.
    taken = vars(module).get(fixed.place.attribute) if fixed.place.whole else None
    order = fixed.order if taken is None else np.array(taken)[fixed.order]
    labels = trace.flow.union.find(fixed.record.labels)[:, None]
    size = SizeAttribute(owner, str(fixed.place), None, labels, order, fixed.place.whole)
    return AvoidableConstraints((size,), (fixed,), fixed=True)


def _alike(left: AvoidableConstraints, right: AvoidableConstraints) -> bool:
    pairs = list(zip(left.sizes, right.sizes, strict=False))
    same = all(np.array_equal(a.labels, b.labels) and np.array_equal(_order(a), _order(b)) for a, b in pairs)
    return same and len(left.sizes) == len(right.sizes)


def _order(size: SizeAttribute) -> Labels:
    return np.arange(len(size.labels)) if size.order is None else size.order


def _chain(operators: Sequence[TracedOperator], start: int) -> Iterator[TracedOperator]:
    """Yield operators each of which only moves what the one before it moved."""
    yield operators[start]
    for before, operator in pairwise(operators[start:]):
        (fields,) = before.outputs
        if operator.name not in Trait.REARRANGES or len(fields) != 1 or operator.inputs != fields:
            return
        yield operator


def _rearranged(chain: Sequence[TracedOperator]) -> Iterator[AvoidableConstraints]:
    """Yield the order that a chain makes, up to each operator after which the channels are on their axis again."""
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
        yield AvoidableConstraints((SizeAttribute(first.owner, str(where), None, labels[:, None], order),), left)


def _expression(first: TracedOperator, last: TracedOperator) -> tuple[CodeType, ast.expr] | None:
    """Return the call of a function in which both ran, or the chain of calls between them, with its method."""
    if first.caller is not None and first.caller == last.caller and first.owner == last.owner:
        node = expression_at(first.caller)
        return (first.caller.method, node) if isinstance(node, ast.Call) and node.args else None
    if first.site is None or last.site is None or first.site.method is not last.site.method:
        return None
    inner, outer = expression_at(first.site), expression_at(last.site)
    chained = inner is not None and outer is not None and inner in ast.walk(outer)
    return (first.site.method, outer) if chained and isinstance(outer, ast.Call) else None


class StatedSizes:
    """The sizes in a class's expressions."""

    def __init__(self, channel_map: ChannelMap, keep: Keep) -> None:
        self.equal: list[EqualParts] = []  # as many labels of each part stay, because one expression counts them
        self._map, self._final, self._keep = channel_map, channel_map.traced.final, keep
        self._left_alone = {(size.module, size.name) for size in channel_map.sizes}
        self._asked = [part.labels for part in channel_map.traced.extra if isinstance(part, EqualParts)]
        self._found: dict[tuple[str, str, int | None], SizeAttribute] = {}
        self._unlabeled: dict[tuple[str, str, int | None], set[int]] = {}  # sizes where the axis has no labels
        self._changing: set[str] = set()
        self._reads: dict[str, str | None] = {}

    def note(self, module: str, sizes: Sequence[SizeExpression]) -> None:
        """Add the sizes of one expression in one call of a module."""
        fewer = {str(size.place) for size in sizes if self._shrinks(size.labels)}
        beside = {str(size.place) for size in sizes if size.labeled and not (size.place.is_number or size.alone)}
        changes = bool(fewer) or any(self._shrinks(rows) for size in sizes for rows in size.decides)
        self._changing |= fewer | (beside if changes else set())
        for size in sizes:
            key = (module, str(size.place), size.position)
            if not size.labeled:
                self._unlabeled.setdefault(key, set()).add(len(size.labels))
                continue
            self._reads[key[1]] = size.reads
            earlier = self._found.setdefault(key, SizeAttribute(*key, size.labels)).labels
            if not self._same(earlier, size.labels):
                self._clash(key, earlier, size.labels)

    def _shrinks(self, labels: Labels) -> bool:
        return not bool(self._keep[self._final[labels]].any(axis=1).all())

    def _same(self, left: Labels, right: Labels) -> bool:
        one, two = (np.sort(self._by_row(labels), axis=0) for labels in (left, right))
        return np.array_equal(one, two)

    def _by_row(self, labels: Labels) -> Labels:
        """Return the one label that decides on each row, as on a position in all heads; else all labels."""
        final = self._final[labels]
        for choice in self._map.deciding(final):
            if choice.all() and (choice == choice[:, :1]).all():
                return choice[:, :1]
        return final

    def _clash(self, key: tuple[str, str, int | None], left: Labels, right: Labels) -> None:
        """Demand equal numbers of heads, or of positions in the first one; if that was tried, leave the size alone."""
        parts = np.stack([left[:, 0], right[:, 0]]) if len(left) == len(right) else None
        if parts is None or any(np.array_equal(parts, asked) for asked in self._asked):
            self._left_alone.add(key[:2])
        else:
            self.equal.append(EqualParts(parts))

    def changing(self) -> list[SizeAttribute]:
        """Return the sizes, of every module, in expressions that change in at least one of them."""
        found = [size for size in self._found.values() if (size.module, size.name) not in self._left_alone]
        return [size for size in found if size.name in self._changing and self._in_every_call(size)]

    def _in_every_call(self, size: SizeAttribute) -> bool:
        """Return whether one number is right in all calls: also where the axis has no labels, as one of tokens."""
        others = self._unlabeled.get((size.module, size.name, size.position), set())
        stays = bool((self._final[size.labels] == 0).any(axis=1).all())
        return not others or (stays and others == {len(size.labels)})

    def as_attributes(self, model: nn.Module) -> list[SizeAttribute]:
        """Return the changing sizes, as attributes where an expression only reads one, as in `self.num_heads`.

        An attribute that would need two values at once stays an expression.
        """
        read: dict[tuple[str, str], list[SizeAttribute]] = {}
        result = []
        for size in self.changing():
            attribute = _holder(size, self._reads[size.name], model)
            if attribute is None:
                result.append(size)
            else:
                read.setdefault(attribute, []).append(size)
        for (module, name), sizes in read.items():
            first = {size.position: size for size in reversed(sizes)}
            if all(self._same(size.labels, first[size.position].labels) for size in sizes):
                sizes = [replace(size, module=module, name=name) for size in first.values()]
            values = integers(vars(model.get_submodule(module)).get(name)) or []
            new = [size for size in sizes if (size.module, size.name) not in self._left_alone]
            result += [size for size in new if values[size.position or 0] >= 0]  # -1 stands for any size
        return result


def _holder(size: SizeAttribute, reads: str | None, model: nn.Module) -> tuple[str, str] | None:
    """Return the module and its attribute that an expression reads, if that is the size itself or -1."""
    if reads is None:
        return None
    part, _, name = reads.rpartition(".")
    path = ".".join(filter(None, (size.module, part)))
    try:
        values = integers(vars(model.get_submodule(path)).get(name))
    except AttributeError:  # not of a module
        return None
    return (path, name) if values and values[size.position or 0] in (len(size.labels), -1) else None

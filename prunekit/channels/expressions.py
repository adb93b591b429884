"""Sizes that stand in a module's Python, as in `x.reshape(B, N, C // self.num_heads)`: explicit ones in their place.

A method is compiled once more from its own source with the expression replaced by an attribute, in a subclass that the
compact module takes on. So a size has a name, which says where it stands and how it reads, and nothing but a number is
ever stored: the code is always that of the class itself.
"""

from __future__ import annotations

import __future__
import ast
import copy
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import nn

from prunekit.channels.labels import Field, Labels
from prunekit.channels.rules.shape import axis_groups
from prunekit.channels.sites import definition, expression_at, parts_argument, shape_arguments, slice_of_axis
from prunekit.channels.tracing import Operator


@dataclass(frozen=True)
class Place:
    """An expression in a method: its line, counted from the method's first, its column and its text."""

    function: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.function}+{self.line}.{self.column}: {self.text}"

    @property
    def attribute(self) -> str:
        """The attribute that holds the size."""
        return f"_size_{self.function}_{self.line}_{self.column}"

    @classmethod
    def named(cls, name: str) -> Place | None:
        """The place that a name stands for; None where it is the name of a plain attribute."""
        match = re.fullmatch(r"(\w+)\+(\d+)\.(\d+): (.+)", name, re.DOTALL)
        return match and cls(match[1], int(match[2]), int(match[3]), match[4])


@dataclass(frozen=True, eq=False)
class SizeExpression:
    """An expression that says how many of some labels there are; or, at a position, one part of a list that it makes.

    Labels of 0 stand for positions that stay whatever is pruned.
    """

    place: Place
    position: int | None
    labels: Labels  # (size, n), as in `SizeAttribute`


def size_expressions(cls: type[nn.Module], operator: Operator, varying: Container[int]) -> Iterator[SizeExpression]:
    """The sizes in the expression that called an operator, where it stands in a method of a class.

    Args:
        varying: axes of the operator's first result whose sizes depend on the input; these are left alone.
    """
    site = operator.site
    method = site and _method(cls, site.code)
    node = site and expression_at(site)
    if site is None or method is None or node is None:
        return
    name = operator.name.removeprefix("aten.")
    sizes = _of_slice if name == "slice" else _of_split if name.startswith("split") else _of_shape
    for axis, expression, position, labels in sizes(operator, node):
        place = _place(site.code, expression)
        if axis not in varying and place is not None and labels.size:
            yield SizeExpression(place, position, labels)


Sized = tuple[int, ast.expr, int | None, Labels]


def _of_shape(operator: Operator, node: ast.expr) -> Iterator[Sized]:
    """Sizes of axes that are labelled, or that came of one that is: heads are, and with them their width."""
    old, new = operator.call[0][0], operator.call[2][0]
    linked = set()
    for left, right in axis_groups(old, new) if operator.name != "aten.expand" else ():
        spans = [axis for field in operator.inputs for axis in field.span if axis in left]
        linked |= set(right) if spans else set()
    for axis, expression in shape_arguments(node, len(new)):
        rows = _rows(operator.outputs[0], axis)
        if rows is None and axis in linked and not isinstance(expression, ast.Constant):
            rows = np.zeros((new[axis], 1), dtype=np.int64)
        if rows is not None and not _is_rest(expression):
            yield axis, expression, None, rows


def _of_split(operator: Operator, node: ast.expr) -> Iterator[Sized]:
    expression = parts_argument(node)
    axis = _axis(operator, 2)
    rows = [_rows(fields, axis) for fields in operator.outputs]
    if expression is None or not rows or any(part is None for part in rows):
        return
    if operator.name == "aten.split":
        yield axis, expression, None, rows[0]  # type: ignore[misc]
    elif isinstance(expression, (ast.List, ast.Tuple)):
        yield from ((axis, element, None, part) for element, part in zip(expression.elts, rows, strict=False))  # type: ignore[misc]
    else:
        yield from ((axis, expression, position, part) for position, part in enumerate(rows))  # type: ignore[misc]


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
            return np.moveaxis(field.labels, axis, 0).reshape(field.labels.shape[axis], -1)
    return None


def _is_rest(node: ast.expr) -> bool:
    """Whether a size is given as -1: what is left."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _method(cls: type, code: CodeType) -> tuple[type, FunctionType] | None:
    """The method of a class, or of one that it inherits from, that has some code; and the class where it stands."""
    for base in cls.__mro__:
        method = vars(base).get(code.co_name)
        if isinstance(method, FunctionType):
            return (base, method) if method.__code__ is code and method.__code__.co_argcount else None
    return None


@lru_cache(maxsize=4096)
def _place(code: CodeType, expression: ast.expr) -> Place | None:
    found = definition(code)
    if found is None:
        return None
    text = ast.get_source_segment(found[1], expression) or ""
    return Place(code.co_name, expression.lineno - found[0].lineno, expression.col_offset, text)


def set_expressions(module: nn.Module, sizes: dict[str, Any]) -> None:
    """Gives a module a class with explicit sizes in place of expressions, and those sizes; in place.

    Args:
        sizes: by the names of places: whole numbers, or lists of them.

    Raises:
        KeyError: the module's class has no such expression, or not there.
        ValueError: a size is none.
    """
    places = {}
    for name, value in sizes.items():
        place = Place.named(name)
        if place is None:
            raise KeyError(name)
        if not all(type(size) is int and size >= 0 for size in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{name}: {value!r} is no size")
        places[place] = value
    original = type(module)
    known: frozenset[Place] = vars(original).get("_prunekit_places", frozenset())
    if not places.keys() <= known:
        base = original.__bases__[0] if known else original
        module.__class__ = _with_sizes(base, known.union(places))
        for name, value in vars(module).items():
            if isinstance(value, MethodType) and value.__self__ is module:  # as in `self.forward = self.forward_fast`
                vars(module)[name] = getattr(module, value.__name__)
    for place, value in places.items():
        vars(module)[place.attribute] = value


_SIZED: dict[tuple[type, frozenset[Place]], type] = {}


def _with_sizes(cls: type, places: frozenset[Place]) -> type:
    if (cls, places) not in _SIZED:
        methods: dict[str, Any] = {
            name: _compiled(cls, name, [place for place in places if place.function == name])
            for name in sorted({place.function for place in places})
        }
        told = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_prunekit_places": places}
        _SIZED[cls, places] = type(cls.__name__, (cls,), {**methods, **told})
    return _SIZED[cls, places]


def _compiled(cls: type, name: str, places: list[Place]) -> FunctionType:
    """A method from its own source, with attributes in the place of expressions."""
    base = next((base for base in cls.__mro__ if isinstance(vars(base).get(name), FunctionType)), None)
    if base is None:
        raise KeyError(name)
    method: FunctionType = vars(base)[name]
    code = method.__code__
    found = definition(code)
    if found is None:
        raise KeyError(name)
    exchange = _Exchange(found[0], found[1], places)
    node = exchange.visit(copy.deepcopy(found[0]))
    if exchange.left:
        raise KeyError(str(exchange.left[0]))
    node.decorator_list = []
    around = ast.parse(f"def _({', '.join(code.co_freevars)}):\n class {base.__name__}: pass")
    around.body[0].body[0].body = [node]  # type: ignore[attr-defined]
    flags = code.co_flags & __future__.annotations.compiler_flag
    whole = compile(ast.fix_missing_locations(around), code.co_filename, "exec", flags, dont_inherit=True)
    made = _code_named(whole, name)
    cells = dict(zip(code.co_freevars, method.__closure__ or (), strict=True))
    result = FunctionType(made, method.__globals__, name, method.__defaults__, tuple(cells[v] for v in made.co_freevars))
    result.__kwdefaults__, result.__qualname__ = method.__kwdefaults__, method.__qualname__
    return result


def _code_named(code: CodeType, name: str) -> CodeType:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            return constant if constant.co_name == name else _code_named(constant, name)
    raise KeyError(name)


class _Exchange(ast.NodeTransformer):
    """Puts an attribute of the first argument where each of some expressions stands."""

    def __init__(self, node: ast.FunctionDef, source: str, places: list[Place]) -> None:
        self.owner = [*node.args.posonlyargs, *node.args.args][0].arg
        self.first, self.source = node.lineno, source
        self.left = list(places)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr):
            for place in self.left:
                if (node.lineno - self.first, node.col_offset) == (place.line, place.column):
                    if ast.get_source_segment(self.source, node) == place.text:
                        self.left.remove(place)
                        size = ast.Attribute(ast.Name(self.owner, ast.Load()), place.attribute, ast.Load())
                        return ast.copy_location(size, node)
        return self.generic_visit(node)

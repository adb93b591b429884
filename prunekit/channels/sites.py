"""Which expression of a model's own Python called an operator that takes sizes."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeGuard

import torch
from torch import nn

SIZED = frozenset(
    f"aten.{name}"
    for name in ("view", "_unsafe_view", "reshape", "expand", "split", "split_with_sizes", "slice")
)  # fmt: skip
"""Operators whose arguments are sizes or positions along an axis."""


def takes_sizes(name: str, args: Sequence[Any]) -> bool:
    """Whether a size may be stated where an operator is called: attention multiplies by one of the width of a head."""
    return name in SIZED or (name == "aten.mul" and isinstance(args[1], float))


_TORCH = f"{Path(torch.__file__).parent}/"  # torchvision stands beside it
_MODULES = f"{_TORCH}nn/modules/"


@dataclass(frozen=True)
class Site:
    """A moment in a method: the code that ran, its own or that of a function within it, and the instruction."""

    method: CodeType
    code: CodeType
    instruction: int

    @property
    def span(self) -> tuple[int, int, int, int] | None:
        """First line and column of the expression that ran, and its last; None where Python keeps no columns."""
        line, last, column, end = next(islice(self.code.co_positions(), self.instruction // 2, None))
        return None if line is None or last is None or column is None or end is None else (line, column, last, end)


def site_here() -> tuple[Site, nn.Module] | None:
    """Where in a method of a module the frame above the caller's stands, and the module.

    None within one of torch's own modules, and where a function runs that is in no method.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.startswith(_MODULES):
            return None
        frame = frame.f_back
    if frame is None:
        return None
    code, instruction = frame.f_code, frame.f_lasti
    for _ in range(_NESTED):
        if frame is None:
            return None
        owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(owner, nn.Module):
            method = _method_around(type(owner), code)  # type: ignore[arg-type]
            if method is not None:
                return Site(method, code, instruction), owner
        frame = frame.f_back
    return None


_NESTED = 4
"""How many frames a method may be above the code that runs: comprehensions, lambdas and functions within it."""


@lru_cache(maxsize=4096)
def _method_around(cls: type, code: CodeType) -> CodeType | None:
    """The method of a class that some code is, or stands in."""
    names = {name for base in cls.__mro__ if base is not nn.Module for name in vars(base)}
    for method in (method_of(cls, name) for name in names):
        if method is not None and _within(code, method[1].__code__):
            return method[1].__code__
    return None


def _within(code: CodeType, outer: CodeType) -> bool:
    inner = (constant for constant in outer.co_consts if isinstance(constant, CodeType))
    return code is outer or any(_within(code, constant) for constant in inner)


def method_of(cls: type, name: str) -> tuple[type, FunctionType] | None:
    """The method that a class has under a name, and the class where it stands."""
    for base in cls.__mro__:
        method = vars(base).get(name)
        if method is not None:
            return (base, method) if isinstance(method, FunctionType) and method.__code__.co_argcount else None
    return None


@lru_cache(maxsize=1024)
def definition(code: CodeType) -> tuple[ast.FunctionDef, str] | None:
    """The syntax tree of a method and the text of its file; None where that cannot be read."""
    source = "".join(linecache.getlines(code.co_filename))
    try:
        functions = [node for node in ast.walk(_tree(source)) if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return None
    for node in functions:
        lines = (node.lineno, *(decorator.lineno for decorator in node.decorator_list))
        if node.name == code.co_name and code.co_firstlineno in lines:
            return node, source
    return None


@lru_cache(maxsize=16)
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


@lru_cache(maxsize=4096)
def expression_at(site: Site) -> ast.expr | None:
    """The call or subscript that ran; a call of a method may be said to begin where the method's name does."""
    found, span = definition(site.method), site.span
    if found is None or span is None:
        return None
    for node in ast.walk(found[0]):
        if isinstance(node, (ast.Call, ast.Subscript)) and (node.end_lineno, node.end_col_offset) == span[2:]:
            return node if (node.lineno, node.col_offset) <= span[:2] else None
    return None


def shape_arguments(node: ast.expr, axes: int) -> Iterator[tuple[int, ast.expr, int | None]]:
    """The expression for the new size of each axis in a view or an expansion, and its position in what that makes.

    Args:
        axes: how many there are then.
    """
    match _arguments(node, "unflatten"):
        case [axis, ast.Tuple(elts=sizes) | ast.List(elts=sizes)] if (first := _number(axis)) is not None:
            start = first if first >= 0 else axes + first + 1 - len(sizes)
            yield from ((start + index, size, None) for index, size in enumerate(sizes))
            return
    given = _arguments(node, "view", "reshape", "expand")
    if len(given) == 1 and _is_attribute(given[0]):
        given = [ast.Starred(given[0], ast.Load())]
    if len(given) == 1 and isinstance(given[0], (ast.Tuple, ast.List)):
        given = list(given[0].elts)
    stars = [index for index, argument in enumerate(given) if isinstance(argument, ast.Starred)]
    more = axes - len(given) + 1  # that the one with a star stands for
    if len(stars) > 1 or (not stars and more != 1) or more < 0:
        return
    for index, argument in enumerate(given):
        at = index + (more - 1 if stars and index > stars[0] else 0)
        if not isinstance(argument, ast.Starred):
            yield at, argument, None
        elif _is_attribute(argument.value):
            yield from ((at + position, argument.value, position) for position in range(more))


def _is_attribute(node: ast.expr) -> bool:
    """Whether something is read off a module, and so the same in every call."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def _number(node: ast.expr) -> int | None:
    """A whole number that is written out."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def parts_argument(node: ast.expr) -> ast.expr | None:
    """The expression for the sizes of the parts in a split."""
    return next(iter(_arguments(node, "split", "split_with_sizes")), None)


def is_chunk(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a call cuts an axis into so many parts, the last of which may be smaller."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "chunk"


def is_of_torch(node: ast.Call) -> bool:
    """Whether a call is one of `torch.split(x, ...)`, not of `x.split(...)`: the tensor is its first argument then."""
    of = node.func.value if isinstance(node.func, ast.Attribute) else None
    return isinstance(of, ast.Name) and of.id == "torch"


def _arguments(node: ast.expr, *functions: str) -> list[ast.expr]:
    """Those of `x.view(...)`, or of `torch.reshape(x, ...)` without the tensor, where some function is called."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in functions:
        return []
    named = [item.value for item in node.keywords if item.arg in _SIZES]
    return [*node.args[is_of_torch(node) :], *named]


_SIZES = ("shape", "size", "sizes", "split_size", "split_sizes", "split_size_or_sections")


def slice_of_axis(node: ast.expr, axis: int, axes: int) -> ast.Slice | None:
    """The slice of one axis in a subscript; `axes` is the number of axes at the time when it is taken."""
    if not isinstance(node, ast.Subscript):
        return None
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for index, item in enumerate(items):
        before, after = items[:index], items[index + 1 :]
        if not isinstance(item, ast.Slice):
            if not isinstance(item, ast.Constant):  # a tensor, or what only running it tells
                return None
        elif axis == (axes - 1 - sum(map(_takes, after)) if any(map(_is_dots, before)) else sum(map(_leaves, before))):
            return item
    return None


def _is_dots(item: ast.expr) -> bool:
    return isinstance(item, ast.Constant) and item.value is ...


def _takes(item: ast.expr) -> bool:
    """Whether an item of a subscript is about an axis that was there."""
    return isinstance(item, ast.Slice) or (isinstance(item, ast.Constant) and isinstance(item.value, int))


def _leaves(item: ast.expr) -> bool:
    """Whether an axis is there behind an item of a subscript."""
    return isinstance(item, ast.Slice) or (isinstance(item, ast.Constant) and item.value is None)


def is_unscaled_attention(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a call is torch's attention with its default scale."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    plain = not any(item.arg in ("scale", None) for item in node.keywords)
    return name == "scaled_dot_product_attention" and plain and len(node.args) < 7

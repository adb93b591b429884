"""Which expression of a model's own Python called an operator that takes sizes."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

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


def site_here(above: int) -> tuple[Site, nn.Module] | None:
    """Where in a method of a module the frame so far above the caller's stands, and the module; see `frame_here`."""
    found = frame_here(sys._getframe(1 + above))
    if found is None:
        return None
    frame, method, owner = found
    return Site(method, frame.f_code, frame.f_lasti), owner


def caller_here(above: int) -> tuple[Site, nn.Module] | None:
    """Where a method of a module called the function in the frame so far above the caller's, and the module."""
    function = _own_frame(sys._getframe(1 + above))
    frame = None if function is None else function.f_back
    owner = None if frame is None else _owner(frame)
    if frame is None or owner is None or _method_around(type(owner), frame.f_code) is not frame.f_code:  # type: ignore[arg-type]
        return None
    return Site(frame.f_code, frame.f_code, frame.f_lasti), owner


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of a model's own code; None within one of torch's own modules."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = None if frame.f_code.co_filename.startswith(_MODULES) else frame.f_back
    return frame


def _owner(frame: FrameType) -> nn.Module | None:
    """The module that a function has as its first argument."""
    first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
    return first if isinstance(first, nn.Module) else None


def frame_here(frame: FrameType | None) -> tuple[FrameType, CodeType, nn.Module] | None:
    """The frame of a model's own code that runs at or above one, the method of a module around it, and the module.

    None within one of torch's own modules, and where a function runs that is in no method.
    """
    frame = inner = _own_frame(frame)
    for _ in range(_NESTED):
        if frame is None or inner is None:
            return None
        owner = _owner(frame)
        if owner is not None:
            method = _method_around(type(owner), inner.f_code)  # type: ignore[arg-type]
            if method is not None:
                return inner, method, owner
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


@lru_cache(maxsize=4096)
def operands_at(site: Site) -> tuple[ast.expr, ...]:
    """What the expression, or the assignment in place, that ran computed with."""
    found, span = definition(site.method), site.span
    for node in ast.walk(found[0]) if found is not None and span is not None else ():
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and _span(node) == span:
            return (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    called = expression_at(site)
    return () if called is None else (called,)


def _span(node: ast.expr | ast.stmt) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset

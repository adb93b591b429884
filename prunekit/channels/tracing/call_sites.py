"""Call sites: where in a model's own Python an operator was called, and which sizes the expression there states.

First the sites, found by looking at Python's frames; then the syntax of the expressions at them: the sizes of a view,
the parts of a split, the bounds of a slice; last the expressions whose tensor a compact model takes at stated
positions. A table that forward computes, as in `x + self.table(x)`, is as wide as it ever was: the compact model takes
those of its channels that `x` still has. An index that the model stores, as in `x[:, self.order]`, has its old numbers:
the compact model puts the channels that are left in their order without it.
"""

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeGuard, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.tracing.execution import module_of

_TORCH = f"{Path(torch.__file__).parent}/"  # torchvision stands beside it
_MODULES = f"{_TORCH}nn/modules/"
Span = tuple[int, int, int, int]
"""The first line and column of an expression, and its last ones; columns count bytes of UTF-8."""
Key = TypeVar("Key")
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def weak_cache(function: Callable[[Key, *Arguments], Result]) -> Callable[[Key, *Arguments], Result]:
    """Cache a function of an object, such as a class, and of hashable arguments, as long as the object lives.

    `functools.lru_cache` would keep classes alive, with all that their methods refer to: those that are made again and
    again, by a trace or in a notebook, would pile up. Neither the other arguments nor the result may refer to the
    object.
    """
    kept: WeakKeyDictionary[Key, dict[Any, Result]] = WeakKeyDictionary()

    @functools.wraps(function)
    def cached(key: Key, *args: *Arguments) -> Result:
        results = kept.setdefault(key, {})
        if args not in results:
            results[args] = function(key, *args)
        return results[args]

    return cached


@dataclass(frozen=True)
class Site:
    """An instruction that ran in a method, in its own code or in that of a function within it."""

    method: CodeType
    code: CodeType
    instruction: int

    @property
    def span(self) -> Span | None:
        """The span of the expression; None if Python keeps no columns."""
        line, last, column, end = next(islice(self.code.co_positions(), self.instruction // 2, None))
        return None if line is None or last is None or column is None or end is None else (line, column, last, end)


def site_here(above: int) -> tuple[Site, nn.Module] | None:
    """Return the site in a method of a module, `above` frames above the caller, and the module; see `frame_here`."""
    found = frame_here(sys._getframe(1 + above))
    return None if found is None else (Site(found[1], found[0].f_code, found[0].f_lasti), found[2])


def caller_here(above: int) -> tuple[Site, nn.Module, CodeType | None] | None:
    """Return the site where a method called the function `above` frames above the caller, and the method's module.

    The last is the function's code where its first argument is that module, as that of a method is.
    """
    function = _own_frame(sys._getframe(1 + above))
    frame = None if function is None else function.f_back
    owner = None if frame is None else _runs_method_of(frame)
    if function is None or frame is None or owner is None:
        return None
    code = function.f_code if module_of(function) is owner else None
    return Site(frame.f_code, frame.f_code, frame.f_lasti), owner, code


def _own_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a model's own code; None within one of torch's own modules."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = None if frame.f_code.co_filename.startswith(_MODULES) else frame.f_back
    return frame


def frame_here(frame: FrameType | None) -> tuple[FrameType, CodeType, nn.Module] | None:
    """Return the nearest frame of a model's own code, the method of a module around it, and the module.

    None within one of torch's own modules, and within a function that is in no method.
    """
    frame = inner = _own_frame(frame)
    for _ in range(_NESTED):
        if frame is None or inner is None:
            return None
        owner = module_of(frame)
        if owner is not None:
            method = _method_around(type(owner), inner.f_code)
            if method is not None:
                return inner, method, owner
        frame = frame.f_back
    return None


def calling_frame(frame: FrameType | None) -> tuple[FrameType, CodeType, nn.Module] | None:
    """Return the nearest frame of a method, which called the plain functions that run, as `frame_here` does."""
    frame = _own_frame(frame)
    for _ in range(_NESTED):
        if frame is None:
            break
        owner = _runs_method_of(frame)
        if owner is not None:
            return frame, frame.f_code, owner
        frame = frame.f_back
    return None


def _runs_method_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose method a frame runs; None if it runs anything else."""
    owner = module_of(frame)
    return owner if owner is not None and _method_around(type(owner), frame.f_code) is frame.f_code else None


_NESTED = 4
"""How many frames a method may be above its running code, in comprehensions, lambdas and inner functions."""


@weak_cache
def _method_around(cls: type, code: CodeType) -> CodeType | None:
    """Return the method of a class that some code belongs to, if the class has it by the name in its own text."""
    names = {name for base in cls.__mro__ if base is not nn.Module for name in vars(base)}
    for name in names:
        method = method_of(cls, name)
        outer = None if method is None else method[1].__code__
        if outer is not None and outer.co_name == name and any(code is one for one in codes_in(outer)):
            return outer
    return None


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and that of all functions and classes within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def method_of(cls: type, name: str) -> tuple[type, FunctionType] | None:
    """Return the method of a class by its name, without decorators, and the base class that defines it."""
    for base in cls.__mro__:
        method = vars(base).get(name)
        if method is not None:
            method = inspect.unwrap(method, stop=_has_text) if isinstance(method, FunctionType) else None
            return (base, method) if isinstance(method, FunctionType) and method.__code__.co_argcount else None
    return None


SIZED_FILE = ", with explicit sizes "
"""Separator of the name of a file and that of the text of a method that was compiled again, in `linecache`."""


def _has_text(function: Any) -> bool:
    """Return whether a function was compiled again, and wraps one that stands for its text."""
    code = getattr(getattr(function, "__wrapped__", None), "__code__", None)
    return code is not None and SIZED_FILE in code.co_filename


_parse = lru_cache(maxsize=16)(ast.parse)


@lru_cache(maxsize=1024)
def definition(code: CodeType) -> tuple[ast.FunctionDef, str] | None:
    """Return the syntax tree of a method and the text of its file; None if that cannot be read."""
    source = "".join(linecache.getlines(code.co_filename))
    try:
        functions = [node for node in ast.walk(_parse(source)) if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return None
    for node in functions:
        lines = (node.lineno, *(decorator.lineno for decorator in node.decorator_list))
        if node.name == code.co_name and code.co_firstlineno in lines:
            return node, source
    return None


@lru_cache(maxsize=4096)
def expression_at(site: Site) -> ast.expr | None:
    """Return the call or subscript at a site; Python may say that it begins where the method's name does."""
    found, span = definition(site.method), site.span
    if found is None or span is None:
        return None
    for node in ast.walk(found[0]):
        if isinstance(node, (ast.Call, ast.Subscript)) and (node.end_lineno, node.end_col_offset) == span[2:]:
            return node if (node.lineno, node.col_offset) <= span[:2] else None
    return None


@lru_cache(maxsize=4096)
def operands_at(site: Site) -> tuple[ast.expr, ...]:
    """Return the operands of the expression, or of the in-place assignment, at a site."""
    found, span = definition(site.method), site.span
    for node in ast.walk(found[0]) if found is not None and span is not None else ():
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and span_of(node) == span:
            return (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    called = expression_at(site)
    return () if called is None else (called,)


def span_of(node: ast.expr | ast.stmt) -> Span:
    """Return the first line and column of a syntax node, and its last ones; 0 for those of a node without a source."""
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


AxisSize = tuple[int, ast.expr, int | None]
"""An axis, the expression of its size, and the position of that in a tuple that the expression returns, or None."""


def shape_arguments(node: ast.expr, axes: int, function: ast.FunctionDef | None) -> Iterator[AxisSize]:
    """Yield the sizes of the new `axes` that a view or an expansion states.

    A variable that `function` assigns once stands for the tuple that it holds.
    """
    match _arguments(node, "unflatten"):
        case [axis, ast.Tuple(elts=sizes) | ast.List(elts=sizes)] if (first := number(axis)) is not None:
            start = first if first >= 0 else axes + first + 1 - len(sizes)
            yield from ((start + index, size, None) for index, size in enumerate(sizes))
            return
    yield from _sizes_of_axes(_arguments(node, "view", "reshape", "expand"), axes, function)


def _sizes_of_axes(given: list[ast.expr], axes: int, function: ast.FunctionDef | None) -> Iterator[AxisSize]:
    if len(given) == 1 and function is not None:
        given = [_tuple_in(given[0], function)]
    match given:
        case [ast.BinOp(op=ast.Add(), right=ast.Tuple(elts=last) | ast.List(elts=last))]:  # x.shape[:-1] + (heads, -1)
            plain = len(last) <= axes and not any(isinstance(size, ast.Starred) for size in last)
            yield from ((axes - len(last) + index, size, None) for index, size in enumerate(last) if plain)
            return
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


def made_sizes(node: ast.expr, axes: int) -> Iterator[AxisSize]:
    """Yield the sizes of a new tensor that are stated, as in `torch.zeros(n, width)` or `x.new_zeros((n, width))`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MAKING:
        given = [*node.args, *(item.value for item in node.keywords if item.arg == "size")]
        yield from _sizes_of_axes(given[:1] if "full" in node.func.attr else given, axes, None)


def _tuple_in(node: ast.expr, function: ast.FunctionDef) -> ast.expr:
    """Return the tuple, or the sum of tuples, that a variable holds, also one with a star; other expressions as is."""
    name = node.value if isinstance(node, ast.Starred) else node
    value = value_of(name.id, function) if isinstance(name, ast.Name) else None
    return value if isinstance(value, (ast.Tuple, ast.List, ast.BinOp)) else node


def _is_attribute(node: ast.expr) -> bool:
    """Return whether an expression reads an attribute, and so is the same in every call."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def attributes_of_first(code: CodeType) -> set[str]:
    """Return the attributes that a function reads of its first argument, on whatever line."""
    found, first = definition(code), code.co_varnames[0]
    nodes = () if found is None else ast.walk(found[0])
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == first}


def number(node: ast.expr) -> int | None:
    """Return the value of a literal whole number; None for anything else."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None


def parts_argument(node: ast.expr) -> ast.expr | None:
    """Return the expression for the sizes of the parts in a split."""
    return next(iter(_arguments(node, "split", "split_with_sizes")), None)


def is_chunk(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether an expression is a call of `chunk`, which cuts an axis into a number of parts."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "chunk"


def is_of_torch(node: ast.Call) -> bool:
    """Return whether a call is like `torch.split(x, ...)`, with the tensor as its first argument."""
    of = node.func.value if isinstance(node.func, ast.Attribute) else None
    return isinstance(of, ast.Name) and of.id == "torch"


def _arguments(node: ast.expr, *functions: str) -> list[ast.expr]:
    """Return the arguments of a call of some functions, as `x.view(...)` or `torch.reshape(x, ...)`, without `x`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in functions:
        return []
    named = [item.value for item in node.keywords if item.arg in _SIZES]
    return [*node.args[is_of_torch(node) :], *named]


_SIZES = ("shape", "size", "sizes", "split_size", "split_sizes", "split_size_or_sections")


def slice_of_axis(node: ast.expr, axis: int, axes: int) -> ast.Slice | None:
    """Return the slice of one axis in a subscript of a tensor that has `axes` axes when that slice is taken."""
    if not isinstance(node, ast.Subscript):
        return None
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for index, item in enumerate(items):
        before, after = items[:index], items[index + 1 :]
        if not isinstance(item, ast.Slice):
            if not isinstance(item, ast.Constant):  # a tensor or an unknown value
                return None
        elif axis == (axes - 1 - sum(map(_takes, after)) if any(map(_is_dots, before)) else sum(map(_leaves, before))):
            return item
    return None


def _is_dots(item: ast.expr) -> bool:
    return isinstance(item, ast.Constant) and item.value is ...


def _takes(item: ast.expr) -> bool:
    """Return whether an item of a subscript applies to an axis of the tensor."""
    return isinstance(item, ast.Slice) or (isinstance(item, ast.Constant) and isinstance(item.value, int))


def _leaves(item: ast.expr) -> bool:
    """Return whether an item of a subscript leaves an axis in the result."""
    return isinstance(item, ast.Slice) or (isinstance(item, ast.Constant) and item.value is None)


def is_unscaled_attention(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a call is torch's attention with its default scale."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    plain = not any(item.arg in ("scale", None) for item in node.keywords)
    return name == "scaled_dot_product_attention" and plain and len(node.args) < 7


def nodes_of_sizes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the syntax nodes in a method that state sizes: of views, splits, slices, and new tensors."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPING:
            for argument in (*node.args, *(item.value for item in node.keywords)):
                yield from ast.walk(argument)
        elif isinstance(node, ast.Slice):
            yield from ast.walk(node)


_MAKING = {
    f"{prefix}{name}" for prefix in ("", "new_") for name in ("zeros", "ones", "empty", "full", "rand", "randn")
} | {"new", "Tensor", "FloatTensor"}  # which older code makes states with, as in `weight.new(1, batch, 24).zero_()`
_SHAPING = _MAKING | {
    "view", "reshape", "expand", "repeat", "unflatten", "split", "split_with_sizes", "tensor_split", "chunk", "narrow",
}  # fmt: skip


def value_of(name: str, function: ast.FunctionDef) -> ast.expr | None:
    """Return the expression that a method assigns to a name; None unless there is exactly one."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    stored = [node for node in names if isinstance(node.ctx, ast.Store)]
    for node in ast.walk(function) if len(stored) == 1 else ():
        if isinstance(node, ast.Assign) and node.targets == stored:
            return node.value
    return None


def rearranged_by(node: ast.Call) -> ast.expr:
    """Return the `x` in `shuffle(x, 2)` or in a chain such as `x.view(...).transpose(1, 2).flatten(1, 2)`."""
    of: ast.expr = node
    while isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr in _MOVES:
        of = of.args[0] if is_of_torch(of) else of.func.value
    return node.args[0] if of is node else of


_MOVES = (
    "view", "reshape", "transpose", "permute", "contiguous", "clone", "flatten", "unflatten", "swapaxes", "movedim"
)  # fmt: skip


@lru_cache(maxsize=4096)
def place_of(code: CodeType, expression: ast.expr) -> CodePlace | None:
    """Return the place of an expression in a method, given by its code; None if the source cannot be read."""
    found = definition(code)
    if found is None:
        return None
    text = ast.get_source_segment(found[1], expression) or ""
    return CodePlace(code.co_name, expression.lineno - found[0].lineno, expression.col_offset, text)


@lru_cache(maxsize=4096)
def attribute_read(code: CodeType, expression: ast.expr) -> str | None:
    """Return the attribute that an expression in a method reads, such as `part.width` for `self.part.width`, or None.

    A variable is followed to its value, if the method assigns it once.
    """
    found, node = definition(code), expression
    if found is None:
        return None
    while isinstance(node, ast.Name):
        value = value_of(node.id, found[0])
        if value is None:
            return None
        node = value
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    of_owner = isinstance(node, ast.Name) and node.id == code.co_varnames[0]
    return ".".join(names) if names and of_owner else None


_CALLED = frozenset({"add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"})
_FRAMES = 8
"""How many frames may lie between an operator of `ordered` and the mode that sees it."""


def ordered(x: torch.Tensor, axis: int, order: list[int]) -> torch.Tensor:
    """Return what `x[:, order]` does for axis 1, in a third of the time on a CPU."""
    return x.index_select(axis, torch.tensor(order, dtype=torch.long, device=x.device))


def is_ordering() -> bool:
    """Return whether an operator runs in `ordered`, so that models of other widths have no counterpart of it."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code is ordered.__code__:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is ordered.__code__


@dataclass(frozen=True)
class RunningExpression:
    """The expression of a model's Python in which an operator runs, and the path of the module whose method has it."""

    site: Site
    owner: str

    def operand(self, index: int, axis: int) -> CodePlace | None:
        """Return the place of the first or second operand, of which some positions of an axis are to be taken."""
        found: tuple[ast.expr | None, ...] = operands_at(self.site)
        if len(found) == 1:
            called = expression_at(self.site)
            found = (None, *found) if called is None else _operands_of(called)  # in `x += y` only y can be taken
        node = found[index] if index < len(found) else None
        place = None if node is None else place_of(self.site.method, node)
        return None if place is None else replace(place, axis=axis, whole=True)

    def picked(self, axis: int) -> CodePlace | None:
        """Return the place of the expression, if it does nothing but pick positions of an axis by an index."""
        node = expression_at(self.site)
        place = None if node is None or picked_from(node) is None else place_of(self.site.method, node)
        return None if place is None else replace(place, axis=axis)


def _operands_of(node: ast.expr) -> tuple[ast.expr | None, ...]:
    """Return the operands of `torch.add(x, y)` or `x.add(y)`, without one that the call writes to."""
    match node:
        case ast.Call(ast.Attribute(of, name), args) if name.removesuffix("_") in _CALLED:
            found = args if is_of_torch(node) else [of, *args]
            if not any(isinstance(one, ast.Starred) for one in found):
                return (None, *found[1:]) if name.endswith("_") else tuple(found)
    return ()


def picked_from(node: ast.expr) -> ast.expr | None:
    """Return the `x` in `x[:, index]`, `x.index_select(1, index)` or `torch.index_select(x, 1, index)`."""
    match node:
        case ast.Subscript(of, ast.Tuple(items)):
            return of if sum(ast.unparse(item) not in (":", "...") for item in items) == 1 else None
        case ast.Subscript(of):
            return of
        case ast.Call(ast.Attribute(of, "index_select"), args):
            return (args[0] if args else None) if is_of_torch(node) else of
    return None

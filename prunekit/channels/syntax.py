"""What an expression says that calls an operator: the sizes of a view, the parts of a split, the bounds of a slice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard


def shape_arguments(node: ast.expr, axes: int) -> Iterator[tuple[int, ast.expr, int | None]]:
    """The expression for the new size of each axis in a view or an expansion, and its position in what that makes.

    Args:
        axes: how many there are then.
    """
    match _arguments(node, "unflatten"):
        case [axis, ast.Tuple(elts=sizes) | ast.List(elts=sizes)] if (first := number(axis)) is not None:
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


def number(node: ast.expr) -> int | None:
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


def nodes_of_sizes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What stands in a method where sizes belong: in a view, a split, a slice, or the shape of a new tensor."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SHAPING:
            for argument in (*node.args, *(item.value for item in node.keywords)):
                yield from ast.walk(argument)
        elif isinstance(node, ast.Slice):
            yield from ast.walk(node)


_SHAPING = frozenset(
    f"{prefix}{name}" for prefix in ("", "new_") for name in ("zeros", "ones", "empty", "full", "rand", "randn")
) | {
    "view", "reshape", "expand", "repeat", "unflatten", "split", "split_with_sizes", "tensor_split", "chunk", "narrow",
}  # fmt: skip


def value_of(name: str, function: ast.FunctionDef) -> ast.expr | None:
    """What a method's only assignment to a name gives it."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    stored = [node for node in names if isinstance(node.ctx, ast.Store)]
    for node in ast.walk(function) if len(stored) == 1 else ():
        if isinstance(node, ast.Assign) and node.targets == stored:
            return node.value
    return None


def rearranged_by(node: ast.Call) -> ast.expr:
    """What `shuffle(x, 2)` or a chain of methods, as in `x.view(...).transpose(1, 2).flatten(1, 2)`, rearranges."""
    of: ast.expr = node
    while isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr in _MOVES:
        of = of.args[0] if is_of_torch(of) else of.func.value
    return node.args[0] if of is node else of


_MOVES = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "contiguous",
    "clone",
    "flatten",
    "unflatten",
    "swapaxes",
    "movedim",
)

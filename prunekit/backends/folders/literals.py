"""Values as Python source: numbers, text, tuples and the like, and modules by the attributes that lead to them."""

from __future__ import annotations

import ast
import keyword
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def literal(value: Any) -> str | None:
    """Return the source of a plain value; None of any other.

    Example:
        >>> from prunekit.backends.folders.literals import literal
        >>> literal((3, "a", [1.5, None])), literal(object())
        ("(3, 'a', [1.5, None])", None)
    """
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if type(value) is torch.Size:
        return f"torch.Size({list(value)})"
    if type(value) in (tuple, list, set, frozenset):
        return _collection(value)
    if type(value) is dict:
        pairs = [(literal(key), literal(item)) for key, item in value.items()]
        if any(part is None for pair in pairs for part in pair):
            return None
        return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
    return None


def _collection(value: Any) -> str | None:
    items = [literal(item) for item in value]
    if isinstance(value, (set, frozenset)):
        items = sorted(items, key=str)
    if any(item is None for item in items):
        return None
    inner = ", ".join(map(str, items))
    if type(value) is tuple:
        return f"({inner},)" if len(items) == 1 else f"({inner})"
    if type(value) is list:
        return f"[{inner}]"
    if type(value) is frozenset:
        return f"frozenset([{inner}])"
    return f"{{{inner}}}" if items else "set()"


def call_of(function: str, *positional: Any, **named: Any) -> str:
    """Return the source of a call with plain values."""
    parts = [literal(value) for value in positional]
    for key, value in named.items():
        text = literal(value)
        parts.append(None if text is None else f"{key}={text}")
    if None in parts:
        raise ValueError(f"{function}: its arguments are not numbers, text and the like")
    return f"{function}({', '.join(map(str, parts))})"


def module_at(model: nn.Module, path: str, name: str = "model") -> str:
    """Return an expression for the module at a path, such as `model.layer1[0].conv1`."""
    text, here = name, model
    for part in path.split(".") if path else ():
        inner = here._modules[part]
        assert inner is not None
        text += _step(here, part)
        here = inner
    return text


def _step(parent: nn.Module, part: str) -> str:
    if isinstance(parent, nn.ModuleDict):
        return f"[{part!r}]"
    if isinstance(parent, (nn.Sequential, nn.ModuleList)) and list(parent._modules)[_index(part) :][:1] == [part]:
        return f"[{part}]"
    return f".{part}" if is_name(part) else f".get_submodule({part!r})"


def _index(part: str) -> int:
    return int(part) if part.isdecimal() else 1 << 30


def is_name(text: str) -> bool:
    """Return whether a text can stand behind a dot."""
    return text.isidentifier() and not keyword.iskeyword(text)


def lines_of(mapping: Mapping[str, str], name: str) -> str:
    """Return the source of a constant that maps text to text, one pair a line."""
    pairs = "".join(f"    {key!r}: {item!r},\n" for key, item in mapping.items())
    return f"{name}: dict[str, str] = {{" + (f"\n{pairs}" if pairs else "") + "}\n"


def wrapped(code: str, indent: int = 0, before: int = 0, width: int = 110) -> str:
    """Return an expression over several lines where one is too long: each argument or entry on its own."""
    if indent + before + len(code) <= width:
        return code
    node = ast.parse(code, mode="eval").body
    match node:
        case ast.Call():
            named = [(f"{item.arg}=" if item.arg else "**", item.value) for item in node.keywords]
            opening, closing = f"{ast.unparse(node.func)}(", ")"
            parts = [*(("", item) for item in node.args), *named]
        case ast.Dict():
            opening, closing = "{", "}"
            pairs = zip(node.keys, node.values, strict=True)
            parts = [("**" if key is None else f"{ast.unparse(key)}: ", value) for key, value in pairs]
        case ast.List() | ast.Tuple() if len(node.elts) > 1:
            opening, closing = "[]" if isinstance(node, ast.List) else "()"
            parts = [("", item) for item in node.elts]
        case _:
            return code
    inner = indent + 4
    lines = [f"{' ' * inner}{head}{wrapped(ast.unparse(item), inner, len(head) + 1)}," for head, item in parts]
    return "\n".join([opening, *lines, f"{' ' * indent}{closing}"])

"""Python source of a file: values as literals, and functions and classes bundled with what they use of prunekit."""

from __future__ import annotations

import ast
import keyword
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.utils.user_code import name_of_module

BRACKETS: dict[type, str] = {
    tuple: "({})", list: "[{}]", set: "{{{}}}", frozenset: "frozenset([{}])", torch.Size: "torch.Size([{}])"
}  # fmt: skip
"""Source of collections, around that of their items."""


def literal(value: Any) -> str | None:
    """Return the source of a plain value, such as `(3, 'a', [1.5, None])`; None for any other object."""
    kind = type(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if value is None or kind in (bool, int, str, bytes):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if kind is dict:
        pairs = [(literal(key), literal(item)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{k}: {item}' for k, item in pairs)}}}"
    if kind not in BRACKETS:
        return None
    items = [literal(item) for item in value]
    if None in items:
        return None
    inner = ", ".join(sorted(map(str, items)) if kind in (set, frozenset) else map(str, items))
    if kind is set and not items:
        return "set()"
    return BRACKETS[kind].format(f"{inner}," if kind is tuple and len(items) == 1 else inner)


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
    listed = part.isdecimal() and isinstance(parent, (nn.Sequential, nn.ModuleList))
    if listed and list(parent._modules)[int(part) :][:1] == [part]:
        return f"[{part}]"
    return f".{part}" if is_name(part) else f".get_submodule({part!r})"


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


OWN = "prunekit"
_MARK = re.compile(r" *# (type: ignore|noqa|fmt:|pragma:)[^\n]*")


class Bundle:
    """Imports and definitions of a Python file that is being written, each once, in an order in which they run."""

    def __init__(self) -> None:
        self.imports: dict[str, str] = {}  # statements by the names that they bind
        self.definitions: dict[str, str] = {}  # source by the names that it defines
        self._taken: set[str] = set()

    def take_name(self, wanted: str) -> str:
        """Return a name that nothing else in the file has, and take it."""
        name = _numbered(wanted, lambda name: name in self._taken or name in self.imports or name in self.definitions)
        self._taken.add(name)
        return name

    def module(self, name: str) -> str:
        """Import a module by its whole name, and return that."""
        top = name.partition(".")[0]
        already = self.imports.get(top, "")
        statements = {*already.splitlines(), f"import {name}"}
        self.imports[top] = "\n".join(sorted(statements))
        return name

    def bind(self, name: str, statement: Callable[[str], str]) -> str:
        """Add an import, and return the name that it binds: another one if the name means something else already."""
        name = _numbered(name, lambda name: self._taken_otherwise(name, statement(name)))
        self.imports[name] = statement(name)
        return name

    def _taken_otherwise(self, name: str, statement: str) -> bool:
        if name in self._taken or name in self.definitions:
            return True
        there = self.imports.get(name)
        return there is not None and statement not in there.splitlines()

    def define(self, name: str, text: str) -> None:
        """Add a definition whose name was taken before."""
        self.definitions[name] = text.rstrip() + "\n"

    def include(self, module: str, name: str, edit: Callable[[ast.stmt, str], str] | None = None) -> str:
        """Include what a module of prunekit binds to a name, with all that it uses, and return the name."""
        statement = _statements(module)[name]
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return self._include_imported(statement, name, edit)
        if name not in self.definitions:
            text = (edit or text_of)(statement, _source(module))
            self.definitions[name] = ""  # one that refers to itself is there already
            for used in _names(ast.parse(text)):
                if used in _statements(module) and used != name:
                    self.include(module, used, edit)
            del self.definitions[name]
            self.definitions[name] = text
        return name

    def _include_imported(
        self, statement: ast.Import | ast.ImportFrom, name: str, edit: Callable[[ast.stmt, str], str] | None
    ) -> str:
        alias = next(one for one in statement.names if (one.asname or one.name.partition(".")[0]) == name)
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").partition(".")[0] == OWN:
            return self.include(statement.module or "", alias.name, edit)
        alone: ast.stmt = ast.Import([alias])
        if isinstance(statement, ast.ImportFrom):
            alone = ast.ImportFrom(statement.module, [alias], 0)
        there = self.imports.get(name, "").splitlines()
        self.imports[name] = "\n".join(sorted({*there, ast.unparse(alone)}))
        return name

    def class_in_library(self, cls: type) -> str:
        """Import the module of a class by its whole name, and return an expression for the class."""
        return f"{self.module(importable_module(cls))}.{cls.__qualname__}"

    def text(self) -> str:
        """Return the imports, and behind them the definitions."""
        lines = {line for statement in self.imports.values() for line in statement.splitlines()}
        plain = {line for line in lines if line.startswith("import ")}
        named: dict[str, set[str]] = {}
        for line in lines - plain:
            place, _, bound = line.partition(" import ")
            named.setdefault(place, set()).add(bound)
        joined = [f"{place} import {', '.join(sorted(bound))}" for place, bound in named.items()]
        statements = [*sorted(plain), *sorted(joined)]
        library = [line for line in statements if re.split(r"[ .]", line)[1] in sys.stdlib_module_names]
        others = [line for line in statements if line not in library]
        return "\n".join([*library, "", *others]) + "\n\n\n" + "\n\n".join(self.definitions.values())


def _numbered(wanted: str, is_taken: Callable[[str], bool]) -> str:
    """Return a name, with the first number from 2 on behind it that makes it free if it is taken."""
    names = chain([wanted], (f"{wanted}_{number}" for number in count(2)))
    return next(name for name in names if not is_taken(name))


def importable_module(thing: Any) -> str:
    """Return the name of the module that a class or function is imported from, where prunekit is not installed."""
    name = getattr(thing, "__module__", None) or ""
    where = f"{name}.{getattr(thing, '__qualname__', thing)}"
    found: Any = import_module(name) if name else None
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not thing or name == "__main__":
        raise LookupError(f"{where} cannot be imported by its name")
    return name_of_module(import_module(name))


def text_of(statement: ast.stmt, source: str) -> str:
    """Return the source of a statement, decorators included, without marks for linters and type checkers."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    lines = source.splitlines(keepends=True)[first - 1 : statement.end_lineno]
    return _MARK.sub("", "".join(lines)).rstrip() + "\n"


def without(statement: ast.stmt, source: str, members: Sequence[str]) -> str:
    """Return the source of a class without its decorators, some members, and what only type checkers read."""
    lines, last = source.splitlines(keepends=True), statement.end_lineno or 0
    gone: set[int] = set()
    for node in getattr(statement, "body", []):
        names = [node.name] if isinstance(node, ast.FunctionDef) else [ast.unparse(one) for one in _targets(node)]
        only_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if {*names} & {*members} or only_for_types:
            gone |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
            after = (node.end_lineno or 0) + 1
            if after <= len(lines) and not lines[after - 1].strip():
                gone.add(after)
    kept = [lines[number - 1] for number in range(statement.lineno, last + 1) if number not in gone]
    return _MARK.sub("", "".join(kept)).rstrip() + "\n"


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


@cache
def _source(module: str) -> str:
    return Path(import_module(module).__file__ or "").read_text(encoding="utf-8")


@cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """Return the statements at the top of a module by the names that they bind."""
    return {name: node for node in ast.parse(_source(module)).body for name in _bound(node)}


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    else:
        yield from (target.id for target in _targets(node) if isinstance(target, ast.Name))


def _names(tree: ast.AST) -> list[str]:
    """Return the names that code reads, in order."""
    found = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(found))

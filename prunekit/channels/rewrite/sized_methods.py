"""Source text of methods that were compiled again with explicit sizes, for files that people read."""

from __future__ import annotations

import ast
import builtins
import copy
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.rewrite.source_rewriter import ORDERED, ExpressionReplacer, original_of, places_of
from prunekit.channels.tracing.call_sites import definition, method_of

ORDERED = ORDERED
"""The name of `prunekit.channels.tracing.taken_positions.ordered` in the source of methods."""


@dataclass(frozen=True)
class SizedMethod:
    """A method that was compiled again with attributes in place of expressions.

    Attributes:
        base: the class that defines the method.
        function: as that class has it, without decorators.
        places: of the expressions, in the order of the source.
    """

    base: type
    function: FunctionType
    places: tuple[CodePlace, ...]

    def text(self, base: str, names: Mapping[str, str]) -> str:
        """Return the source of the method as it runs in a subclass: decorators, comments and all, from column 0."""
        node, source = self._definition()
        exchange = _TextReplacer(node, source, [*self.places], base, self.base.__name__, names)
        made = exchange.visit(copy.deepcopy(node))
        lines = source.splitlines(keepends=True)
        behind = len(lines) - (node.end_lineno or 0)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for span, new in sorted(exchange.texts, reverse=True):
            lines = _with_text(lines, span, new)
        text = textwrap.dedent("".join(lines[first - 1 : len(lines) - behind])).rstrip() + "\n"
        plain = ast.unparse(ast.fix_missing_locations(made)) + "\n"
        return text if _same(text, plain) else plain

    def globals(self) -> dict[str, Any]:
        """Return by name the globals of the method's module that it reads."""
        node, _ = self._definition()
        code = self.function.__code__
        found = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} - {
            *code.co_varnames,
            *code.co_cellvars,
        }
        known = self.function.__globals__
        return {name: known[name] for name in sorted(found) if name in known and not hasattr(builtins, name)}

    def enclosing(self) -> list[str]:
        """Return the variables of functions around the class that the method reads, which no other file has."""
        return sorted({*self.function.__code__.co_freevars} - {"__class__"})

    def _definition(self) -> tuple[ast.FunctionDef, str]:
        found = definition(self.function.__code__)
        assert found is not None  # it was compiled from there
        return found


def sized_methods(cls: type) -> list[SizedMethod]:
    """Return the methods of a class that were compiled again with explicit sizes; none of other classes."""
    original, methods = original_of(cls), []
    for name in sorted({place.function for place in places_of(cls)}):
        found = method_of(original, name)
        assert found is not None  # as above
        places = sorted((p for p in places_of(cls) if p.function == name), key=lambda p: (p.line, p.column))
        methods.append(SizedMethod(*found, tuple(places)))
    return methods


_Span = tuple[int, int, int, int]


class _TextReplacer(ExpressionReplacer):
    """Replaces expressions as when the method was compiled again, and keeps the text and the span of each."""

    def __init__(
        self,
        node: ast.FunctionDef,
        source: str,
        places: list[CodePlace],
        base: str,
        class_name: str,
        names: Mapping[str, str],
    ) -> None:
        super().__init__(node, source, places)
        self.base, self.class_name, self.names = base, class_name.lstrip("_"), names
        self.texts: list[tuple[_Span, str]] = []
        self._nested = False

    def visit(self, node: ast.AST) -> Any:
        """Return a node with its expressions replaced."""
        if not isinstance(node, ast.expr):
            return super().visit(node)
        change = self._change(node)
        if change is None:
            return super().visit(node)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        outermost, self._nested = not self._nested, True
        new = change(node)
        if outermost:
            self._nested = False
            self.texts.append((span, ast.unparse(new)))
        return new

    def _change(self, node: ast.expr) -> Callable[[Any], Any] | None:
        """Return what an expression becomes, by a function of it; None if it stays."""
        if self._place(node) is not None:
            return super().visit
        match node:
            case ast.Call(ast.Name("super"), [], []):
                owner = ast.Name(self.owner, ast.Load())
                return lambda _: ast.Call(ast.Name("super", ast.Load()), [self._class(), owner], [])
            case ast.Name("__class__"):
                return lambda _: self._class()
            case ast.Name(name) if name in self.names:
                return lambda _: ast.Name(self.names[name], node.ctx)
            case ast.Attribute(_, name) if name.startswith("__") and not name.endswith("__"):  # Python mangles it
                return self._unmangled
        return None

    def _class(self) -> ast.expr:
        return ast.parse(self.base, mode="eval").body

    def _unmangled(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return ast.Attribute(node.value, f"_{self.class_name}{node.attr}", node.ctx)


def _with_text(lines: list[str], span: _Span, new: str) -> list[str]:
    """Return lines with other text in a span, whose columns count bytes of UTF-8."""
    first, start, last, end = span
    before = lines[first - 1].encode()[:start].decode()
    after = lines[last - 1].encode()[end:].decode()
    return [*lines[: first - 1], before + new + after, *lines[last:]]


def _same(text: str, other: str) -> bool:
    try:
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))
    except SyntaxError:
        return False

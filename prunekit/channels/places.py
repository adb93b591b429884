"""Where an expression stands in a class's Python, and how it is called by name."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from prunekit.channels.sites import definition
from prunekit.channels.syntax import value_of


@dataclass(frozen=True)
class Place:
    """An expression in a method: its line, counted from the method's first, its column and its text.

    With an `axis` it is no size, but puts the positions of that axis in another order.
    """

    function: str
    line: int
    column: int
    text: str
    axis: int | None = None

    def __str__(self) -> str:
        order = "" if self.axis is None else f" order of axis {self.axis}"
        return f"{self.function}+{self.line}.{self.column}{order}: {self.text}"

    @property
    def attribute(self) -> str:
        """The attribute that holds the size, or the order."""
        return f"_{'size' if self.axis is None else 'order'}_{self.function}_{self.line}_{self.column}"

    @property
    def is_number(self) -> bool:
        """Whether it is written out, and so the same for all modules of the class."""
        return self.text.isdecimal()

    @classmethod
    def named(cls, name: str) -> Place | None:
        """The place that a name stands for; None where it is the name of a plain attribute."""
        match = re.fullmatch(r"(\w+)\+(\d+)\.(\d+)(?: order of axis (\d+))?: (.+)", name, re.DOTALL)
        axis = None if match is None or match[4] is None else int(match[4])
        return match and cls(match[1], int(match[2]), int(match[3]), match[5], axis)


@lru_cache(maxsize=4096)
def place_of(code: CodeType, expression: ast.expr) -> Place | None:
    """Where an expression stands in a method, given by its code; None where the source cannot be read."""
    found = definition(code)
    if found is None:
        return None
    text = ast.get_source_segment(found[1], expression) or ""
    return Place(code.co_name, expression.lineno - found[0].lineno, expression.col_offset, text)


@lru_cache(maxsize=4096)
def attribute_read(code: CodeType, expression: ast.expr) -> str | None:
    """The attribute that an expression in a method reads, as in `part.width` for `self.part.width`; None for others.

    A name is followed to where the method gives it its value, if it does so once.
    """
    found = definition(code)
    if found is None:
        return None
    node = expression
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

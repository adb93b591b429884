"""Places in a model's own Python: the calls of its modules, and the expressions that say sizes or orders."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol


class ModuleCall(NamedTuple):
    """The number of a call of a module in a forward pass, from 1, and the line of the model's Python that makes it."""

    number: int
    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).name}:{self.line}" + (f": {text}" if text else "")


@dataclass(frozen=True)
class CodePlace:
    """The place of an expression in a method."""

    function: str
    line: int  # counted from the method's first
    column: int
    text: str
    axis: int | None = None  # the expression is no size, but reorders the positions of this axis
    whole: bool = False  # the expression is a tensor with all positions of that axis, of which some are taken

    def __str__(self) -> str:
        order = "" if self.axis is None else f" {self._kind} of axis {self.axis}"
        return f"{self.function}+{self.line}.{self.column}{order}: {self.text}"

    @property
    def _kind(self) -> str:
        return "size" if self.axis is None else "part" if self.whole else "order"

    @property
    def attribute(self) -> str:
        """The name of the attribute that holds the size, or the order."""
        return f"_{self._kind}_{self.function}_{self.line}_{self.column}"

    @property
    def is_number(self) -> bool:
        """True if it is a literal number, the same for all modules of the class."""
        return self.text.isdecimal()

    @classmethod
    def named(cls, name: str) -> CodePlace | None:
        """Return the place with a name, as `str` gives it; None if it is the name of a plain attribute."""
        match = re.fullmatch(r"(\w+)\+(\d+)\.(\d+)(?: (order|part) of axis (\d+))?: (.+)", name, re.DOTALL)
        axis = None if match is None or match[5] is None else int(match[5])
        return match and cls(match[1], int(match[2]), int(match[3]), match[6], axis, match[4] == "part")


class Expression(Protocol):
    """An expression in which an operator runs, and in whose place a compact model may take stated positions."""

    @property
    def owner(self) -> str:
        """The path of the module whose method has it."""

    def operand(self, index: int, axis: int) -> CodePlace | None:
        """Return the place of the first or second operand, of which some positions of an axis are to be taken."""

    def picked(self, axis: int) -> CodePlace | None:
        """Return the place of the expression, if it does nothing but pick positions of an axis by an index."""

"""How results show themselves: a line at the prompt, a table when printed, HTML in notebooks, rows for code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

from prunekit.numbers import NOTHING

if TYPE_CHECKING:
    import pandas as pd

MOST = 40
"""Rows of a table that are shown."""
CELL = 100
"""Characters of a cell that are shown."""
LINE = 160
"""Characters of a result at the prompt."""
PAGE = 80
"""Characters of a line of prose."""

# Colors are inherited, so that it looks the same in light and dark notebooks.
STYLE = (
    ".prunekit table{border-collapse:collapse;margin:.5em 0;color:inherit;font-size:inherit}"
    ".prunekit caption{text-align:left;font-weight:bold;color:inherit;white-space:nowrap}"
    ".prunekit th,.prunekit td{text-align:right;vertical-align:top;padding:.1em .6em;font-variant-numeric:tabular-nums}"
    ".prunekit th{border-bottom:1px solid;white-space:nowrap}"
    ".prunekit .l1 :nth-child(1),.prunekit .l2 :nth-child(2),.prunekit .l3 :nth-child(3),.prunekit .l4 :nth-child(4),"
    ".prunekit .l5 :nth-child(5){text-align:left}"
)


@dataclass(frozen=True)
class Table:
    """A table of a result.

    Attributes:
        headings: of the columns, with units.
        rows: their cells.
        text: headings of columns that hold words, beside the first.
        title: what the rows are.
        most: how many rows are shown.
        all_in: where those that are left out can be found.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    text: Collection[str] = ()
    title: str = ""
    most: int = MOST
    all_in: str = ".rows()"

    @property
    def left_out(self) -> str:
        """Says how many rows are not shown; empty where all are."""
        more = len(self.rows) - self.most
        return f"... {more} more row{'s'[: more != 1]}; {self.all_in} has all" if more > 0 else ""


class Displayed(ABC):
    """A result that shows itself.

    A dataclass that is one has `repr=False`, or the decorator would write its own.
    """

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """What it holds as plain values, one dictionary for each row."""

    @abstractmethod
    def _headline(self) -> str:
        """What matters most, in a line."""

    @abstractmethod
    def _parts(self) -> Iterable[str | Table]:
        """Paragraphs and tables that tell all of it."""

    def frame(self) -> pd.DataFrame:
        """The rows as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {shorten(self._headline(), LINE, placeholder=' ...')}>"

    def __str__(self) -> str:
        parts = self._parts()
        return "\n\n".join(_broken(part) if isinstance(part, str) else _table_text(part) for part in parts)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return f'<div class="prunekit"><style>{STYLE}</style>{"".join(map(_as_html, self._parts()))}</div>'


def text_of(result: Displayed, *, most: int | None = None, all_in: str = "") -> str:
    """A result as a command prints it: no line is broken.

    Args:
        most: rows of a table that are shown; None: all.
        all_in: where the others are.
    """
    parts = (
        part if isinstance(part, str) else replace(part, most=most or len(part.rows), all_in=all_in)
        for part in result._parts()
    )
    return "\n\n".join(part if isinstance(part, str) else _table_text(part) for part in parts)


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], text: Collection[str] = ()) -> str:
    """Text columns: the first and those named in `text` to the left, numbers to the right."""
    if not rows:
        return "  (none)"
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = _left(headings, text)
    return "\n".join(_line(line, widths, left) for line in cells)


def changes(pairs: Iterable[tuple[int | None, int | None]]) -> list[str]:
    """A column of counts before and after, such as `64 -> 44`, aligned at the arrow; the count where it stays."""
    given = list(pairs)
    width = max((len(str(after)) for before, after in given if before != after), default=0)
    return [
        (f"{before} -> {after:>{width}}" if before != after else str(before)) if before is not None else NOTHING
        for before, after in given
    ]


def _left(headings: Sequence[str], text: Collection[str]) -> list[bool]:
    """Which columns are flush left."""
    return [index == 0 or heading in text for index, heading in enumerate(headings)]


def _line(cells: Sequence[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    columns = zip(cells, widths, left, strict=True)
    padded = (cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in columns)
    return f"  {'  '.join(padded)}".rstrip()


def _broken(paragraph: str) -> str:
    """With lines of a width that is read with ease; paths stay whole."""
    return "\n".join(_filled(line) for line in paragraph.split("\n"))


def _table_text(part: Table) -> str:
    lines = [part.title, table(part.headings, [_short(row) for row in part.rows[: part.most]], part.text)]
    lines.append(f"  {part.left_out}".rstrip())
    return "\n".join(line for line in lines if line)


def _filled(line: str) -> str:
    margin = " " * (len(line) - len(line.lstrip()) + 2)
    return fill(line, PAGE, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


def _short(row: Sequence[Any]) -> list[str]:
    """Cells that fit into a column: of longer ones the middle is left out."""
    texts = (str(cell) for cell in row)
    half = CELL // 2
    return [text if len(text) <= CELL else f"{text[: half - 2]}...{text[1 - half :]}" for text in texts]


def _as_html(part: str | Table) -> str:
    """HTML, in which end tags that may be left out are: a table of 40 rows is half as long."""
    if isinstance(part, str):
        return f"<p>{escape(part, quote=False).replace(chr(10), '<br>')}</p>"
    left = " ".join(f"l{index + 1}" for index, flush in enumerate(_left(part.headings, part.text)) if flush)
    caption = f"<caption>{escape(part.title, quote=False)}</caption>" if part.title else ""
    more = part.left_out
    body = "".join(_html_rows(part))
    return f'<table class="{left}">{caption}{body}</table>' + (f"<p>{escape(more, quote=False)}</p>" if more else "")


def _html_rows(part: Table) -> Iterator[str]:
    yield "<thead><tr>" + "".join(f"<th>{escape(heading, quote=False)}" for heading in part.headings) + "<tbody>"
    for row in part.rows[: part.most]:
        yield "<tr>" + "".join(f"<td>{escape(cell, quote=False)}" for cell in _short(row))

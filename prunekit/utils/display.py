"""Display of results: a line at the prompt, a table when printed, HTML in notebooks, rows for code.

`Displayed` is the base class of all results. Functions such as `digits`, `count` and `share` format numbers for
people: with a unit and three digits, or a dash if there is no number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import pandas as pd

NOTHING = "–"
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number; a bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def digits(value: Any) -> str:
    """Return plain decimal notation with three significant digits, e.g. 0.0123, 4.57, 1240."""
    if not is_number(value):
        return NOTHING
    if value == 0:
        return "0"
    # Rounding comes first, so that 9.996 is 10.0 and not 10.00.
    rounded = float(f"{value:.2e}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def count(value: Any) -> str:
    """Return a count with a decimal prefix, e.g. 21.3 M; whole below 1,000."""
    if not is_number(value):
        return NOTHING
    for size, prefix in PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{digits(value / size)} {prefix}"
    return digits(value) if isinstance(value, float) and not value.is_integer() else str(int(value))


def plural(number: int, word: str, ending: str = "s") -> str:
    """Return a count and a word in the right number, e.g. 2 layers."""
    return f"{number:,} {word}{ending if number != 1 else ''}"


def training_name(run: str) -> str:
    """Return the name that people read for a training run: `dense` for what recipes and files call `baseline`."""
    return "dense" if run == "baseline" else run


def listed(names: Iterable[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def numbered(numbers: Sequence[int], most: int) -> str:
    """Return how many numbers there are, and the first ones, e.g. "9: 0, 1, 2, ..."; empty if there are none."""
    return f"{len(numbers)}: {', '.join(map(str, numbers[:most]))}{', ...' * (len(numbers) > most)}" if numbers else ""


def size(value: Any) -> str:
    """Return bytes in decimal units, e.g. 85.3 MB."""
    text = count(value)
    return text if text == NOTHING else f"{text}B" if text[-1].isalpha() else f"{text} B"


def percent(value: Any, places: int = 1) -> str:
    """Return a number of percent, e.g. 98.6 %."""
    return in_unit(value, "%", places)


def in_unit(value: Any, unit: str, places: int = 2) -> str:
    """Return a number with its unit, e.g. 98.60 % or 31.25 dB; one of seven digits and more as 1.2e+07."""
    if not is_number(value):
        return NOTHING
    return (f"{value:.{places}f}" if abs(value) < 1e6 else f"{value:.1e}") + f" {unit}".rstrip()


def share(value: Any, places: int = 1) -> str:
    """Return a share between 0 and 1 as percent."""
    return percent(100 * value, places) if is_number(value) else NOTHING


RESOURCES = {"macs": "MACs", "params": "parameters", "size_mb": "size", "memory_mb": "memory", "latency_ms": "latency"}
"""Words that people read for the names of budgets; other names are words already, or a user's own."""


def resource(name: str) -> str:
    """Return what people read for a budget or another resource, e.g. MACs."""
    return RESOURCES.get(name, name)


def shares_left(shares: Mapping[str, float]) -> str:
    """Return the shares of resources that are left, e.g. "MACs 50.0 %, parameters 50.6 % left"."""
    return f"{', '.join(f'{resource(name)} {share(value)}' for name, value in shares.items()) or 'all'} left"


def difference(before: Any, after: Any, places: int = 2) -> str:
    """Return the difference with its sign, e.g. −0.37."""
    return signed(after - before, places) if is_number(before) and is_number(after) else NOTHING


def change(before: Any, after: Any) -> str:
    """Return the relative change, e.g. −55.2 %."""
    if not (is_number(before) and is_number(after)) or before == 0:
        return NOTHING
    return f"{signed(100 * (after / before - 1), 1)} %"


def signed(value: Any, places: int = 2) -> str:
    """Return a number with its sign, and a true minus."""
    if not is_number(value):
        return NOTHING
    text = f"{value:+.{places}f}".replace("-", "−")
    return text[1:] if not text.strip("+−0.") else text


def factor(value: Any) -> str:
    """Return a ratio, e.g. 2.31×."""
    return f"{value:.2f}×" if is_number(value) else NOTHING


def interval(low: Any, high: Any, places: int = 2) -> str:
    """Return an interval, e.g. [97.2, 99.1]; empty if there is none."""
    return f"[{low:.{places}f}, {high:.{places}f}]" if is_number(low) and is_number(high) else ""


def scientific(value: Any) -> str:
    """Return a very small number, e.g. 3.1e-15."""
    return f"{value:.1e}" if is_number(value) and value != 0 else digits(value)


def moment(text: Any) -> str:
    """Return a time in ISO 8601 in a more readable form, e.g. 2026-11-20 11:02:54 UTC."""
    return str(text).replace("T", " ").replace("+00:00", " UTC")


def duration(seconds: Any) -> str:
    """Return seconds as text; from two minutes on, minutes and seconds."""
    if not is_number(seconds):
        return NOTHING
    if seconds < 120:
        return f"{digits(seconds)} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


MOST = 40
"""The most rows of a table that are shown."""
CELL = 100
"""The most characters of a cell that are shown."""
LINE = 160
"""The most characters of a result at the prompt."""
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
    """A table of a result."""

    headings: Sequence[str]  # of the columns, with units
    rows: Sequence[Sequence[Any]]  # cells of each row
    text: Collection[str] = ()  # headings of columns with text, besides the first
    title: str = ""  # of the table
    most: int = MOST  # the most rows that are shown
    all_in: str = ".rows()"  # where the other rows can be found
    widest: int = CELL  # the most characters of a cell; the middle of longer ones is left out

    @property
    def left_out(self) -> str:
        """A note on how many rows are not shown; empty if all are."""
        more = len(self.rows) - self.most
        return f"... {more} more row{'s'[: more != 1]}; {self.all_in} has all" if more > 0 else ""


class Displayed(ABC):
    """Base class of results that can be displayed.

    A dataclass among them needs `repr=False`, or the decorator would replace `__repr__`.
    """

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the content as plain values, one dictionary for each row."""

    @abstractmethod
    def _headline(self) -> str:
        """Return the most important figures in one line."""

    @abstractmethod
    def _parts(self) -> Iterable[str | Table]:
        """Return paragraphs and tables with the whole content."""

    def frame(self) -> pd.DataFrame:
        """Return the rows as a pandas data frame."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {shorten(self._headline(), LINE, placeholder=' ...')}>"

    def __str__(self) -> str:
        parts = self._parts()
        return "\n\n".join(_wrapped(part) if isinstance(part, str) else _table_text(part) for part in parts)

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        return f'<div class="prunekit"><style>{STYLE}</style>{"".join(map(_as_html, self._parts()))}</div>'


def text_of(result: Displayed, *, most: int | None = None, all_in: str = "") -> str:
    """Return a result as commands print it: lines are not broken."""
    return "\n\n".join(
        part if isinstance(part, str) else _table_text(replace(part, most=most or len(part.rows), all_in=all_in))
        for part in result._parts()
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], text: Collection[str] = ()) -> str:
    """Return a table as text: the first column and those named in `text` flush left, the others flush right."""
    if not rows:
        return "  (none)"
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = _left(headings, text)
    lines = []
    for line in cells:
        columns = zip(line, widths, left, strict=True)
        padded = (cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in columns)
        lines.append(f"  {'  '.join(padded)}".rstrip())
    return "\n".join(lines)


def changes(pairs: Iterable[tuple[int | None, int | None]]) -> list[str]:
    """Return cells such as `64 -> 44`, aligned at the arrow; a single count if it does not change."""
    given = list(pairs)
    width = max((len(str(after)) for before, after in given if before != after), default=0)
    return [
        (f"{before} -> {after:>{width}}" if before != after else str(before)) if before is not None else NOTHING
        for before, after in given
    ]


def _left(headings: Sequence[str], text: Collection[str]) -> list[bool]:
    """Return which columns are flush left."""
    return [index == 0 or heading in text for index, heading in enumerate(headings)]


def _table_text(part: Table) -> str:
    lines = [part.title, table(part.headings, [_short(row, part.widest) for row in part.rows[: part.most]], part.text)]
    lines.append(f"  {part.left_out}".rstrip())
    return "\n".join(line for line in lines if line)


def _wrapped(paragraph: str) -> str:
    """Return a paragraph with lines of at most `PAGE` characters; paths are not broken."""
    lines = []
    for line in paragraph.split("\n"):
        margin = " " * (len(line) - len(line.lstrip()) + 2)
        lines.append(fill(line, PAGE, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines)


def _short(row: Sequence[Any], widest: int) -> list[str]:
    """Return cells that fit into a column: the middle of longer ones is left out."""
    texts = (str(cell) for cell in row)
    half = widest // 2
    return [text if len(text) <= widest else f"{text[: half - 2]}...{text[1 - half :]}" for text in texts]


def _as_html(part: str | Table) -> str:
    """Return HTML without optional end tags, which makes a table of 40 rows half as long."""
    if isinstance(part, str):
        return f"<p>{escape(part, quote=False).replace(chr(10), '<br>')}</p>"
    left = " ".join(f"l{index + 1}" for index, flush in enumerate(_left(part.headings, part.text)) if flush)
    caption = f"<caption>{escape(part.title, quote=False)}</caption>" if part.title else ""
    body = "<thead><tr>" + "".join(f"<th>{escape(heading, quote=False)}" for heading in part.headings) + "<tbody>"
    for row in part.rows[: part.most]:
        body += "<tr>" + "".join(f"<td>{escape(cell, quote=False)}" for cell in _short(row, part.widest))
    more = f"<p>{escape(part.left_out, quote=False)}</p>" if part.left_out else ""
    return f'<table class="{left}">{caption}{body}</table>{more}'

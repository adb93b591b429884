"""Tables as columns of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], text: Sequence[str] = ()) -> str:
    """Text columns: the first and those named in `text` to the left, numbers to the right."""
    if not rows:
        return "  (none)"
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [heading in text or index == 0 for index, heading in enumerate(headings)]
    return "\n".join(_line(line, widths, left) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    columns = zip(cells, widths, left, strict=True)
    padded = (cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in columns)
    return f"  {'  '.join(padded)}".rstrip()

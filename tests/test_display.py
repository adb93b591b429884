"""What a result looks like at the prompt, printed, in a notebook and as data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from prunekit.utils.display import CELL, LINE, MOST, Displayed, Table, text_of


@dataclass(frozen=True, repr=False)
class Lengths(Displayed):
    """Words, and how long they are."""

    words: tuple[str, ...]
    most: int = MOST

    def rows(self) -> list[dict[str, Any]]:
        return [{"word": word, "length": len(word), "kind": "noun"} for word in self.words]

    def _headline(self) -> str:
        return f"{len(self.words)} words:\n{' '.join(self.words)}"

    def _parts(self) -> Iterator[str | Table]:
        yield f"{len(self.words)} words & their lengths"
        cells = [tuple(row.values()) for row in self.rows()]
        yield Table(("word", "length", "kind"), cells, text=("kind",), title="Words", most=self.most)


def test_a_result_is_a_line_at_the_prompt_and_a_table_when_printed() -> None:
    found = Lengths(("a", "plane"))
    assert repr(found) == "<Lengths: 2 words: a plane>"
    assert str(found) == (
        "2 words & their lengths\n\nWords\n  word   length  kind\n  a           1  noun\n  plane       5  noun"
    )
    assert len(repr(Lengths(("word",) * 1000))) <= len("<Lengths: >") + LINE


def test_rows_beyond_the_limit_are_counted_and_to_be_had() -> None:
    found = Lengths(("a", "b", "c"), most=2)
    assert str(found).endswith("  b          1  noun\n  ... 1 more row; .rows() has all")
    assert "<p>... 1 more row; .rows() has all</p>" in found._repr_html_()
    assert text_of(found).endswith("  c          1  noun")
    assert text_of(found, most=1, all_in="words.csv").endswith("noun\n  ... 2 more rows; words.csv has all")
    assert len(found.rows()) == 3
    assert str(Lengths(("a",) * 42)).endswith("... 2 more rows; .rows() has all")
    assert "more row" not in str(Lengths(("a",) * MOST))


def test_cells_that_are_too_long_lose_their_middle() -> None:
    word = "begin" + "x" * 200 + "end"
    line = str(Lengths((word,))).splitlines()[-1]
    assert line.split()[0].startswith("begin")
    assert line.split()[0].endswith("end")
    assert "..." in line
    assert len(line.split()[0]) == CELL
    assert Lengths((word,)).rows()[0]["word"] == word


class Cells(HTMLParser):
    """The text of each cell, as a browser finds them without end tags."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in {"td", "th"}:
            self.found.append("")

    def handle_data(self, data: str) -> None:
        if self.found:
            self.found[-1] += data


def test_html_is_escaped_and_says_the_same() -> None:
    page = Lengths(("<script>x</script>",))._repr_html_()
    assert "<script>" not in page
    assert "words &amp; their lengths" in page
    parser = Cells()
    parser.feed(page)
    assert parser.found == ["word", "length", "kind", "<script>x</script>", "18", "noun"]


def test_pandas_is_imported_when_a_frame_is_asked_for() -> None:
    frame = Lengths(("a", "plane")).frame()
    assert list(frame.columns) == ["word", "length", "kind"]
    assert list(frame.length) == [1, 5]
    code = "import sys, prunekit.utils.display; assert not {'pandas', 'torch', 'numpy'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The contents list of a page: its sections, found in the HTML by their headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser

from markupsafe import Markup

FEWEST = 5
"""Sections from which on a page has a list of contents."""
SECTION = re.compile(r"<section(?P<attributes>[^>]*)>(?P<space>\s*)<h2[^>]*>(?P<title>.*?)</h2>", re.DOTALL)
ANCHOR = re.compile(r'\bid="([^"]*)"')


@dataclass(frozen=True)
class Entry:
    """A line of the contents list: the id of a section, and its heading as text."""

    anchor: str
    title: str


@dataclass(frozen=True)
class Outline:
    """The HTML of a page whose sections all have ids, and the lines of its contents list; none for a short page."""

    content: Markup
    entries: tuple[Entry, ...]


class _Text(HTMLParser):
    """The text of a piece of HTML, whatever its attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        """Take text between tags."""
        self.parts.append(data)


def _text_of(html: str) -> str:
    parser = _Text()
    parser.feed(html)
    parser.close()
    return " ".join("".join(parser.parts).split())


def outlined(content: Markup) -> Outline:
    """Return a page with an id for each section that begins with a heading, and its contents list."""
    entries: list[Entry] = []

    def with_anchor(found: re.Match[str]) -> str:
        named = ANCHOR.search(found["attributes"])
        anchor = str(Markup(named[1]).unescape()) if named else f"section-{len(entries) + 1}"
        entries.append(Entry(anchor, _text_of(found["title"])))
        start = len("<section")
        return found[0] if named else f'{found[0][:start]} id="{anchor}"{found[0][start:]}'

    marked = Markup(SECTION.sub(with_anchor, str(content)))
    return Outline(marked, tuple(entries) if len(entries) >= FEWEST else ())

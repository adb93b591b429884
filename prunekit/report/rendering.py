"""The rendering of templates to pages: filters, scripts, contents lists, links between pages, and notes.

Notes say in a sentence how a figure was measured: shown on hover, on focus and on a tap.
"""

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from prunekit.measure.latency import row_text
from prunekit.reading.yaml_files import read_yaml
from prunekit.utils import display as numbers
from prunekit.utils.availability import REPORT, missing_packages
from prunekit.utils.files import write_text

SCRIPTS = ("contents.js", "copy.js", "sort.js", "scroll.js")
FILTERS = (
    "count", "difference", "digits", "duration", "factor", "in_unit", "interval", "moment", "percent", "scientific",
    "share", "size",
)  # fmt: skip
MISSING = Markup('<p class="soft">This run has no {}.</p>')
"""Text of a section for a file that a run did not write."""
UNDRAWN = Markup(
    '<p class="soft">Matplotlib, which draws the figures, is not installed: '
    f"<code>{REPORT}</code>, then write this page again.</p>"
)
"""Text of a page without figures."""
FEWEST = 5
"""Sections from which on a page has a list of contents."""
SECTION = re.compile(r"<section(?P<attributes>[^>]*)>(?P<space>\s*)<h2[^>]*>(?P<title>.*?)</h2>", re.DOTALL)
ANCHOR = re.compile(r'\bid="([^"]*)"')


def write(page: Path, template: str, **values: Any) -> Path:
    """Write a page atomically, and return its path."""
    write_text(page, rendered(template, **values))
    return page


def rendered(template: str, **values: Any) -> Markup:
    """Return a template with its values filled in, which are escaped."""
    return Markup(environment().get_template(template).render(**values))


@cache
def environment() -> Environment:
    """Return the environment of the templates, with the filters that format numbers."""
    found = Environment(
        loader=PackageLoader("prunekit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update({name: getattr(numbers, name) for name in FILTERS})
    found.filters.update({"doubtful": row_text.unstable_mark, "computed": row_text.dtype_text, "how": how})
    found.filters["outlined"] = outlined
    found.globals["missing"] = lambda what: MISSING.format(what)
    found.globals["undrawn"] = undrawn
    # The policy of a page allows only this script, by its hash.
    script = "".join(
        files("prunekit.report").joinpath("templates", name).read_text(encoding="utf-8") for name in SCRIPTS
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    found.globals.update({"script": Markup(script), "script_source": f"sha256-{digest}"})
    return found


def undrawn(what: str = "") -> Markup:
    """Return why a figure of something is not there; of nothing in particular, whether figures are drawn at all."""
    if missing_packages(["matplotlib"]):
        return Markup() if what else UNDRAWN
    return MISSING.format(what) if what else Markup()


def linked(target: Path, page: Path) -> str:
    """Return the address of a file relative to the page's folder, so that both can be moved together."""
    try:
        return quote(os.path.relpath(target.resolve(), page.resolve().parent).replace(os.sep, "/"))
    except ValueError:  # on another drive
        return target.resolve().as_uri()


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


@cache
def notes() -> dict[str, str]:
    """Return notes by the labels of tiles, rows and headings."""
    found = read_yaml(Path(str(files("prunekit.report").joinpath("templates", "notes.yaml"))))
    parts = {name: text.format_map(found["parts"]) for name, text in found["parts"].items()}
    return {label: text.format_map(parts) for label, text in found["notes"].items()}


def how(label: str, method: str | None = None) -> Markup:
    """Return a label with the note of its own or another label; as plain text if there is none."""
    known = notes()
    found = known["Top-1"] if label.startswith("Top-1 on the test ") else known.get(method or label)
    text = escape(label)
    return text if found is None else Markup('<abbr tabindex="0" title="{}">{}</abbr>').format(found, text)

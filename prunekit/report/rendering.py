"""The rendering of templates to pages: filters, scripts, and links between pages."""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prunekit.measure.latency import row_text
from prunekit.report.measurement_notes import how
from prunekit.report.outline import outlined
from prunekit.utils import display as numbers
from prunekit.utils.files import write_text

SCRIPTS = ("contents.js", "copy.js", "sort.js", "scroll.js")
FILTERS = (
    "count",
    "difference",
    "digits",
    "duration",
    "factor",
    "in_unit",
    "interval",
    "moment",
    "percent",
    "scientific",
    "share",
    "size",
)
MISSING = Markup('<p class="soft">This run has no {}.</p>')
"""Text of a section for a file that a run did not write."""


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
    # The policy of a page allows only this script, by its hash.
    script = "".join(
        files("prunekit.report").joinpath("templates", name).read_text(encoding="utf-8") for name in SCRIPTS
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    found.globals.update({"script": Markup(script), "script_source": f"sha256-{digest}"})
    return found


def linked(target: Path, page: Path) -> str:
    """Return the address of a file relative to the page's folder, so that both can be moved together."""
    try:
        return quote(os.path.relpath(target.resolve(), page.resolve().parent).replace(os.sep, "/"))
    except ValueError:  # on another drive
        return target.resolve().as_uri()

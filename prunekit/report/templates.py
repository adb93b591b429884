"""The templates of all pages and sections, and the one way in which they become text and files."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prunekit import numbers
from prunekit.artifacts import write_text
from prunekit.measure import wording
from prunekit.report.methods import how

SCRIPTS = ("sort.js", "scroll.js")
FILTERS = (
    "count",
    "difference",
    "digits",
    "duration",
    "factor",
    "interval",
    "moment",
    "percent",
    "scientific",
    "share",
    "size",
)
MISSING = Markup('<p class="soft">This run has no {}.</p>')
"""What a section says in the place of a file that a run did not write."""


def write(page: Path, template: str, **values: Any) -> Path:
    """Writes a page whole or not at all, and returns its path."""
    write_text(page, rendered(template, **values))
    return page


def rendered(template: str, **values: Any) -> Markup:
    """A template with its values filled in, which are escaped."""
    return Markup(environment().get_template(template).render(**values))


@cache
def environment() -> Environment:
    """Where the pages' templates are, with the filters that write numbers in them."""
    found = Environment(
        loader=PackageLoader("prunekit.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update({name: getattr(numbers, name) for name in FILTERS})
    found.filters.update({"doubtful": wording.doubtful, "computed": wording.computed, "how": how})
    found.globals["missing"] = lambda what: MISSING.format(what)
    # The only script that a page's policy lets run is this one, by its hash.
    script = "".join(files("prunekit.report").joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    found.globals.update({"script": Markup(script), "script_source": f"sha256-{digest}"})
    return found

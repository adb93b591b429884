"""How often gradients were clamped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from markupsafe import Markup

from prunekit.report.headline import clamped
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("clamps", about="how often gradients were clamped", order=80)
class Clamps:
    """How often gradients were clamped."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """The lines of the terminal, and a row for each module."""
        lines, rows = list(clamped(run.metrics)), _by_run(run.clamps)
        return {"lines": lines, "clamps": rows} if lines or rows else None

    def html(self, data: dict[str, Any]) -> Markup:
        """A table, where there are rows."""
        return rendered("sections/clamps.html", clamps=data["clamps"]) if data["clamps"] else Markup()

    def text(self, data: dict[str, Any]) -> Iterator[str]:
        """The lines."""
        yield from (f"Clamped at most: {line}" for line in data["lines"])


def _by_run(clamps: pd.DataFrame | None) -> dict[str, Any] | None:
    """A row for each clamped module, with the share of each training run."""
    if clamps is None or clamps.empty:
        return None
    runs = list(dict.fromkeys(clamps["run"]))
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in clamps.to_dict("records"):
        key = record["clamp"], record["module"]
        rows.setdefault(key, {"shares": {}, **record})["shares"][record["run"]] = record["share"]
    return {"runs": runs, "rows": list(rows.values())}

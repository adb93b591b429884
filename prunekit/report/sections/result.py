"""The models beside each other: scores, sizes, and what budgets left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from prunekit.report.headline import budgeted, compared, deployed, models, on_time, reference
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("result", about="scores and sizes of the models, and what budgets left", order=10)
class Result:
    """The models beside each other: scores, sizes, and what budgets left."""

    def read(self, run: Run) -> dict[str, Any]:
        """The metrics, and the lines that page and terminal share."""
        return {
            "metrics": run.metrics,
            "models": models(run.metrics),
            "compared": list(compared(run.metrics)),
            "reference": reference(run.metrics),
            "deployed": list(deployed(run.metrics)),
            "budgets": list(budgeted(run.metrics.get("plan", {}))),
            "on_time": list(on_time(run.metrics)),
        }

    def html(self, data: dict[str, Any]) -> Markup:
        """A table, and a paragraph for each line."""
        return rendered("sections/result.html", **data)

    def text(self, data: dict[str, Any]) -> Iterator[str]:
        """The lines, which follow the table."""
        yield from (f"Budget {line}" for line in data["budgets"])
        yield from (f"Time: {line}" for line in data["on_time"])
        yield from (f"Deployed: {line}" for line in data["deployed"])

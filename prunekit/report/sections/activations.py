"""What activation masks do on the test images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from prunekit.report.headline import masked
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("activations", about="what activation masks do on the test images", order=70)
class Activations:
    """What activation masks do on the test images."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """The line that page and terminal share, and the metrics."""
        lines = list(masked(run.metrics))
        return {"masked": lines, "metrics": run.metrics} if lines else None

    def html(self, data: dict[str, Any]) -> Markup:
        """The line and a table of the thresholds."""
        return rendered("sections/activations.html", **data)

    def text(self, data: dict[str, Any]) -> Iterator[str]:
        """The line."""
        yield from (f"Under the activation masks: {line}" for line in data["masked"])

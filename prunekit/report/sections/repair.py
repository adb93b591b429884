"""What repair did, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from prunekit.report.headline import repaired
from prunekit.report.run import Run, records
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("repair", about="what repair did, layer by layer", order=60)
class Repair:
    """What repair did, layer by layer."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """The line that page and terminal share, and a row for each layer."""
        lines = list(repaired(run.metrics))
        return {"repaired": lines, "repair": records(run.repair)} if lines else None

    def html(self, data: dict[str, Any]) -> Markup:
        """The line and a table."""
        return rendered("sections/repair.html", **data)

    def text(self, data: dict[str, Any]) -> Iterator[str]:
        """The line."""
        yield from (f"Repair: {line}" for line in data["repaired"])

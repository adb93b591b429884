"""The filters of the first layer."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from prunekit.report.features import filters_of
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("filters", about="the filters of the first layer", order=120)
class Filters:
    """The filters of the first layer."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """The picture in the folder."""
        return filters_of(run.folder / "filters")

    def html(self, filters: dict[str, Any]) -> Markup:
        """The picture."""
        return rendered("sections/filters.html", filters=filters)

"""Dead and redundant channels, with a link to all histograms."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from prunekit.report.histograms import summed
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("statistics", about="dead and redundant channels", order=130)
class Statistics:
    """Dead and redundant channels, with a link to all histograms."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """What the histograms in the folder come to."""
        return summed(run.folder / "histograms", run.page_folder)

    def html(self, statistics: dict[str, Any]) -> Markup:
        """A table."""
        return rendered("sections/statistics.html", statistics=statistics)

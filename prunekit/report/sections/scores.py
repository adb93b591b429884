"""Importance scores of kept and removed channels."""

from __future__ import annotations

from markupsafe import Markup

from prunekit.report import figures
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("scores", about="importance scores of kept and removed channels", order=140)
class Scores:
    """Importance scores of kept and removed channels."""

    def read(self, run: Run) -> Run:
        """The run: its scores."""
        return run

    def html(self, run: Run) -> Markup:
        """Histograms of each channel group."""
        return rendered("sections/scores.html", histograms=figures.figure_or_none(figures.histograms, run.scores))

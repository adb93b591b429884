"""The layers that compute, before and after."""

from __future__ import annotations

from markupsafe import Markup

from prunekit.report import figures
from prunekit.report.run import Run, records
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("widths", about="the layers that compute, before and after", order=90)
class Widths:
    """The layers that compute, before and after."""

    def read(self, run: Run) -> Run:
        """The run: its layers."""
        return run

    def html(self, run: Run) -> Markup:
        """A figure and a table."""
        # Norms have the widths of what feeds them: the layers that compute are the ones to show.
        layers = None if run.layers is None else run.layers[run.layers["macs_before"] > 0]
        figure = figures.figure_or_none(figures.widths, layers)
        return rendered("sections/widths.html", widths=figure, layers=records(layers))

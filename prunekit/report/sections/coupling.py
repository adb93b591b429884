"""Channels that hang together."""

from __future__ import annotations

from markupsafe import Markup

from prunekit.report import figures
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("coupling", about="channels that must stay or go together", order=160)
class Coupling:
    """Channels that hang together."""

    def read(self, run: Run) -> Run:
        """The run: its channel groups."""
        return run

    def html(self, run: Run) -> Markup:
        """A figure of groups and modules."""
        return rendered("sections/coupling.html", coupling=figures.figure_or_none(figures.coupling, run.coupling))

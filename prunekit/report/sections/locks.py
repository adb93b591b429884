"""Locked channels, with reasons."""

from __future__ import annotations

from markupsafe import Markup

from prunekit.report.run import Run, records
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("locks", about="channels that stay, and why", order=170)
class Locks:
    """Locked channels, with reasons."""

    def read(self, run: Run) -> Run:
        """The run: its locks."""
        return run

    def html(self, run: Run) -> Markup:
        """A table."""
        return rendered("sections/locks.html", locks=records(run.locks))

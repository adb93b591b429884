"""What went when, of channels that went while the model was fine-tuned."""

from __future__ import annotations

from markupsafe import Markup

from prunekit.report.run import Run
from prunekit.report.schedule import drawn
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("schedule", about="what was pruned when, while fine-tuning", order=50)
class Schedule:
    """What went when, of channels that went while the model was fine-tuned."""

    def read(self, run: Run) -> Run | None:
        """The run, where it had a schedule."""
        return None if run.schedule is None or run.schedule.empty else run

    def html(self, run: Run) -> Markup:
        """A figure of what was planned and what was left."""
        figure = drawn(run.schedule, summary=run.metrics.get("schedule"))
        return rendered("sections/schedule.html", metrics=run.metrics, schedule=figure)

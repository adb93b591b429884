"""What was timed, and what budgets of time came to."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from prunekit.measure import wording
from prunekit.numbers import factor, interval
from prunekit.report import figures
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("latency", about="what was timed, and what budgets of time came to", order=20)
class Latency:
    """What was timed, and what budgets of time came to."""

    def read(self, run: Run) -> Run:
        """The run: its metrics and samples."""
        return run

    def html(self, run: Run) -> Markup:
        """Tables, and a figure of the samples."""
        return rendered(
            "sections/latency.html",
            metrics=run.metrics,
            latencies=figures.figure_or_none(figures.latencies, run.latency_samples),
            unstable=wording.unstable(run.metrics.get("latency", []), run.metrics.get("speedup", [])),
            machine=wording.surroundings(run.metrics.get("machine", {}), run.metrics.get("latency", [])),
        )

    def text(self, run: Run) -> Iterator[str]:
        """The speedups."""
        for row in run.metrics.get("speedup", []):
            found = f"{factor(row['median'])} {interval(row['low'], row['high'])}{wording.doubtful(row)}"
            yield f"Speedup of {row['model']} ({wording.where(row)}): {found}"

"""The training: losses, gradients, and what its steps took."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd
from markupsafe import Markup

from prunekit.report import figures
from prunekit.report.gradients import flow_figures
from prunekit.report.headline import compiled, early, scores, taught
from prunekit.report.run import Run
from prunekit.report.sections.registry import register_section
from prunekit.report.templates import rendered


@register_section("curves", about="losses and gradients of the training", order=40)
class Curves:
    """The training: losses, gradients, and what its steps took."""

    def read(self, run: Run) -> Run | None:
        """The run, unless nothing was trained."""
        there = run.history is not None and not run.history.empty
        return run if there or run.metrics.get("fine_tuned") is not False else None

    def html(self, run: Run) -> Markup:
        """Curves, notes on steps, and gradients by layer."""
        return rendered(
            "sections/curves.html",
            curves=figures.figure_or_none(partial(figures.curves, labels=dict(scores(run.metrics))), run.history),
            gradients=flow_figures(run.gradients),
            skipped=_skipped(run.history),
            compiled=list(compiled(run.metrics)),
            early=list(early(run.metrics)),
            taught=list(taught(run.metrics)),
        )

    def text(self, run: Run) -> Iterator[str]:
        """What teachers took, and when masks were made physical."""
        yield from (f"Teacher's time: {line}" for line in taught(run.metrics))
        yield from (f"Compact early: {line}" for line in early(run.metrics))


def _skipped(history: pd.DataFrame | None) -> dict[str, int]:
    """Steps that training runs did not make, by run, where there are any."""
    if history is None or "skipped" not in history.columns:
        return {}
    by_run = history.groupby("run", sort=False)["skipped"].sum()
    return {str(run): int(steps) for run, steps in by_run.items() if steps > 0}

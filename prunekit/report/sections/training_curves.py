"""Sections on training: curves, pruning schedule, repair, activation masks, and gradient clamps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
from markupsafe import Markup

from prunekit.report import headline
from prunekit.report.figures import charts as figures
from prunekit.report.figures.charts import flow_figures, schedule
from prunekit.report.rendering import rendered
from prunekit.report.run_data import Run, records
from prunekit.report.sections.section import register_section


@register_section("curves", about="losses and gradients of the training", order=40)
class CurvesSection:
    """The training: losses, gradients, and the cost of its steps."""

    def read(self, run: Run) -> Run | None:
        """Return the run, unless nothing was trained."""
        there = run.history is not None and not run.history.empty
        return run if there or run.metrics.get("fine_tuned") is not False else None

    def html(self, run: Run) -> Markup:
        """Render curves, notes on steps, and gradients by layer."""
        labels = dict(headline.scores(run.metrics))
        unit = headline.unit(run.metrics, next(iter(labels)))
        return rendered(
            "sections/curves.html",
            curves=figures.figure_or_none(partial(figures.curves, labels=labels, unit=unit), run.history),
            gradients=flow_figures(run.gradients),
            skipped=_skipped(run.history),
            compiled=list(headline.compiled(run.metrics)),
            early=list(headline.early(run.metrics)),
            taught=list(headline.taught(run.metrics)),
        )

    def text(self, run: Run) -> Iterator[str]:
        """Yield the time of teachers, and when training went on with the compact model."""
        yield from (f"Teacher's time: {line}" for line in headline.taught(run.metrics))
        yield from (f"Compact early: {line}" for line in headline.early(run.metrics))


def _skipped(history: pd.DataFrame | None) -> dict[str, int]:
    """Return the number of skipped steps of each training run that skipped some."""
    if history is None or "skipped" not in history.columns:
        return {}
    by_run = history.groupby("run", sort=False)["skipped"].sum()
    return {str(run): int(steps) for run, steps in by_run.items() if steps > 0}


@register_section("schedule", about="the channels that were pruned while fine-tuning", order=50)
def pruning_schedule(run: Run) -> dict[str, Any] | None:
    """Return a figure of the shares that a schedule planned and left; None if the run had none."""
    if run.schedule is None or run.schedule.empty:
        return None
    drawn = figures.figure_or_none(partial(schedule, summary=run.metrics.get("schedule")), run.schedule)
    return {"metrics": run.metrics, "schedule": drawn}


@register_section("repair", about="the repair, layer by layer", order=60)
class RepairSection:
    """The repair, layer by layer."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the line that page and terminal share, and a row for each layer."""
        lines = list(headline.repaired(run.metrics))
        return {"repaired": lines, "repair": records(run.repair)} if lines else None

    def text(self, data: dict[str, Any]) -> Iterator[str]:
        """Yield the line."""
        yield from (f"Repair: {line}" for line in data["repaired"])


@register_section("activations", about="the effect of activation masks on the test images", order=70)
class ActivationsSection:
    """The effect of activation masks on the test images."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the line that page and terminal share, and the metrics with the thresholds."""
        lines = list(headline.masked(run.metrics))
        return {"masked": lines, "metrics": run.metrics} if lines else None

    def text(self, data: dict[str, Any]) -> Iterator[str]:
        """Yield the line."""
        yield from (f"Under the activation masks: {line}" for line in data["masked"])


@register_section("clamps", about="how often gradients were clamped", order=80)
class ClampsSection:
    """Shares of clamped gradients."""

    def read(self, run: Run) -> dict[str, Any] | None:
        """Return the lines of the terminal, and a row for each module."""
        lines, rows = list(headline.clamped(run.metrics)), _by_module(run.clamps)
        return {"lines": lines, "clamps": rows} if lines or rows else None

    def html(self, data: dict[str, Any]) -> Markup:
        """Render a table, where there are rows."""
        return rendered("sections/clamps.html", clamps=data["clamps"]) if data["clamps"] else Markup()

    def text(self, data: dict[str, Any]) -> Iterator[str]:
        """Yield the lines."""
        yield from (f"Clamped at most: {line}" for line in data["lines"])


def _by_module(clamps: pd.DataFrame | None) -> dict[str, Any] | None:
    """Return a row for each clamped module, with the share of each training run."""
    if clamps is None or clamps.empty:
        return None
    runs = list(dict.fromkeys(clamps["run"]))
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in clamps.to_dict("records"):
        key = record["clamp"], record["module"]
        rows.setdefault(key, {"shares": {}, **record})["shares"][record["run"]] = record["share"]
    return {"runs": runs, "rows": list(rows.values())}

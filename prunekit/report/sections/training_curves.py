"""Sections on training: curves, pruning schedule, repair, activation masks, and gradient clamps."""

from functools import partial
from typing import Any

import pandas as pd

from prunekit.report import headline
from prunekit.report.figures import charts as figures
from prunekit.report.figures.charts import rates, schedule
from prunekit.report.run_data import Run, records
from prunekit.report.sections.section import register_section

CURVES = {
    "searched": "Training of",
    "fake_quantized": "Training of",
    "unbeaten": "Training of",
    "early": "Compact early:",
}


@register_section("curves", about="losses and scores of the training", order=40, lines=CURVES)
def training(run: Run) -> dict[str, Any] | None:
    """Return curves, and notes on steps and their cost; None if nothing was trained."""
    if (run.history is None or run.history.empty) and run.metrics.get("fine_tuned") is False:
        return None
    labels = dict(headline.scores(run.metrics))
    unit = headline.unit(run.metrics, next(iter(labels)))
    draw = partial(figures.curves, labels=labels, unit=unit, trainings=run.metrics.get("trainings") or {})
    return {
        "curves": figures.figure_or_none(draw, run.history),
        "rates": rates(run.metrics.get("trainings") or {}),
        "searched": list(headline.searched(run.metrics)),
        "fake_quantized": list(headline.fake_quantized(run.metrics)),
        "unbeaten": list(headline.unbeaten(run.metrics)),
        "skipped": _skipped(run.history),
        "compiled": list(headline.compiled(run.metrics)),
        "early": list(headline.early(run.metrics)),
    }


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


@register_section("repair", about="the repair, layer by layer", order=60, lines={"repaired": "Repair:"})
def repair(run: Run) -> dict[str, Any] | None:
    """Return the line that page and terminal share, and a row for each layer."""
    lines = list(headline.repaired(run.metrics))
    return {"repaired": lines, "repair": records(run.repair)} if lines else None


@register_section(
    "activations",
    about="the effect of activation masks on the test images",
    order=70,
    lines={"masked": "Under the activation masks:"},
)
def activations(run: Run) -> dict[str, Any] | None:
    """Return the line that page and terminal share, and the metrics with the thresholds."""
    lines = list(headline.masked(run.metrics))
    return {"masked": lines, "metrics": run.metrics} if lines else None


@register_section("clamps", about="how often gradients were clamped", order=80, lines={"said": "Clamped at most:"})
def clamps(run: Run) -> dict[str, Any] | None:
    """Return the lines of the terminal, and a row for each module, of which the page has a table."""
    lines, rows = list(headline.clamped(run.metrics)), _by_module(run.clamps)
    return {"said": lines, "clamps": rows} if lines or rows else None


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

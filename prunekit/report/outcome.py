"""What came of a run, as a table and lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunekit.display import Table
from prunekit.measure.wording import doubtful, where
from prunekit.numbers import factor, interval
from prunekit.report.headline import (
    budgeted,
    clamped,
    compared,
    deployed,
    early,
    masked,
    models,
    on_time,
    reference,
    repaired,
    taught,
)


def comparison(metrics: Mapping[str, Any]) -> Table:
    """Every measure of each model, and how the pruned one compares."""
    headings = ("", *models(metrics), f"pruned against {reference(metrics)}")
    rows = [(row.label, *(" ".join(cell).strip() for cell in row.cells), row.change) for row in compared(metrics)]
    return Table(headings, rows)


def lines(metrics: Mapping[str, Any], folder: Path) -> list[str]:
    """What else there is to say: budgets, speed, repair, shortfalls, and where everything is."""
    speedups = [
        f"Speedup of {row['model']} ({where(row)}): {factor(row['median'])} "
        f"{interval(row['low'], row['high'])}{doubtful(row)}"
        for row in metrics["speedup"]
    ]
    return [
        *(f"Budget {text}" for text in budgeted(metrics.get("plan", {}))),
        *(f"Time: {text}" for text in on_time(metrics)),
        *speedups,
        *(f"Repair: {text}" for text in repaired(metrics)),
        *(f"Deployed: {text}" for text in deployed(metrics)),
        *(f"Under the activation masks: {text}" for text in masked(metrics)),
        *(f"Clamped at most: {text}" for text in clamped(metrics)),
        *(f"Teacher's time: {text}" for text in taught(metrics)),
        *(f"Compact early: {text}" for text in early(metrics)),
        *(f"Shortfall: {shortfall}" for shortfall in metrics["shortfalls"]),
        f"Model: {folder / 'model'}",
        f"Report: {folder / 'report.html'}",
    ]

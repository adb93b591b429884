"""What came of a run, as a table and lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunekit.display import Table
from prunekit.report.headline import compared, models, reference


def comparison(metrics: Mapping[str, Any]) -> Table:
    """Every measure of each model, and how the pruned one compares."""
    headings = ("", *models(metrics), f"pruned against {reference(metrics)}")
    rows = [(row.label, *(" ".join(cell).strip() for cell in row.cells), row.change) for row in compared(metrics)]
    return Table(headings, rows)


def lines(metrics: Mapping[str, Any], folder: Path) -> list[str]:
    """What else there is to say: what the sections of its page say, shortfalls, and where everything is."""
    from prunekit.report.page import headline  # pandas and matplotlib take most of a second to import
    from prunekit.report.run import Run

    return [
        *headline(Run(folder, metrics=dict(metrics))),
        *(f"Shortfall: {shortfall}" for shortfall in metrics["shortfalls"]),
        f"Model: {folder / 'model'}",
        f"Report: {folder / 'report.html'}",
    ]

"""From the folder of a sensitivity analysis to `report.html`."""

from __future__ import annotations

from pathlib import Path

from prunekit.artifacts import write_text
from prunekit.numbers import digits, percent
from prunekit.report import curves
from prunekit.report.gaps import gaps
from prunekit.report.headline import Tile
from prunekit.report.page import of_run
from prunekit.report.run import Run, read_run


def write_sensitivity_page(folder: Path, state: str | None = None) -> Path:
    """Renders `report.html` and returns its path; see `prunekit.report.write_sensitivity`."""
    page = folder / "report.html"
    write_text(page, render(read_run(folder), state))
    return page


def render(run: Run, state: str | None = None) -> str:
    """The page as HTML text."""
    rows, facts = run.sensitivity, run.analysis
    there = rows is not None and bool(curves.ways(rows))
    return of_run(
        "sensitivity.html",
        run,
        state,
        gaps(run, "sensitivity.json"),
        facts=facts,
        tiles=_tiles(run),
        heatmap=curves.heatmap(rows) if there else None,
        lines=curves.lines(rows) if there else None,
        both=rows is not None and len(curves.ways(rows)) == 2,
    )


def _tiles(run: Run) -> list[Tile]:
    """The figures at the top of the page, as far as they are known."""
    facts = run.analysis
    if not facts:
        return []
    tiles = [Tile("Channel groups", str(len(facts["groups"])), f"from {facts['images']} unlabeled images")]
    if facts["groups"]:
        first = facts["groups"][0]
        half = first["half_fast"] if first["half_measured"] is None else first["half_measured"]
        tiles.append(
            Tile(
                "Most sensitive",
                percent(None if half is None else 100 * half, 0),
                f"{first['group']}, at half of its channels",
            )
        )
    if facts["dense"]:
        detail = f"dense, loss {digits(facts['dense']['loss'])}, {facts['measured_images']} validation images"
        tiles.append(Tile("Top-1", percent(facts["dense"]["top1"], 2), detail))
    if facts["agreement"] is not None:
        tiles.append(Tile("Fast against measured", f"{facts['agreement']:.2f}", "rank correlation over groups"))
    return tiles

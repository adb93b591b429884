"""Contents of the page of a sensitivity analysis."""

from __future__ import annotations

from typing import Any

from prunekit.report.figures import error_curves as curves
from prunekit.report.headline import Tile, capital, samples, scores, unit
from prunekit.report.run_data import Run
from prunekit.utils.display import digits, in_unit, percent


def values(run: Run) -> dict[str, Any]:
    """Return what the template of the page shows of an analysis."""
    rows = run.sensitivity
    there = rows is not None and bool(curves.ways(rows))
    return {
        "facts": run.analysis,
        "tiles": _tiles(run),
        "heatmap": curves.heatmap(rows) if there else None,
        "lines": curves.lines(rows) if there else None,
        "both": rows is not None and len(curves.ways(rows)) == 2,
    }


def _tiles(run: Run) -> list[Tile]:
    """Return the figures at the top of the page, as far as they are known."""
    facts = run.analysis
    if not facts:
        return []
    tiles = [Tile("Channel groups", str(len(facts["groups"])), f"from {facts['images']} unlabeled {samples(facts)}")]
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
        loss = f"loss {digits(facts['dense']['loss'])}, " if facts["dense"]["loss"] is not None else ""
        detail = f"dense, {loss}{facts['measured_images']} validation {samples(facts)}"
        for name, label in scores(facts):
            tiles.append(Tile(capital(label), in_unit(facts["dense"].get(name), unit(facts, name)), detail))
    if facts["agreement"] is not None:
        tiles.append(Tile("Fast against measured", f"{facts['agreement']:.2f}", "rank correlation over groups"))
    return tiles

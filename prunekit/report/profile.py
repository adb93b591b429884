"""What the page of a latency profile shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunekit.measure import wording
from prunekit.numbers import digits, duration, share
from prunekit.report import figures, staircases
from prunekit.report.headline import Tile
from prunekit.report.run import Run, records


def values(run: Run) -> dict[str, Any]:
    """Return what the template of the page shows of a profile."""
    facts = run.profile
    drawn = [layer for layer in run.fits.get("layers", []) if layer["widths"]]
    return {
        "facts": facts,
        "tiles": _tiles(facts) if facts else [],
        "where": wording.where(facts["setting"]) if facts else "",
        "layers": staircases.layers(run.fits["layers"]) if drawn else None,
        "predictions": figures.figure_or_none(lambda rows: staircases.predictions(records(rows) or []), run.networks),
        "machine": wording.surroundings(facts.get("machine", {})),
    }


def _tiles(facts: Mapping[str, Any]) -> list[Tile]:
    """The figures at the top of the page."""
    errors = [abs(check["error"]) for check in facts["checks"]]
    held_out = f"{len(errors)} of {facts['networks']} networks, held out"
    tiles = [
        Tile("Median error of the prediction", share(facts["error"]), held_out),
        Tile("Largest error", share(max(errors)), "on the same networks"),
        Tile("Dense model", f"{digits(facts['dense_ms'])} ms", wording.where(facts["setting"])),
    ]
    if facts["layers"]:
        first = facts["layers"][0]
        tiles.append(Tile("Costliest layer", share(first["share"]), first["module"] or "(the model's own code)"))
    return [*tiles, Tile("Profiled in", duration(facts["seconds"]), "without what the cache had")]

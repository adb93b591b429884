"""From the folder of a latency profile to `report.html`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunekit.artifacts import write_text
from prunekit.measure import wording
from prunekit.numbers import digits, duration, share
from prunekit.report import figures, staircases
from prunekit.report.gaps import gaps
from prunekit.report.headline import Tile
from prunekit.report.page import of_run
from prunekit.report.run import Run, read_run, records


def write_profile_page(folder: Path, state: str | None = None) -> Path:
    """Renders `report.html` and returns its path; see `prunekit.report.write_profile`."""
    page = folder / "report.html"
    write_text(page, render(read_run(folder), state))
    return page


def render(run: Run, state: str | None = None) -> str:
    """The page as HTML text."""
    facts = run.profile
    drawn = [layer for layer in run.fits.get("layers", []) if layer["widths"]]
    return of_run(
        "profile.html",
        run,
        state,
        gaps(run, "profile.json"),
        facts=facts,
        tiles=_tiles(facts) if facts else [],
        where=wording.where(facts["setting"]) if facts else "",
        layers=staircases.layers(run.fits["layers"]) if drawn else None,
        predictions=figures.figure_or_none(lambda rows: staircases.predictions(records(rows) or []), run.networks),
        machine=wording.surroundings(facts.get("machine", {})),
    )


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

"""`prunekit visualize filters`: what the first layer looks for."""

from __future__ import annotations

from pathlib import Path

import click

from prunekit.cli.models import ModelOptions, model_command
from prunekit.cli.output import Console, save
from prunekit.cli.sides import find_sides, pictures_folder, report_of

FOLDER = "filters"


@click.command("filters", short_help="Show the filters of the first layer.")
@click.argument("arguments", nargs=-1, metavar="MODEL [KEY=VALUE]...")
@click.option("--layer", metavar="PATH", help="Another layer.  [default: the first that reads the image]")
@click.option("--most", default=256, show_default=True, type=click.IntRange(min=0), help="Filters shown; 0: all.")
@model_command("the picture.  [default: filters, for a run in its folder]", device=False)
def filters_command(
    console: Console, given: ModelOptions, arguments: tuple[str, ...], layer: str | None, most: int, output: Path | None
) -> None:
    """First-layer filters as images in a PNG file, the dense model's beside the pruned one's, pruned ones crossed out.

    MODEL is a run's folder or a model folder, whose dense model is shown beside the pruned one where the run has kept
    it, a recipe (its dense model, trained first where it has no weights) or the name of a model. The picture of a run
    is in its report too.
    """
    from prunekit.visualize import write_png
    from prunekit.visualize.filters import draw_filters, first_filters

    with console.running():
        sides = find_sides(arguments, given, console)
        folder = pictures_folder(sides, output, FOLDER)
        found = first_filters(sides.models, sides.sample_shape, layer, kept=sides.kept)
        picture = write_png(folder / "filters.png", draw_filters(found, sides.name, most or None))
    weights = next(iter(found.sides.values()))
    payload = {
        "model": sides.name,
        "models": list(found.sides),
        "layer": found.path,
        "filters": len(weights),
        "shape": list(weights.shape[1:]),
        "kept": None if found.kept is None else found.kept.nonzero()[0],
        "note": found.note,
        "picture": str(picture),
    }
    save(payload, folder, "filters.json", console)
    kept = "" if found.kept is None else f", {int(found.kept.sum())} kept"
    pages = report_of(sides, folder, FOLDER)
    lines = [f"{sides.name}: {len(weights)} filters of {found.path}{kept}", f"Picture: {picture}"]
    console.result(payload, "\n".join([*lines, *(f"Report: {page}" for page in pages)]))

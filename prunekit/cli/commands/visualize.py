"""`prunekit visualize`: pictures of what a model computes, with a subcommand for each kind.

- `features`: what layers make of an image.
- `filters`: what the first layer detects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, find_model_pair, model_command, pictures_folder, report_of
from prunekit.cli.output import Console, plain, save
from prunekit.utils.availability import require_figures
from prunekit.utils.display import table


@click.group()
def visualize_group() -> None:
    """Draw what a model computes, the dense model's pictures beside the pruned one's."""
    require_figures()


register_command("visualize", about="Show what a model computes, as pictures.", place=13)(visualize_group)


@visualize_group.command("features", short_help="Show what layers make of an image.")
@click.argument("arguments", nargs=-1, metavar="MODEL [KEY=VALUE]...")
@click.option("--image", type=click.Path(path_type=Path), metavar="FILE", help="An image.  [default: a test image]")
@click.option(
    "--index", default=0, show_default=True, type=click.IntRange(min=0), help="Which test image, without --image."
)
@click.option("--layers", multiple=True, metavar="GLOB", help="Module paths; several times.  [default: the children]")
@click.option("--most", default=64, show_default=True, type=click.IntRange(min=0), help="Channels shown; 0: all.")
@model_command("the pictures.  [default: features, for a run in its folder]", runs=True, device=False)
def features_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    image: Path | None,
    index: int,
    layers: tuple[str, ...],
    most: int,
    output: Path | None,
) -> None:
    """Draw feature maps of layers for one image as PNG files and a page, channels numbered, pruned ones crossed out.

    For every task of images.

    MODEL is a run's folder or a model folder, whose dense model is shown beside the pruned one where the run has kept
    it, a recipe (its dense model, trained first where it has no weights) or the name of a model. The image is a file,
    or a test image of the recipe. Pictures of a run are in its report too. Vectors are shown as bars, tokens of a
    transformer in their places.
    """
    from prunekit.jobs.analyses.pictures import write_features
    from prunekit.report.sections.pictures import write_features as write_page

    with console.running():
        pair = find_model_pair(arguments, given, console)
        folder = pictures_folder(pair, output, "features")
        payload = plain(write_features(pair, pair.input(image, index), folder, list(layers) or None, most or None))
    save(payload, folder, "features.json", console)
    pages = [write_page(folder), *report_of(pair, folder, "features")]
    console.result({**payload, "pages": [str(page) for page in pages]}, _features_text(payload, folder, pages))


def _features_text(result: dict[str, Any], folder: Path, pages: list[Path]) -> str:
    rows = [
        (row["path"], row["view"], row["what"], "–" if row["kept"] is None else row["kept"], row["picture"])
        for row in result["layers"]
    ]
    shown = table(("layer", "view", "output", "kept", f"in {folder}"), rows, ("view", "output", f"in {folder}"))
    return f"{result['model']} on {result['image']}\n{shown}\n" + "\n".join(map(str, pages))


@visualize_group.command("filters", short_help="Show the filters of the first layer.")
@click.argument("arguments", nargs=-1, metavar="MODEL [KEY=VALUE]...")
@click.option("--layer", metavar="PATH", help="Another layer.  [default: the first that reads the image]")
@click.option("--most", default=256, show_default=True, type=click.IntRange(min=0), help="Filters shown; 0: all.")
@model_command("the picture.  [default: filters, for a run in its folder]", runs=True, device=False)
def filters_command(
    console: Console, given: ModelOptions, arguments: tuple[str, ...], layer: str | None, most: int, output: Path | None
) -> None:
    """Draw first-layer filters in a PNG file, the dense model's beside the pruned one's, pruned ones crossed out.

    MODEL is a run's folder or a model folder, whose dense model is shown beside the pruned one where the run has kept
    it, a recipe (its dense model, trained first where it has no weights) or the name of a model. The picture of a run
    is in its report too.
    """
    from prunekit.inspection.visualize.filters import draw_filters, first_filters
    from prunekit.inspection.visualize.image_grids import write_png

    with console.running():
        pair = find_model_pair(arguments, given, console)
        folder = pictures_folder(pair, output, "filters")
        found = first_filters(pair.models, pair.sample_shape, layer, kept=pair.kept)
        picture = write_png(folder / "filters.png", draw_filters(found, pair.name, most or None))
    weights = next(iter(found.sides.values()))
    payload = {
        "model": pair.name,
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
    pages = report_of(pair, folder, "filters")
    lines = [f"{pair.name}: {len(weights)} filters of {found.path}{kept}", f"Picture: {picture}"]
    console.result(payload, "\n".join([*lines, *(f"Report: {page}" for page in pages)]))

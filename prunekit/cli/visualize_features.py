"""`prunekit visualize features`: what layers make of an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.models import ModelOptions, model_command
from prunekit.cli.output import Console, plain, save, table
from prunekit.cli.sides import find_sides, groups_option, image_options, pictures_folder, report_of

if TYPE_CHECKING:
    from prunekit.visualize import View

FOLDER = "features"


@click.command("features", short_help="Show what layers make of an image.")
@click.argument("arguments", nargs=-1, metavar="MODEL [KEY=VALUE]...")
@image_options
@click.option("--layers", multiple=True, metavar="GLOB", help="Module paths; several times.  [default: the children]")
@groups_option
@click.option("--view", type=click.Choice(["maps", "tokens", "bars"]), help="[default: what fits each layer]")
@click.option("--most", default=64, show_default=True, type=click.IntRange(min=0), help="Channels shown; 0: all.")
@click.option("--one-scale", is_flag=True, help="One scale for all channels of a layer, instead of one for each.")
@model_command("the pictures.  [default: features, for a run in its folder]", device=False)
def features_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    image: Path | None,
    index: int,
    layers: tuple[str, ...],
    groups: tuple[str, ...],
    view: View | None,
    most: int,
    one_scale: bool,
    output: Path | None,
) -> None:
    """Feature maps of layers for one image, as PNG files and a page: numbered channels, pruned ones crossed out.

    MODEL is a run's folder or a model folder, whose dense model is shown beside the pruned one where the run has kept
    it, a recipe (its dense model, trained first where it has no weights) or the name of a model. The image is a file,
    or a test image of the recipe. Pictures of a run are in its report too. Vectors are shown as bars, tokens of a
    transformer in their places.
    """
    from prunekit.report.features import write_features as write_page
    from prunekit.visualize import GridSettings
    from prunekit.workflow.features import FeatureSettings, write_features

    with console.running():
        sides = find_sides(arguments, given, console)
        folder = pictures_folder(sides, output, FOLDER)
        settings = FeatureSettings(sides.layers(layers, groups), view, GridSettings(most or None, one_scale))
        payload = plain(write_features(sides, sides.input(image, index), folder, settings))
    save(payload, folder, "features.json", console)
    pages = [write_page(folder), *report_of(sides, folder, FOLDER)]
    console.result({**payload, "pages": [str(page) for page in pages]}, _text(payload, folder, pages))


def _text(result: dict[str, Any], folder: Path, pages: list[Path]) -> str:
    rows = [
        (row["path"], row["view"], row["what"], "–" if row["kept"] is None else row["kept"], row["picture"])
        for row in result["layers"]
    ]
    shown = table(("layer", "view", "output", "kept", f"in {folder}"), rows, ("view", "output", f"in {folder}"))
    return f"{result['model']} on {result['image']}\n{shown}\n" + "\n".join(map(str, pages))

"""`prunekit visualize histograms`: distributions of weights and activations, dead and redundant channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from prunekit.cli.models import ModelOptions, model_command
from prunekit.cli.options import data_option, own_model_option
from prunekit.cli.output import Console, plain, save, table
from prunekit.cli.sides import find_sides, groups_option, pictures_folder, report_of

FOLDER = "histograms"


def _own_options(function: Any) -> Any:
    return own_model_option(data_option(function))


@click.command("histograms", short_help="Show distributions of weights and activations, dead and redundant channels.")
@click.argument("arguments", nargs=-1, metavar="RUN|RECIPE [KEY=VALUE]...")
@click.option(
    "--layers",
    multiple=True,
    metavar="GLOB",
    help="Whose activations and correlations.  [default: convolutions and linear]",
)
@groups_option
@click.option(
    "--threshold",
    default=0.99,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="From which correlation, or cosine of weights, on a channel is redundant.",
)
@model_command("the page and its tables.  [default: histograms, for a run in its folder]", options=_own_options)
def histograms_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    layers: tuple[str, ...],
    groups: tuple[str, ...],
    threshold: float,
    device: str | None,
    output: Path | None,
) -> None:
    """Histograms of weights, activations and importance scores by layer, the dense model's beside the pruned one's, and
    a table of dead and redundant channels, as a page and as CSV files.

    A run's folder, or a recipe (its dense model, trained first where it has no weights). Activations are those on the
    calibration images of the recipe. The report of a run says how many channels were found, and links to the page.
    """
    from prunekit.context import resolve_device
    from prunekit.report.histograms import write_histograms
    from prunekit.workflow.statistics import StatisticsSettings, write_statistics

    with console.running():
        sides = find_sides(arguments, given, console)
        folder = pictures_folder(sides, output, FOLDER)
        where = resolve_device(device or (sides.job.device if sides.job else "cpu"))
        payload = plain(
            write_statistics(sides, folder, where, StatisticsSettings(sides.layers(layers, groups), threshold))
        )
    save(payload, folder, "histograms.json", console)
    page = write_histograms(folder, sides.run)
    shown = "\n".join(map(str, [page, *report_of(sides, folder, FOLDER)]))
    console.result({**payload, "page": str(page)}, f"{_text(payload)}\nTables: {folder}\n{shown}")


def _text(payload: dict[str, Any]) -> str:
    from prunekit.report.histograms import by_layer

    rows = [
        (row["layer"], row["model"], _shown(row["dead"]), _shown(row["redundant"]))
        for row in by_layer(payload["findings"])
    ]
    totals = [
        f"{name}: {_count(payload, name, 'dead')} dead, {_count(payload, name, 'redundant')} redundant, in layers of "
        f"{channels} channels"
        for name, channels in payload["channels"].items()
    ]
    headings = ("layer", "model", "dead", "redundant")
    return "\n".join(
        [f"{payload['model']} on {payload['images']} images", table(headings, rows, headings), "", *totals]
    )  # fmt: skip


def _count(payload: dict[str, Any], model: str, finding: str) -> int:
    return sum(row["model"] == model and row["finding"] == finding for row in payload["findings"])


def _shown(channels: list[int]) -> str:
    if not channels:
        return ""
    return f"{len(channels)}: {', '.join(map(str, channels[:6]))}" + (", ..." if len(channels) > 6 else "")

"""`prunekit visualize gradients`: how large the gradients of each layer are while a model trains."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.options import load_job, recipe_options
from prunekit.cli.output import Console, check_folder, save, table

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "gradients"


@click.command("gradients", short_help="Show the gradients of each layer while a model trains.")
@click.option("--epochs", type=click.IntRange(min=1), help="How long.  [default: as the recipe trains]")
@click.option(
    "--records", default=100, show_default=True, type=click.IntRange(min=1), help="How often gradients are recorded."
)
@recipe_options("the picture, and its figures as CSV and JSON.  [default: gradients]")
def gradients_command(
    recipe: str,
    overrides: tuple[str, ...],
    epochs: int | None,
    records: int,
    factory: str | None,
    data: str | None,
    optimizer: str | None,
    allow_code: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train the dense model of a recipe and show the median and percentiles of the absolute gradients of each layer.

    As the recipe's `baseline` trains it, or with weights from a file as its `finetune` does, by the plain loss; the
    trained model is dropped. Gradients are those of weights, before `clamp_weight_grad`; exact zeros are counted apart.
    """
    console, folder = Console(as_json), output or Path(FOLDER)
    check_folder(folder)
    job = load_job(recipe, overrides, factory=factory, data=data, allow_code=allow_code, **options)
    import pandas as pd

    from prunekit.artifacts import write_csv
    from prunekit.report.flow import write_flow
    from prunekit.workflow import Own
    from prunekit.workflow.gradients import gradient_flow

    with console.running():
        own = Own(factory, data, optimizer)
        found = gradient_flow(job, epochs=epochs, records=records, log=console.log, progress=console.progress, own=own)
        rows = [asdict(row) for row in found]
        frame = pd.DataFrame(rows)
        write_csv(folder / "gradients.csv", rows)
        title = f"{job.name}: gradients of {frame['layer'].nunique()} layers"
        picture = write_flow(folder / "gradients.png", frame, title)
    payload = {
        "model": job.name,
        "records": int(frame["step"].nunique()),
        "layers": summary(frame),
        "csv": str(folder / "gradients.csv"),
        "picture": str(picture),
    }
    save(payload, folder, "gradients.json", console)
    console.result(payload, _text(payload))


def summary(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The first and the last record of each layer, in the order of the model."""
    by_layer = rows.groupby("layer", sort=False)
    firsts, lasts = by_layer.first(), by_layer.last()
    return [
        {
            "layer": layer,
            "first": firsts["median"][layer],
            "last": lasts["median"][layer],
            "p10": lasts["p10"][layer],
            "p90": lasts["p90"][layer],
            "zeros": lasts["zeros"][layer],
        }
        for layer in firsts.index
    ]


def _text(payload: dict[str, Any]) -> str:
    from prunekit.numbers import share

    rows = [
        (row["layer"], *(f"{row[key]:.2e}" for key in ("first", "last", "p10", "p90")), share(row["zeros"], 1))
        for row in payload["layers"]
    ]
    headings = ("layer", "median first", "median last", "p10", "p90", "zeros")
    return (
        f"|gradient| by layer, {payload['records']} records; percentiles of the last\n{table(headings, rows)}\n"
        f"Picture: {payload['picture']}\nTable: {payload['csv']}"
    )

"""`prunekit sensitivity` and `prunekit frontier`: what pruning costs, by channel group and by size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import recipe_command
from prunekit.cli.output import Console
from prunekit.errors import UsageError
from prunekit.utils.display import digits, in_unit

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Own
    from prunekit.settings.job import JobSettings


@register_command("sensitivity", about="Show what each channel group costs to prune.", place=5)
@click.option("--measured", is_flag=True, help="Also run the model with each group masked: exact, and slower.")
@click.option(
    "--groups",
    multiple=True,
    metavar="GLOB",
    help="Only channel groups of such a name; may be repeated. `prunekit inspect` shows the names.",
)
@recipe_command()
def sensitivity_command(console: Console, job: JobSettings, own: Own, measured: bool, groups: tuple[str, ...]) -> None:
    """Show the error against kept channels, for every channel group of a recipe's dense model.

    Fast, from unlabeled calibration samples: the error of the layers that read the group after their weights are fitted
    again, as a share of their outputs' variance. With --measured, on validation samples: the error of the model's
    output, and the loss and the scores of its task, when the group is masked and nothing is fitted. For every task.
    Curves are written as CSV and JSON, and a report.
    """
    from prunekit.jobs.analyses.sensitivity import analyze

    with console.running():
        run = analyze(job, measured=measured, groups=groups, log=console.log, progress=console.progress, own=own)
    places = f"Curves: {run.folder / 'sensitivity.csv'}\nReport: {run.folder / 'report.html'}"
    after = "".join(f"\n{line}" for line in (*_measured(run.metrics), places))
    console.show(run.result, {"folder": str(run.folder), **run.metrics}, "sensitivity", None, after=after)


def _measured(metrics: dict[str, Any]) -> list[str]:
    if metrics["dense"] is None:
        return []
    task, dense = metrics["task"], metrics["dense"]
    scores = ", ".join(f"{each['label']} {in_unit(dense[each['name']], each['unit'])}" for each in task["scores"])
    loss = f", loss {digits(dense['loss'])}" if dense["loss"] is not None else ""
    return [f"Dense model on {metrics['measured_images']} validation {task['samples']}: {scores}{loss}"]


def _points(context: click.Context, parameter: click.Parameter, value: str) -> int | list[float]:
    """Return a number of points, or shares."""
    try:
        return int(value) if value.isdigit() else [float(one) for one in value.split(",")]
    except ValueError:
        raise UsageError(f"--points: expected a number such as 8, or shares such as 0.8,0.5, got {value!r}") from None


@register_command("frontier", about="Show what pruning costs: score against size and time.", place=4)
@click.option(
    "--points", default="8", callback=_points, show_default=True, metavar="N|SHARE,...",
    help="How many models, or the shares of the MACs that they keep.",
)  # fmt: skip
@click.option(
    "--resume",
    metavar="auto|RUN",
    help="Continue the run in this folder; auto: the newest unfinished one, else a new one.",
)
@recipe_command()
def frontier_command(
    console: Console, job: JobSettings, own: Own, points: int | list[float], resume: str | None
) -> None:
    """Make models of several sizes of a recipe's dense model, and show what each costs and brings.

    Statistics and the order of removal are collected once; each point is pruned, repaired, proven, and scored on the
    validation samples, paired with the dense model. Nothing is fine-tuned. The models are in `points/` of the run.

    The recipe's budgets are not applied, and mark the picture. With one of time, points are shares of predicted time.

    KEY=VALUE changes the recipe, for example: prune.criterion=elimination.
    """
    from prunekit.jobs.frontier import analyze

    with console.running():
        run = analyze(job, points=points, log=console.log, progress=console.progress, own=own, resume=resume)
    places = f"\nModels: {run.folder / 'points'}\nReport: {run.folder / 'report.html'}"
    console.show(run.result, {"folder": str(run.folder), **run.metrics}, "frontier", None, after=places)

"""`prunekit frontier`: score against size and time, at several points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import recipe_command
from prunekit.cli.output import Console
from prunekit.errors import UsageError

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Own
    from prunekit.settings.job import JobSettings


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

    The recipe's budgets only mark the picture; the last one of time makes points by predicted time instead of MACs.

    KEY=VALUE changes the recipe, for example: prune.criterion=elimination.
    """
    from prunekit.jobs.frontier import analyze

    with console.running():
        run = analyze(job, points=points, log=console.log, progress=console.progress, own=own, resume=resume)
    places = f"\nModels: {run.folder / 'points'}\nReport: {run.folder / 'report.html'}"
    console.show(run.result, {"folder": str(run.folder), **run.metrics}, "frontier", None, after=places)

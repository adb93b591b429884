"""`prunekit sweep`: a recipe at every combination of settings, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import recipe_command
from prunekit.cli.output import Console
from prunekit.utils.display import NOTHING, digits, factor, in_unit, share, table

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Own
    from prunekit.settings.job import JobSettings

ENGINES = ("processes", "ray", "slurm", "collect")


@register_command("sweep", about="Run a recipe at every combination of settings, and compare.", place=5)
@click.option(
    "--resume", metavar="auto|SWEEP", help="Run what is missing of a sweep; auto: the newest of these trials."
)
@click.option("--retries", type=click.IntRange(min=0), default=1, show_default=True, help="Further tries of a trial.")
@click.option("--memory", metavar="4GB", help="Of a trial with all its processes; what takes more is killed.")
@click.option("--at-once", type=click.IntRange(min=1), help="Trials that run together.  [default: cores / threads]")
@click.option("--prune", "pruned", is_flag=True, help="Run trials as `prunekit prune` does: without fine-tuning.")
@click.option("--engine", type=click.Choice(ENGINES), default="processes", show_default=True, help="What runs trials.")
@click.option("--grid", "texts", multiple=True, required=True, metavar="KEY=VALUE,VALUE...", help="Values of a key.")
@recipe_command()
def sweep_command(
    console: Console, job: JobSettings, own: Own, texts: tuple[str, ...], pruned: bool, **options: Any
) -> None:
    """Run a recipe at every combination of settings, each in a process of its own, and compare the runs on a page.

    The dense model, its statistics and the profile of its latency are made once, before the first trial. A trial that
    fails or is killed is tried again, and goes on where it was. The page has the score against the measured time, which
    trials that run together disturb: --at-once 1 for times to rely on.

    Engines: processes of this machine; ray, on nodes that see the same files; slurm, which writes a script to submit
    and runs nothing; collect, which only compares the trials that are there.

    KEY=VALUE changes the recipe of all trials. Exits with 1 when a trial has no run in the end.
    """
    from prunekit.recipe.loading import combinations, grid_of

    grid = grid_of(texts)
    trials = combinations(job, grid)
    from prunekit.jobs.sweep import PAGE, sweep

    with console.running():
        found = sweep(job, grid, trials, training=not pruned, log=console.log, own=own, **options)
    cells = []
    for row in found.result:
        left, time = (share(row[key]) for key in ("macs_left", "params_left")), digits(row["ms"])
        speedup = factor(row["speedup"]) if row["stable"] else "unstable"
        cells.append(
            (row["run"] or NOTHING, row["trial"], in_unit(row["score"], row["unit"] or ""), *left, time, speedup)
        )
    script, page = found.metrics["script"], f"Comparison: {found.folder / PAGE}"
    lines = (
        [f"Submit: bash {script}"] if script else [*(f"no run of {each}" for each in found.metrics["missing"]), page]
    )
    text = table(("run", "trial", "score", "MACs left", "parameters", "ms", "speedup"), cells, text=("trial",))
    console.result({"folder": str(found.folder), **found.metrics}, "\n".join([text, *lines]))
    click.get_current_context().exit(1 if found.metrics["missing"] and not script else 0)

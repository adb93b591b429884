"""`prunekit profile`: what each layer takes at which widths."""

from __future__ import annotations

from typing import Any

import click

from prunekit.cli.options import common_options, load_job, output_option, own_options, seed_option
from prunekit.cli.output import Console, check_folder
from prunekit.display import text_of

SLOWEST = 20
HOW = ("widths step by", "kernel changes at")


@click.command("profile", short_help="Measure each layer's latency against its widths.")
@click.argument("recipe", metavar="RECIPE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--networks", type=click.IntRange(min=10), default=40, show_default=True, help="How many to measure.")
@click.option("--again", is_flag=True, help="Measure anew what was timed on a machine too noisy.")
@own_options
@seed_option
@output_option("runs.  [default: runs]")
@common_options
def profile_command(
    recipe: str,
    overrides: tuple[str, ...],
    networks: int,
    again: bool,
    factory: str | None,
    data: str | None,
    task: str | None,
    optimizer: str | None,
    allow_code: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Latency of a recipe's dense model, layer by layer, on the runtime and device of prune.target.

    Networks of widths all over the range are timed whole, layer by layer in place; a table is fitted to them, and
    tested on those that were held out; a report shows both. Budgets `speedup` and `latency_ms` are planned by it. What
    was measured is kept in ~/.cache/prunekit (or PRUNEKIT_CACHE): an interrupted profile goes on, a finished one is not
    measured again.

    KEY=VALUE changes the recipe, for example: prune.target.runtime=onnxruntime.
    """
    console = Console(as_json)
    job = load_job(recipe, overrides, factory=factory, data=data, task=task, allow_code=allow_code, **options)
    check_folder(job.output)
    from prunekit.workflow import Own, profile_job

    with console.running():
        run = profile_job(
            job,
            networks=networks,
            again=again,
            log=console.log,
            own=Own(factory, data, optimizer),
        )
    places = f"Table: {run.folder / 'profile.csv'}\nReport: {run.folder / 'report.html'}"
    console.result(
        {"folder": str(run.folder), **run.metrics},
        f"{text_of(run.result, most=SLOWEST, all_in='profile.csv')}\n{places}",
    )

"""`prunekit profile`: the latency of each layer by its widths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import recipe_command
from prunekit.cli.output import Console

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Own
    from prunekit.settings.job import JobSettings

SLOWEST = 20


@register_command("profile", about="Measure each layer's latency against its widths.", place=8)
@click.option("--networks", type=click.IntRange(min=10), default=40, show_default=True, help="How many to measure.")
@click.option("--again", is_flag=True, help="Measure again what was timed on a noisy machine.")
@recipe_command(device=False)
def profile_command(console: Console, job: JobSettings, own: Own, networks: int, again: bool) -> None:
    """Measure the latency of a recipe's dense model, layer by layer, on the runtime and device of prune.target.

    Whole networks of widths across the range are timed, layer by layer; a table is fitted to them, and tested on
    networks that were held out; a report shows both. Budgets `speedup` and `latency_ms` are planned with the table.
    Measurements are kept in ~/.cache/prunekit (or PRUNEKIT_CACHE), so that an interrupted profile continues, and a
    finished one is not measured again.

    KEY=VALUE changes the recipe, for example: prune.target.runtime=onnxruntime.
    """
    from prunekit.jobs.analyses.profile import profile_job

    with console.running():
        run = profile_job(job, networks=networks, again=again, log=console.log, own=own)
    places = f"Table: {run.folder / 'profile.csv'}\nReport: {run.folder / 'report.html'}"
    payload = {"folder": str(run.folder), **run.metrics}
    console.show(run.result, payload, "profile", None, after=f"\n{places}", most=SLOWEST, all_in="profile.csv")

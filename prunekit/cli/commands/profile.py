"""`prunekit profile`, the latency of each layer by its widths, and `prunekit kit`, networks for another machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, check_recipes, job_to_read, model_command, one_target
from prunekit.cli.options import is_recipe, networks_option, recipe_command, split_overrides
from prunekit.cli.output import Console
from prunekit.errors import UsageError
from prunekit.known_names import RUNTIMES

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Own
    from prunekit.settings.job import JobSettings

SLOWEST = 20


@register_command("profile", about="Measure each layer's latency against its widths.", place=8)
@networks_option
@click.option(
    "--times",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="times.json that another machine wrote with a kit.",
)
@click.option("--again", is_flag=True, help="Measure again what was timed on a noisy machine.")
@recipe_command(device=False)
def profile_command(
    console: Console, job: JobSettings, own: Own, networks: int | None, again: bool, times: Path | None
) -> None:
    """Measure the latency of a recipe's dense model, layer by layer, on the runtime and device of prune.target.

    Whole networks of widths across the range are timed, layer by layer; a table is fitted to them, and tested on
    networks that were held out; a report shows both. Budgets `speedup` and `latency_ms` are planned with the table.
    Measurements are kept in ~/.cache/prunekit (or PRUNEKIT_CACHE), so that an interrupted profile continues, and a
    finished one is not measured again. Another machine, prune.target.device=pi5, measures a kit; see `prunekit kit`.

    KEY=VALUE changes the recipe, for example: prune.target.runtime=onnxruntime.
    """
    from prunekit.jobs.analyses.profile import profile_job

    with console.running():
        run = profile_job(job, networks=networks, again=again, times=times, log=console.log, own=own)
    places = f"Table: {run.folder / 'profile.csv'}\nReport: {run.folder / 'report.html'}"
    payload = {"folder": str(run.folder), **run.metrics}
    console.show(run.result, payload, "profile", None, after=f"\n{places}", most=SLOWEST, all_in="profile.csv")


@register_command("kit", about="Write networks to time on another machine, and a script for it.", place=9)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--name", metavar="NAME", help="Of the other machine, such as pi5.  [default: prune.target.device]")
@click.option(
    "--runtime", metavar="NAME", help="What runs the files there.  [default: that of the recipe, or onnxruntime]"
)
@networks_option
@model_command("the kit, which may not be there yet.  [default: kit]", device=False)
def kit_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    name: str | None,
    runtime: str | None,
    networks: int | None,
    output: Path | None,
) -> None:
    """Write a folder, and a .zip of it, that is measured on another machine by `python3 measure.py`.

    It holds networks of many widths as files, their inputs and outputs, and a script that needs Python 3.8 or newer and
    the runtime's own package, and writes times.json. `prunekit profile RECIPE --times times.json` then makes plans for
    budgets of time on that machine, prune.target.device=pi5. MODEL is a recipe (its dense model), a model folder, or
    the name of a torchvision or CIFAR model.
    """
    targets, overrides = split_overrides(arguments)
    check_recipes(targets, overrides, given)
    if runtime is not None and (problem := RUNTIMES.problem(runtime)) is not None:
        raise click.BadParameter(problem, param_hint="--runtime")
    from prunekit.jobs.analyses.profile import kit_of
    from prunekit.settings.deployment import DeploySettings
    from prunekit.settings.pruning import PruneSettings

    prune, deploy = PruneSettings(), DeploySettings()
    if targets and is_recipe(targets[0]):
        job = job_to_read(targets[0], overrides, given)
        prune, deploy = job.prune, job.deploy
    target = prune.target
    runtime = runtime or ("onnxruntime" if target.runtime == "eager" else target.runtime)
    target = replace(target, runtime=runtime, device=name or target.device)
    if not target.elsewhere:
        raise UsageError("--name: expected a name for the other machine, such as pi5, got none")
    with console.running():
        subject = one_target(targets, overrides, given, needs_module="write a kit of")
        folder = kit_of(subject, replace(prune, target=target), deploy, output or Path("kit"), networks, console.log)
    console.result({"kit": str(folder)}, f"{folder}, and {folder}.zip; on {target.device}: python3 measure.py")

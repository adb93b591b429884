"""`prunekit finetune` and `prunekit prune`: the whole job of a recipe, with fine-tuning and without."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import combined, load_job, recipe_options, sizes
from prunekit.cli.output import Console, check_folder, plain
from prunekit.errors import UsageError
from prunekit.jobs.run.early_checks import AUTO, require_job, require_packages, require_run
from prunekit.models.names import CONFIG
from prunekit.utils.display import change, count, resource, share, table

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Own
    from prunekit.settings.job import JobSettings


SIZES = ("in", "out", "macs", "params")
job_options = combined(
    recipe_options(),
    click.option(
        "--resume",
        metavar="auto|RUN",
        help="Continue the run in this folder; auto: the newest unfinished one of this recipe, else a new one.",
    ),
    click.option(
        "--max-drop",
        type=click.FloatRange(min=0, min_open=True),
        metavar="DROP",
        help="In place of the recipe's budgets: the smallest model whose score falls by at most this, such as 0.01 for "
        "one point.",
    ),
    click.option(
        "--no-measure",
        is_flag=True,
        help="With --dry-run: measure no latency; predict budgets of time, from a cached profile if there is one.",
    ),
    click.option("--full", is_flag=True, help="With --dry-run: print the recipe with all its defaults."),
    click.option("--dry-run", is_flag=True, help="Print what the recipe changes, and the plan; train nothing."),
)
"""Adds the arguments and options of a command that runs a recipe's whole job."""


@register_command(
    "finetune", about="Prune, fine-tune, compact, verify and measure, from a recipe.", place=2, together=True
)
@job_options
def finetune_command(**arguments: Any) -> None:
    """Run the whole job of a recipe.

    Train or load the dense model, calibrate, prune, fine-tune, compact, verify, measure, and write a report.

    RECIPE is a file, or the name of a recipe that comes with the package (prunekit list recipes).

    KEY=VALUE changes the recipe, for example: prune.budget.macs=0.4. --model replaces the recipe's model, --data its
    images; model.weights and the other data settings still apply, unless --data returns Splits.

    A run that was killed continues with --resume, and on the CPU ends with the same weights, bit by bit.

    Exits with 1 when the run fell short of what the recipe asks.
    """
    run_recipe(training=True, **arguments)


def run_recipe(
    *,
    training: bool,
    recipe: str,
    overrides: tuple[str, ...],
    max_drop: float | None,
    dry_run: bool,
    no_measure: bool,
    full: bool,
    factory: str | None,
    data: str | None,
    task: str | None,
    optimizer: str | None,
    allow_code: bool,
    as_json: bool,
    resume: str | None,
    **options: Any,
) -> None:
    """Run a recipe, with fine-tuning or without, or only show its plan."""
    if dry_run and resume is not None:
        raise click.UsageError("--dry-run runs nothing that could be resumed: expected one of --dry-run and --resume")
    if no_measure and not dry_run:
        raise click.UsageError("--no-measure goes with --dry-run: a run measures what it delivers")
    if full and not dry_run:
        raise click.UsageError("--full goes with --dry-run: the recipe that a run keeps has all keys")
    console = Console(as_json)
    if max_drop is not None:
        if any(override.startswith("prune.budget") for override in overrides):
            raise click.UsageError("--max-drop takes the place of budgets: expected it without prune.budget, got both")
        overrides = (*overrides, f"prune.budget={{max_drop: {max_drop}}}")
    job = load_job(recipe, overrides, factory=factory, data=data, task=task, allow_code=allow_code, **options)
    require_job(job, model=factory, data=data, optimizer=optimizer)
    require_packages(job, dry=dry_run, training=training)
    if resume not in (None, AUTO):
        require_run(Path(resume))
    from prunekit.jobs.run.command_subject import Own

    own = Own(factory, data, optimizer)
    if dry_run:
        _dry_run(job, own, console, measure=not no_measure, full=full)
    elif _run(job, own, console, resume, training=training):
        click.get_current_context().exit(1)


def _dry_run(job: JobSettings, own: Own, console: Console, *, measure: bool, full: bool) -> None:
    from prunekit.jobs.dry_run import dry_run
    from prunekit.settings.job import dump

    with console.running():
        given = {} if measure else {"measure": False}
        plan = dry_run(job, log=console.log, own=own, **given)
    shown = dump(job) if full else f"{dump(job, defaults=False)}# All other keys have their defaults: --full\n"
    console.result({"recipe": plain(job), "plan": plan}, f"{shown}\n{_plan(plan)}")


def _plan(plan: dict[str, Any]) -> str:
    from prunekit.report.headline import budgeted

    before, after = plan["macs_before"], plan["macs_after"]
    rows = [
        (
            row["module"],
            row["kind"],
            *(f"{count(row[f'{key}_before'])} -> {count(row[f'{key}_after'])}" for key in SIZES),
        )
        for row in plan["widths"]
        if row["macs_before"]
    ]
    return "\n".join(
        [
            f"Plan: MACs {count(before)} -> {count(after)} ({change(before, after)}), "
            f"{plan['channels_removed']:,} channels removed; {plan['groups']} channel groups, {plan['locks']} locks, "
            f"round_to {plan['round_to']}",
            *([f"Blocks gone: {', '.join(plan['blocks'])}"] if plan.get("blocks") else []),
            *(f"Budget {text}" for text in budgeted(plan)),
            *([f"Time, predicted: {plan['time']}"] if plan.get("time") else []),
            *(_schedule(plan["schedule"]) if plan["schedule"] else ()),
            table(("layer", "kind", "in", "out", "MACs", "parameters"), rows, text=("kind",)),
        ]
    )


def _schedule(schedule: dict[str, Any]) -> Iterator[str]:
    resources = [name for name in schedule["stages"][0] if name not in ("step", "epoch")]
    rows = [
        (str(row["step"]), f"{row['epoch']:.2f}", *(share(row[name]) for name in resources))
        for row in schedule["stages"]
    ]
    yield f"Schedule {schedule['kind']}, {schedule['steps_per_epoch']} steps an epoch: what is left of the dense model"
    yield table(("after step", "epoch", *map(resource, resources)), rows)


def _run(job: JobSettings, own: Own, console: Console, resume: str | None, *, training: bool) -> list[str]:
    """Run the job and return its shortfalls, which are in its log as well."""
    check_folder(job.output)
    from prunekit.jobs.finetune import finetune, prune_job

    with console.running():
        run = finetune if training else prune_job
        result = run(job, log=console.log, progress=console.progress, own=own, resume=resume)
    from prunekit.report.headline import comparison
    from prunekit.report.pages.run_page import lines

    compared = comparison(result.metrics)
    text = [table(compared.headings, compared.rows), *lines(result.metrics, result.folder)]
    console.result({"folder": str(result.folder), **result.metrics}, "\n".join(text))
    return result.shortfalls


@register_command("prune", about="Prune, repair, compact, verify and measure: no training.", place=3, together=True)
@job_options
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Of a folder of weights: the new folder.")
@click.option(
    "--windows",
    callback=sizes,
    metavar="32x128",
    help="Of a folder of weights: how many windows of the text, of how many tokens.  [default: 32x128]",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Of a folder of weights: text, .txt or .jsonl.",
)
@click.option("--params", type=float, help="Of a folder of weights: the share of its parameters that may be left.")
def prune_command(
    params: float | None, text: Path | None, windows: tuple[int, ...] | None, out: Path | None, **arguments: Any
) -> None:
    """Run the job of a recipe without fine-tuning.

    Load the dense model (or train it if it has no weights), collect the statistics that the criterion needs, prune,
    repair the remaining layers as `repair` says, compact, verify, measure, and write a report.

    RECIPE is a file, or the name of a recipe that comes with the package (prunekit list recipes). Or it is the folder
    of a decoder as transformers writes it, with its tokenizer: it is pruned block by block, and never whole in memory,
    with --params 0.8 --text FILE --out DIR.

    KEY=VALUE changes the recipe, for example: prune.budget.macs=0.4. --model replaces the recipe's model, --data its
    images; model.weights and the other data settings still apply, unless --data returns Splits.

    Exits with 1 when the run fell short of what the recipe asks.
    """
    folder = Path(arguments["recipe"])
    given = {"--params": params, "--text": text, "--windows": windows, "--out": out}
    if not (folder / CONFIG).is_file():
        if named := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(named)}: for a folder with a {CONFIG} and weights, and {folder} is none")
        run_recipe(training=False, **arguments)
        return
    others = {name: value for name, value in arguments.items() if name not in ("recipe", "as_json")}
    if idle := [name.replace("_", "-") for name, value in others.items() if value not in (None, False, ())]:
        raise UsageError(f"{folder}: a folder of weights is pruned without {', '.join(idle)}, which is of recipes")
    if params is None or text is None or out is None:
        raise UsageError(f"{folder}: expected --params 0.8 --text FILE --out DIR with a folder of weights")
    _prune_folder(folder, params, text, windows or (32, 128), out, Console(arguments["as_json"]))


def _prune_folder(
    folder: Path, params: float, text: Path, windows: tuple[int, ...], out: Path, console: Console
) -> None:
    """Prune a decoder in a folder on windows from the beginning of a text."""
    from prunekit.data.texts import FILE, open_tokenizer, read_texts
    from prunekit.pruning.blocks.prune_folder import prune_folder

    if not (folder / FILE).is_file():
        raise UsageError(f"{folder}: expected its {FILE} beside the weights, found none")
    with console.running():
        count = prod(windows)
        ids = open_tokenizer(folder).stream(read_texts(text, lines=False), count)
        if len(windows) != 2 or len(ids) < count:
            asked = "x".join(map(str, windows))
            raise UsageError(
                f"--windows {asked}: expected a number of windows and of the tokens of each, such as 32x128; {text} "
                f"has {len(ids):,} tokens"
            )
        tokens = ids[:count].reshape(windows).tolist()
        found = prune_folder(folder, tokens, params=params, out=out, progress=console.progress)
    console.show(
        found,
        {"folder": str(out), "config": found.config, "parameters": found.parameters, "blocks": found.rows()},
        "prune",
        None,
    )

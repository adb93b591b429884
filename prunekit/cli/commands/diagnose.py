"""`prunekit diagnose` and `prunekit explain`: faults of a model and its data, and why a pruned model is not faster."""

from dataclasses import replace
from pathlib import Path

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, check_recipes, model_and_data, model_command, one_target
from prunekit.cli.options import is_recipe, split_overrides
from prunekit.cli.output import Console, plain
from prunekit.errors import UsageError

SHOWN = 15
"""Operators of an explanation that are shown."""


@register_command("diagnose", about="Find what is wrong with a model and its data.", place=12)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--recipe", "data_recipe", metavar="RECIPE", help="Whose data and training to use.")
@click.option("--batches", "count", default=3, show_default=True, type=click.IntRange(min=1), help="Training batches.")
@click.option("--ignore", multiple=True, metavar="KIND", help="A kind that is not searched for; may be repeated.")
@model_command("diagnose.json.")
def diagnose_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    data_recipe: str | None,
    count: int,
    ignore: tuple[str, ...],
    device: str | None,
    output: Path | None,
) -> None:
    """Run a model forward and backward on a few training batches and name what is wrong, the causes first.

    Detected, by module and in order of execution, are: shape mismatches with the way of the tensor, NaN and Inf where
    they begin, exploding and vanishing gradients, dead ReLUs, saturated sigmoids, constant channels, BatchNorm in the
    wrong mode or without variance, unused and frozen parameters; copies among the samples, labels out of range, inputs
    unlike normalized ones; and a learning rate too high for the curvature of the loss. For every task: gradients are
    those of its loss.

    MODEL is a recipe (its dense model as training would begin: with the weights it names, else random ones), a model
    folder, or the name of a torchvision or CIFAR model; instead of it, or of a recipe's model, --model gives your own.
    KEY=VALUE changes the recipe.

    The exit code is 0 when nothing is found, 1 when something is, 2 for wrong usage.
    """
    targets, overrides, job = model_and_data(arguments, data_recipe, given, images=False, device=device)
    from prunekit.jobs.analyses.diagnose import diagnose_target
    from prunekit.jobs.run.command_subject import Own
    from prunekit.jobs.run.job_subject import first_training
    from prunekit.settings.inputs import DataSettings
    from prunekit.utils.context import resolve_device

    images = job.known_data if job else DataSettings(source="own") if given.data else None
    training = None
    if job is not None:
        training = first_training(job) if any(map(is_recipe, targets)) else job.finetune
    with console.running():
        target = one_target(targets, overrides, given, needs_module="diagnose")
        found = diagnose_target(
            target,
            images,
            training,
            device=resolve_device(device or (job.device if job else "auto")),
            count=count,
            ignore=ignore,
            own=Own(data=given.data),
            seed=job.seed if job else given.seed or 0,
            task=job.task if job else given.task,
        )
    console.show(found, {"model": target.name, **found.as_dict()}, "diagnose", output, before=f"{target.name}: ")
    if not found.healthy:
        click.get_current_context().exit(1)


@register_command("explain", about="Show why a pruned model is not faster.", place=10)
@click.argument("arguments", nargs=-1, metavar="PRUNED [KEY=VALUE]...")
@click.option("--dense", metavar="MODEL", help="What it is compared with.  [default: what PRUNED was made from]")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Samples in a forward pass.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="CPU threads.")
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(min=5), help="Timed runs of each.")
@model_command("explain.json and explain.html.")
def explain_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    dense: str | None,
    batch: int,
    threads: int,
    repeats: int,
    device: str | None,
    output: Path | None,
) -> None:
    """Show the time of each operator, dense against pruned, and the measured causes of what is missing from the ideal.

    PRUNED is a model folder; its dense model is built from what the folder says, or by --model if it is of your own
    code, or is --dense: a recipe, a folder, or the name of a model. With --dense, PRUNED may be any of these too.
    The ideal is the ratio of their multiply-accumulates. Eager, without gradients.
    """
    names, overrides = split_overrides(arguments)
    check_recipes([*names, dense], overrides, given)
    if not names:
        raise UsageError("expected a pruned model: prunekit explain FOLDER, or MODEL with --dense MODEL")
    from prunekit.jobs.analyses.explain import explain
    from prunekit.jobs.run.model_pair import build_dense
    from prunekit.report.sections.explanation import write_explanation

    with console.running():
        target = one_target(names, overrides, given, needs_module="time one by one")
        if dense is not None:
            against = one_target([dense], overrides, replace(given, weights=None), needs_module="time").model
        elif Path(names[0]).is_dir():
            against = build_dense(Path(names[0]), given.factory)
        else:
            raise UsageError(
                f"{names[0]}: expected a model folder, which says what it was pruned from, or --dense MODEL"
            )
        example = target.timing_inputs.sample(batch)  # random where it can be: on zeros, activations would be zeros too
        found = explain(
            against, target.model, example, threads=threads, device=device or "auto", rounds=repeats, log=console.log
        )
    payload = plain({"pruned": target.name, "dense": dense or "its dense model", **found.figures()})
    if output is not None:
        console.log(f"wrote {write_explanation(output, payload)}")
    console.show(found, payload, "explain", output, before=f"{target.name} ", most=SHOWN, all_in="explain.json")

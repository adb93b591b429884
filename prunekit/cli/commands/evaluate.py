"""`prunekit evaluate`: the accuracy of a model."""

from functools import partial
from pathlib import Path

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, model_and_data, model_command, model_or_trained
from prunekit.cli.options import is_recipe, model_and_images_options
from prunekit.cli.output import Console, check_folder
from prunekit.distributed.launcher import leads


@register_command("evaluate", about="Measure the accuracy of a model on test images.", place=6, together=True)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--recipe", "data_recipe", metavar="RECIPE", help="Whose test images to use.")
@model_command("evaluate.json.", options=model_and_images_options)
def evaluate_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    data_recipe: str | None,
    device: str | None,
    output: Path | None,
) -> None:
    """Measure top-1 accuracy with its 95 % Wilson interval, or the scores of the recipe's task, on its test split.

    MODEL is a recipe (its dense model, trained first where it has no weights, and tested on its own data), a model
    folder, an exported file (.onnx, .xml, .pt2), or the name of a torchvision or CIFAR model; instead of it, or of a
    recipe's model, --model gives your own. KEY=VALUE changes the recipe. A model folder inside a run folder is tested
    on the data of that run unless --recipe or --data says otherwise; anywhere else --data is enough, because the folder
    has its preprocessing and task.
    """
    targets, _, job = model_and_data(arguments, data_recipe, given, device=device)
    check_folder(job.output if job and any(map(is_recipe, targets)) else None)
    from prunekit.jobs.analyses.evaluate import evaluate as measure
    from prunekit.jobs.run.command_subject import Own
    from prunekit.jobs.run.job_subject import job_model
    from prunekit.utils.context import resolve_device

    images = job.known_data if job else None
    with console.running():
        target = model_or_trained(targets, job, given, console)
        where = resolve_device(device or (job.device if job else "auto"))
        own = Own(data=given.data)
        dense = None if job is None else partial(job_model, job, Own(given.factory))
        found = measure(target, images, where, own, job.task if job else given.task, dense)
    console.show(found, found.figures(), "evaluate", output if leads() else None)

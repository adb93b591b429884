"""`prunekit evaluate` and `prunekit predict`: the accuracy of a model, and what it says about images."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import (
    ModelOptions,
    job_to_read,
    model_and_data,
    model_command,
    model_or_trained,
    one_target,
    refuse_idle_overrides,
    trained,
)
from prunekit.cli.options import is_recipe, model_and_images_options
from prunekit.cli.output import Console, check_folder
from prunekit.distributed.launcher import leads
from prunekit.errors import UsageError
from prunekit.jobs.run.early_checks import require_images, require_trained


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


@register_command("predict", about="Show what a model says about images.", place=7)
@click.argument("model")
@click.argument("inputs", nargs=-1, metavar="IMAGE...", type=click.Path(path_type=Path))
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=1), help="Classes shown for each image.")
@click.option("--batch", default=32, show_default=True, type=click.IntRange(min=1), help="Images run at once.")
@model_command("predict.json, and outputs.safetensors with all scores or outputs.")
def predict_command(
    console: Console,
    given: ModelOptions,
    model: str,
    inputs: tuple[Path, ...],
    top: int,
    batch: int,
    device: str | None,
    output: Path | None,
) -> None:
    """Show the most probable classes of images, by the preprocessing that is in the model's folder or file.

    MODEL is a model folder, an exported file, a recipe (its dense model), or the name of a model with --weights; for a
    folder whose model is of your own code, --model builds the dense one. IMAGE is an image file or a folder of images;
    or a file of inputs that are ready, .npy, .npz or .safetensors, samples first, named as the model's inputs.
    Of tasks other than classification the output's values are shown; --output has them all.
    """
    if not inputs:
        raise UsageError(f"expected images: prunekit predict {model} photo.jpg, or a folder of images")
    refuse_idle_overrides([], [model], given.data)
    named = not is_recipe(model) and not Path(model).exists() and given.zoo is None
    require_trained(model, not named or given.weights is not None or given.factory is not None)
    require_images(inputs)
    from prunekit.jobs.analyses.predict import predict_target
    from prunekit.utils.context import resolve_device

    with console.running():
        recipe = is_recipe(model)
        target = trained(job_to_read(model, [], given), given, console) if recipe else one_target([model], [], given)
        if not recipe and given.task is not None and target.interface is not None:
            target = replace(target, interface=replace(target.interface, task=given.task))
        found = predict_target(target, list(inputs), top=top, batch=batch, device=resolve_device(device or "auto"))
    if output is not None:
        console.log(f"wrote {found.save(output / 'outputs.safetensors')}")
    console.show(found, found.figures(), "predict", output)

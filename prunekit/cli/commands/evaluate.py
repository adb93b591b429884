"""`prunekit evaluate` and `prunekit predict`: the accuracy of a model, and what it says about images."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    require_targets,
    trained,
)
from prunekit.cli.options import combined, is_recipe, model_and_images_options, split_overrides
from prunekit.cli.output import Console, check_folder
from prunekit.distributed.launcher import leads
from prunekit.errors import UsageError
from prunekit.jobs.run.early_checks import is_pruned, require_images, require_trained
from prunekit.utils.availability import missing_packages

if TYPE_CHECKING:
    from torch import nn

    from prunekit.settings.job import JobSettings

LANGUAGE = 'pip install "prunekit[language]"'
"""The command that installs lm-eval."""
_count = click.IntRange(min=1)
_folder = click.Path(exists=True, file_okay=False, path_type=Path)
task_options = combined(
    click.option("--download", is_flag=True, help="Let lm-eval fetch data sets that its tasks name."),
    click.option("--tokenizer", type=_folder, metavar="DIR", help="Its tokenizer, where the folder has none."),
    click.option("--batch", type=_count, help="Requests of tasks computed at once.  [default: 8]"),
    click.option("--limit", type=_count, help="Only the first samples of each task, to try it."),
    click.option("--few-shot", type=click.IntRange(min=0), help="Solved examples before each question."),
    click.option("--task-folder", type=_folder, metavar="DIR", help="Your own tasks in YAML; runs code they name."),
    click.option("--tasks", metavar="NAME,...", help="Tasks of lm-eval in place of test data, such as arc_easy."),
    click.option("--stride", type=_count, help="For text: the recipe's data.stride."),
    click.option("--window", type=_count, help="For text: the recipe's data.window, tokens of a sample."),
)
"""Adds what only language models are evaluated by."""


@register_command("evaluate", about="Measure the accuracy of a model on test images.", place=6, together=True)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--recipe", "data_recipe", metavar="RECIPE", help="Whose test images to use.")
@task_options
@model_command("evaluate.json.", options=model_and_images_options, checked=False)
def evaluate_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    data_recipe: str | None,
    device: str | None,
    output: Path | None,
    window: int | None,
    stride: int | None,
    tasks: str | None,
    **how: Any,
) -> None:
    """Measure top-1 accuracy with its 95 % Wilson interval, or the scores of the recipe's task, on its test split.

    MODEL is a recipe (its dense model, trained first where it has no weights, and tested on its own data), a model
    folder, an exported file (.onnx, .xml, .pt2), or the name of a torchvision or CIFAR model; instead of it, or of a
    recipe's model, --model gives your own. KEY=VALUE changes the recipe. A model folder inside a run folder is tested
    on the data of that run unless --recipe or --data says otherwise; anywhere else --data is enough, because the folder
    has its preprocessing and task.

    With --tasks a language model is scored at tasks of lm-eval, beside the dense model if the run has kept it. MODEL is
    then a run, a model folder, or a folder that transformers reads.
    """
    if tasks is not None:
        if window or stride or data_recipe:
            raise UsageError(
                "--window, --stride and --recipe are of texts, and --tasks bring their own: leave them out"
            )
        _evaluate_tasks(console, given, arguments, tasks, device, output, **how)
        return
    if idle := next((name for name, value in how.items() if value not in (None, False)), None):
        raise UsageError(f"--{idle.replace('_', '-')} goes with --tasks, and they were not given")
    arguments += tuple(f"data.{key}={value}" for key, value in (("window", window), ("stride", stride)) if value)
    require_targets(split_overrides(arguments)[0], given)
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


def _evaluate_tasks(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    tasks: str,
    device: str | None,
    output: Path | None,
    **how: Any,
) -> None:
    """Score the language model of a folder at tasks of lm-eval."""
    if missing := missing_packages(["lm_eval"], LANGUAGE):
        raise UsageError(f"--tasks {missing}")
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if len(arguments) != 1 or not Path(arguments[0]).is_dir() or not names:
        got = " ".join(arguments) or "none"
        raise UsageError(f"expected one folder of a run or of a model, and names of tasks, got {got} and {tasks!r}")
    folder = Path(arguments[0])
    if not how.pop("download"):
        os.environ["HF_HUB_OFFLINE"] = "1"  # before Hugging Face's libraries are imported, which read it then
    from prunekit.jobs.analyses.language_tasks import Asked, evaluate_tasks, folder_tokenizer, plain_model
    from prunekit.utils.context import resolve_device

    own, where = how.pop("tokenizer"), resolve_device(device or "auto")
    asked = Asked(names, how.pop("task_folder"), **{key: value for key, value in how.items() if value is not None})
    with console.running():
        plain = None if is_pruned(folder) else plain_model(folder, allow_code=given.allow_code)
        models, notes, job = _models_of_run(folder, given) if plain is None else ({"model": plain}, (), None)
        known = None if job is None else job.known_data.tokenizer
        tokenizer = folder_tokenizer([folder, folder / "model", known] if own is None else [own])
        found = evaluate_tasks(models, str(folder), tokenizer, asked, where, notes, job)
    console.show(found, found.figures(), "evaluate", output)


def _models_of_run(
    folder: Path, given: ModelOptions
) -> tuple[dict[str, nn.Module], tuple[str, ...], JobSettings | None]:
    """Return the models of the folder of a run or of a model, notes on them, and the job of the run if it has one."""
    if given.weights or given.input_shape or given.zoo:
        raise UsageError(f"{folder}: a folder says what its models are; leave out --weights, --input-shape and --zoo")
    from prunekit.jobs.run.dense_model import load_dense, model_folder
    from prunekit.jobs.run.subject_sources import resolve

    place = model_folder(folder)
    recipe = place.resolve().parent / "recipe.yaml"
    job = job_to_read(str(recipe), [], given, whole=False, seed=None) if recipe.is_file() else None
    pruned, dense = resolve(place, factory=given.factory).model, load_dense(place, given.factory)
    if dense is None:
        note = f"{place}: the pruned model alone, because no run beside it has kept the dense weights"
        return {"pruned": pruned}, (note,), job
    return {"dense": dense, "pruned": pruned}, (), job


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

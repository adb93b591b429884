"""Options that commands share, and the job of a recipe that they change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click

from prunekit.cli.output import Console, check_folder
from prunekit.errors import UsageError
from prunekit.jobs.run.early_checks import require_job
from prunekit.utils.availability import DEVICES, UNKNOWN_DEVICE, has_device

if TYPE_CHECKING:
    from prunekit.settings.job import JobSettings

Zoo = Literal["torchvision", "cifar", "timm", "hf"]
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[^=/]+)*=")


def _set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().meta["prunekit.debug"] = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set_debug, help="Show tracebacks of errors."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout; everything else goes to stderr."
)


def checked_device(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return devices, with commas between, if each is of a known kind, and this machine has any of that kind."""
    for name in [] if value is None else value.split(","):
        kind = name.strip().partition(":")[0]
        if kind not in DEVICES:
            raise UsageError(f"--device: {UNKNOWN_DEVICE}, got {name!r}")
        if not has_device(kind):
            raise UsageError(f"device {name!r} was asked for, but this machine has none; use --device cpu")
    return value


device_option = click.option(
    "--device", metavar="auto|cpu|cuda[:n]", callback=checked_device, help="Where to run.  [default: auto]"
)
networks_option = click.option(
    "--networks",
    type=click.IntRange(min=10),
    help="How many to measure.  [default: 40; 16 for another machine]",
)
seed_option = click.option("--seed", type=click.IntRange(min=0), help="Seed of everything that is random.")

own_model_option = click.option(
    "--model",
    "factory",
    metavar="FILE.py:FACTORY",
    help="Your own model, or (model, example); runs the file's code. python:MODULE:FACTORY takes it from an installed "
    "module.",
)
data_option = click.option(
    "--data",
    metavar="FILE.py:FACTORY",
    help="Your own images in place of a recipe's; runs the file's code. python:MODULE:FACTORY likewise.",
)
images_option = click.option(
    "--data",
    metavar="PATH|FILE.py:FACTORY",
    help="Your own images: a folder with one of images for each class, an .npz, or your own code, which is run; "
    "python:MODULE:FACTORY likewise.",
)
optimizer_option = click.option(
    "--optimizer",
    metavar="FILE.py:FACTORY",
    help="Your own optimizer, where the recipe says optimizer: own; FACTORY() returns its class.",
)

task_option = click.option(
    "--task",
    metavar="NAME|FILE.py:OBJECT",
    help="The task, as in a recipe; OBJECT is your own prunekit.tasks.task.Task, or a function that returns one.",
)

allow_code_option = click.option(
    "--allow-code",
    is_flag=True,
    help="Run code that a recipe's file names, as in criterion: mine.py:score, and that an exported file may hold; "
    "code that KEY=VALUE names always runs.",
)


def combined(*options: Callable[..., Any]) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds several options and arguments; help shows the last one first."""

    def decorate(function: Decorated) -> Decorated:
        for option in options:
            function = option(function)
        return function

    return decorate


def output_option(what: str) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds `--output DIR`, the folder for `what`."""
    kind = click.Path(file_okay=False, path_type=Path)
    return click.option("--output", type=kind, metavar="DIR", help=f"Folder for {what}")


def sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Return numbers above 0 with x or commas between."""
    if value is None:
        return None
    if not re.fullmatch(r"[1-9]\d*([x,][1-9]\d*)+", value):
        raise click.BadParameter(f"expected sizes such as {parameter.metavar}, got {value!r}")
    return tuple(map(int, re.split("[x,]", value)))


input_shape_option = click.option(
    "--input-shape", callback=sizes, metavar="1x3x224x224", help="Shape of one input, batch first."
)


zoo_option = click.option(
    "--zoo", type=click.Choice(get_args(Zoo)), help="The zoo of the model.  [default: torchvision, else cifar]"
)


_weights_option = click.option("--weights", metavar="FILE|NAME", help="State dict, or a torchvision weights name.")
_of_model = combined(zoo_option, input_shape_option, _weights_option, own_model_option)
model_options = combined(allow_code_option, task_option, data_option, _of_model)
"""Adds the options that name a model: `--model`, `--weights`, `--input-shape`, `--zoo`, `--data`, `--task`, ..."""
model_and_images_options = combined(allow_code_option, task_option, images_option, _of_model)
"""The same for a command that also takes a folder or an archive of images as `--data`."""
common_options = combined(debug_option, json_option)
"""Adds `--json` and `--debug`, which every command has."""


def recipe_options(*, device: bool = True) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds RECIPE, KEY=VALUE and the options of a command that runs a recipe."""
    return combined(
        common_options,
        output_option("runs.  [default: runs]"),
        seed_option,
        *([device_option] if device else []),
        *(allow_code_option, optimizer_option, task_option, data_option, own_model_option),  # the user's own code
        click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]..."),
        click.argument("recipe", metavar="RECIPE"),
    )


def recipe_command(*, device: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a function a command that runs a recipe.

    The function takes a console, the job, the user's own code, and its other options.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @recipe_options(device=device)
        @wraps(function)
        def run(
            recipe: str,
            overrides: tuple[str, ...],
            factory: str | None,
            data: str | None,
            optimizer: str | None,
            allow_code: bool,
            as_json: bool,
            **options: Any,
        ) -> None:
            console = Console(as_json)
            given = {key: options.pop(key) for key in ("task", "device", "seed", "output") if key in options}
            job = load_job(recipe, overrides, factory=factory, data=data, allow_code=allow_code, **given)
            check_folder(job.output)
            require_job(job, model=factory, data=data, optimizer=optimizer)
            from prunekit.jobs.run.command_subject import Own

            function(console, job, Own(factory, data, optimizer), **options)

        return run

    return decorate


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into others and `key=value` overrides; a path that exists is never an override."""
    overrides = [text for text in arguments if OVERRIDE.match(text) and not Path(text).exists()]
    return [text for text in arguments if text not in overrides], overrides


def is_recipe(target: str) -> bool:
    """Return whether a command line names the file of a recipe."""
    return target.endswith((".yaml", ".yml"))


def load_job(
    recipe: str,
    overrides: Sequence[str],
    *,
    factory: str | None = None,
    data: str | None = None,
    allow_code: bool = False,
    runs_code: bool = True,
    **options: Any,
) -> JobSettings:
    """Return the job of a recipe; options of the command line are overrides that come last.

    `allow_code` and `runs_code` are those of `prunekit.recipe.loading.load`.
    """
    from prunekit.recipe.loading import load, own_overrides

    given = [f"{key}={_yaml(value)}" for key, value in options.items() if value is not None]
    given += own_overrides(model=factory, data=data)
    return load(recipe, [*overrides, *given], allow_code=allow_code, runs_code=runs_code)


def _yaml(value: Any) -> str:
    """Return a value as YAML, with quotes only around text that needs them, because messages show it."""
    text = str(value)
    plain = not isinstance(value, str | Path) or re.fullmatch(r"[A-Za-z_./][\w./:-]*", text)
    return text if plain and text.lower() not in ("null", "true", "false") else json.dumps(text)

"""What the subcommands of `prunekit visualize` look at: models by name or folder, and an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from prunekit.cli.models import ModelOptions, check_recipes, job_to_read, one_target, refuse_idle_overrides
from prunekit.cli.options import is_recipe, split_overrides
from prunekit.cli.output import Console, check_folder
from prunekit.errors import UsageError

if TYPE_CHECKING:
    from prunekit.workflow.sides import Sides

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def image_options(function: Decorated) -> Decorated:
    """`--image` and `--index`: what the models are shown."""
    function = click.option(
        "--index", default=0, show_default=True, type=click.IntRange(min=0), help="Which test image, without --image."
    )(function)
    return click.option(
        "--image", type=click.Path(path_type=Path), metavar="FILE", help="An image.  [default: a test image]"
    )(function)


def groups_option(function: Decorated) -> Decorated:
    """`--groups`: layers by the channels that they make."""
    return click.option(
        "--groups",
        multiple=True,
        metavar="GLOB",
        help="Channel groups, whose layers are looked at too; several times. `prunekit inspect` shows the names.",
    )(function)


def find_sides(arguments: Sequence[str], options: ModelOptions, console: Console) -> Sides:
    """The models that a command line names: a pruned one beside its dense one where a folder is named.

    Raises:
        UsageError: it names none, or several.
    """
    names, overrides = split_overrides(arguments)
    if any(map(is_recipe, names)):
        check_recipes(names, overrides, options)
    from prunekit.workflow import sides

    folder = Path(names[0]) if len(names) == 1 else None
    if folder is None or not sides.is_pruned(folder):
        refuse_idle_overrides(overrides, names, options.data)
        return _single(names, overrides, options, console)
    if options.weights or options.input_shape or options.zoo:
        raise UsageError(f"{folder}: a folder says what its models are; leave out --weights, --input-shape and --zoo")
    recipe = sides.recipe_beside(folder)
    refuse_idle_overrides(overrides, [None if recipe is None else str(recipe)])
    job = None if recipe is None else job_to_read(str(recipe), overrides, options, data=options.data)
    data = None if job is None else job.data
    found = replace(sides.both_sides(folder, data, factory=options.factory, own_data=options.data), job=job)
    for note in found.notes:
        console.log(note)
    return found


def pictures_folder(sides: Sides, output: Path | None, name: str) -> Path:
    """Where pictures go: the folder asked for, or one of this name, for a run in its own folder.

    Raises:
        UsageError: it cannot be written to.
    """
    folder = output or (sides.run / name if sides.run else Path(name))
    check_folder(folder)
    return folder


def report_of(sides: Sides, folder: Path, name: str) -> list[Path]:
    """Writes the report of a run again where pictures that it shows have come into its folder; the page, if so."""
    from prunekit.report.page import write_report

    return [write_report(sides.run)] if sides.run is not None and folder == sides.run / name else []


def _single(names: Sequence[str], overrides: Sequence[str], options: ModelOptions, console: Console) -> Sides:
    from prunekit.workflow import Own
    from prunekit.workflow.sides import sides_of
    from prunekit.workflow.targets import trained_target

    if len(names) != 1 or not is_recipe(names[0]):
        found = sides_of(one_target(names, overrides, options))
    else:
        code = {"factory": options.factory, "data": options.data}
        job = job_to_read(names[0], overrides, options, **code, seed=options.seed)
        own = Own(options.factory, options.data)
        target = trained_target(job, log=console.log, progress=console.progress, own=own)
        found = replace(sides_of(target, job.data, options.data), job=job)
    for note in found.notes:
        console.log(note)
    return found

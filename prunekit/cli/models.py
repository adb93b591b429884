"""The models of a command: options that name them, and what they name: recipes, folders, zoo models, own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunekit.cli import options as shared
from prunekit.cli.output import Console, check_folder
from prunekit.data.roots import is_labeled_images
from prunekit.errors import ModelError, UsageError
from prunekit.jobs.run.early_checks import require_target
from prunekit.utils.user_code import require_object

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Subject
    from prunekit.settings.inputs import ModelSettings
    from prunekit.settings.job import JobSettings


@dataclass
class ModelOptions:
    """Values of `--model`, `--weights`, `--input-shape`, `--seed`, `--data`, `--zoo`, `--task` and `--allow-code`."""

    factory: str | None = None
    weights: str | None = None
    input_shape: tuple[int, ...] | None = None
    seed: int | None = None
    data: str | None = None
    zoo: shared.Zoo | None = None
    task: str | None = None
    allow_code: bool = False

    @property
    def labeled_images(self) -> bool:
        """Whether `--data` is a folder or an archive, and not code."""
        return self.data is not None and is_labeled_images(self.data)


def model_command(
    output: str,
    *,
    device: bool = True,
    options: Callable[..., Any] = shared.model_options,
    checked: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function a command on models.

    The function takes a console, `ModelOptions`, and its other arguments; unless `checked`, it calls `require_targets`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(as_json: bool, **given: Any) -> None:
            console = Console(as_json)
            check_folder(given["output"])
            named = {one.name: given.pop(one.name) for one in fields(ModelOptions) if one.name in given}
            models = ModelOptions(**named)
            words = [*shared.split_overrides(given.get("arguments", ()))[0], given.get("model"), given.get("dense")]
            if checked:
                require_targets([word for word in words if word is not None], models)
            function(console, models, **given)

        command: Callable[..., Any] = shared.seed_option(shared.output_option(output)(shared.common_options(run)))
        complete: Callable[..., Any] = options(shared.device_option(command) if device else command)
        return complete

    return decorate


def one_target(
    names: Sequence[str], overrides: Sequence[str], options: ModelOptions, *, needs_module: str = ""
) -> Subject:
    """Return the one model that a command line names; raise UsageError if it names several.

    With a recipe, `--model` replaces its model; with a model folder it builds the dense model.
    """
    if len(names) > 1:
        raise UsageError(f"expected one model, got {len(names)}: {', '.join(names)}")
    if names and options.factory and not shared.is_recipe(names[0]) and not Path(names[0]).is_dir():
        raise UsageError(f"expected one model, got two: {names[0]} and --model {options.factory}")
    found = _resolve(names[0] if names else None, overrides, options)
    if needs_module:
        found.require_module(needs_module)
    return found


def all_targets(names: Sequence[str], overrides: Sequence[str], options: ModelOptions) -> list[Subject]:
    """Return the models that a command line names.

    The user's own comes first, because the others are compared with it, unless it replaces that of a recipe.
    """
    alone = not names or (options.factory is not None and not any(map(shared.is_recipe, names)))
    others = [_resolve(name, overrides, replace(options, weights=None) if alone else options) for name in names]
    if not alone:
        return others
    return [_resolve(None, overrides, replace(options, zoo=None) if names else options, beside=others), *others]


def require_targets(names: Iterable[str], options: ModelOptions) -> None:
    """Raise if a word names no model that is there, or `--model` no code, before slow imports."""
    for name in names:
        if not shared.is_recipe(name):
            require_target(name, options.zoo)
    # Beside a zoo's name the user's own is one model too many.
    if options.factory is not None and all(shared.is_recipe(name) or Path(name).is_dir() for name in names):
        require_object(options.factory, ModelError)


def _resolve(
    name: str | None, overrides: Sequence[str], options: ModelOptions, *, beside: Sequence[Subject] = ()
) -> Subject:
    recipe = name is not None and shared.is_recipe(name)
    job = _job(str(name), overrides, options) if recipe else None
    from prunekit.jobs.run.subject_sources import resolve

    return resolve(
        job or _named(name, options.zoo),
        factory=options.factory,
        weights=options.weights,
        input_shape=options.input_shape,
        seed=options.seed or 0,
        data=options.data if recipe else None,
        beside=beside,
        allow_code=options.allow_code,
    )


def _job(recipe: str, overrides: Sequence[str], options: ModelOptions) -> JobSettings:
    if options.zoo is not None:
        raise UsageError(f"--zoo goes with the name of a model, and {recipe} is a recipe: set model.zoo={options.zoo}")
    return job_to_read(recipe, overrides, options)


def job_to_read(
    recipe: str, overrides: Sequence[str], options: ModelOptions, *, whole: bool = True, **given: Any
) -> JobSettings:
    """Return the job of a recipe for a command that runs only parts of it, without the recipe's model unless `whole`.

    Code that is not allowed is an error only if it is about to run.
    """
    given = {"factory": options.factory if whole else None, "data": options.data, "task": options.task, **given}
    given.setdefault("seed", options.seed)
    return shared.load_job(recipe, overrides, **given, allow_code=options.allow_code, runs_code=False)


def check_recipes(names: Iterable[str | None], overrides: Sequence[str], options: ModelOptions) -> None:
    """Check the recipes that a command line names, before slow imports."""
    recipes = [name for name in names if name is not None and shared.is_recipe(name)]
    refuse_idle_overrides(overrides, recipes, options.data)
    for recipe in recipes:
        _job(recipe, overrides, options)


def _named(name: str | None, zoo: shared.Zoo | None) -> str | ModelSettings | None:
    if zoo is None:
        return name
    if name is None or Path(name).exists():
        raise UsageError(f"--zoo {zoo} goes with the name of a model, got {name or 'none'}")
    from prunekit.settings.inputs import ModelSettings

    return ModelSettings(name, zoo)


def refuse_idle_overrides(overrides: Sequence[str], recipes: Iterable[str | None], data: str | None = None) -> None:
    """Raise UsageError if there are overrides, or `--data`, and no recipe that they change."""
    changes = [repr(overrides[0])] if overrides else [f"--data {data}"] if data else []
    if changes and not any(recipe is not None and shared.is_recipe(recipe) for recipe in recipes):
        raise UsageError(f"{changes[0]} changes a recipe, and no recipe was given")


def model_or_trained(
    targets: Sequence[str], job: JobSettings | None, options: ModelOptions, console: Console
) -> Subject:
    """Return the model that a command line names; that of a recipe is trained first where it has no weights."""
    if job is None or not any(map(shared.is_recipe, targets)):
        return one_target(targets, [], options)
    if len(targets) > 1 or options.weights:
        raise UsageError(f"{targets[0]}: a recipe names one model with its weights; leave out what else names one")
    return trained(job, options, console)


def trained(job: JobSettings, options: ModelOptions, console: Console) -> Subject:
    """Return a job's dense model, trained first where it has no weights."""
    from prunekit.jobs.run.baseline_cache import trained_subject
    from prunekit.jobs.run.command_subject import Own

    own = Own(options.factory, options.data)
    return trained_subject(job, log=console.log, progress=console.progress, own=own)


def model_and_data(
    arguments: Sequence[str], recipe: str | None, options: ModelOptions, *, images: bool = True, **given: Any
) -> tuple[list[str], list[str], JobSettings | None]:
    """Return the model and the overrides that a command line names, and the job whose data the command uses, if any.

    The overrides are those of the job's recipe; the job has the model if that is the recipe. With `images`, `--data`
    may be a folder or an archive of images instead of a recipe.
    """
    targets, overrides = shared.split_overrides(arguments)
    if images:
        refuse_two_sources(targets, recipe, options)
    recipe = None if images and options.labeled_images else recipe_of_data(targets, recipe)
    refuse_idle_overrides(overrides, [recipe])
    whole = any(map(shared.is_recipe, targets))
    job = None if recipe is None else job_to_read(recipe, overrides, options, whole=whole, **given)
    return targets, overrides if whole else [], job


def refuse_two_sources(targets: Sequence[str], recipe: str | None, options: ModelOptions) -> None:
    """Raise UsageError if `--data` is a folder or an archive of images, and a recipe is given, which has its own."""
    named = recipe or next((target for target in targets if shared.is_recipe(target)), None)
    if options.labeled_images and named is not None:
        kind = "imagefolder" if Path(str(options.data)).is_dir() else "npz"
        raise UsageError(
            f"--data {options.data} goes with a model that says how it is fed, and {named} is a recipe, which says it "
            f"itself: data.source={kind} data.root={options.data}"
        )


def recipe_of_data(targets: Sequence[str], given: str | None) -> str | None:
    """Return the recipe whose images a command uses; None if there is none.

    It is the recipe that is named as the model, `--recipe`, or that of the run in whose folder the model is; an
    exported file may be in a folder of its own there.
    """
    own = next((target for target in targets if shared.is_recipe(target)), None)
    if own is not None and given is not None:
        raise UsageError(f"--recipe goes with a model folder, a zoo's name or --model; {own} has images of its own")
    if own or given or not targets:
        return own or given
    place = Path(targets[0]).resolve()
    folders = [place.parent] if place.is_dir() else []
    if place.is_file():
        folders = [folder for folder in list(place.parents)[:2] if (folder / "status.json").is_file()]
    return next((str(folder / "recipe.yaml") for folder in folders if (folder / "recipe.yaml").is_file()), None)

"""From what a command line names to models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prunekit.cli.options import is_recipe, load_job
from prunekit.errors import UsageError

if TYPE_CHECKING:
    from prunekit.workflow.targets import Target


@dataclass(frozen=True)
class ModelOptions:
    """`--model`, `--weights`, `--input-shape` and `--seed`."""

    factory: str | None = None
    weights: str | None = None
    input_shape: tuple[int, ...] | None = None
    seed: int | None = None


def one_target(names: Sequence[str], overrides: Sequence[str], options: ModelOptions) -> Target:
    """The one model that a command line names; with a model folder, `--model` says how its dense model is built.

    Raises:
        UsageError: it names several.
    """
    if len(names) > 1:
        raise UsageError(f"expected one model, got {len(names)}: {', '.join(names)}")
    if names and options.factory and not Path(names[0]).is_dir():
        raise UsageError(f"expected one model, got two: {names[0]} and --model {options.factory}")
    return _resolve(names[0] if names else None, overrides, options)


def all_targets(names: Sequence[str], overrides: Sequence[str], options: ModelOptions) -> list[Target]:
    """The models that a command line names: the user's own first, because it is what others are compared with.

    Raises:
        UsageError: it has overrides and no recipe.
    """
    own = [_resolve(None, overrides, options)] if options.factory or not names else []
    others = replace(options, weights=None) if options.factory else options
    return own + [_resolve(name, overrides, others) for name in names]


def _resolve(name: str | None, overrides: Sequence[str], options: ModelOptions) -> Target:
    from prunekit.workflow.targets import resolve

    recipe = name is not None and is_recipe(name)
    job = load_job(str(name), overrides, seed=options.seed) if recipe else None
    return resolve(
        job or name,
        factory=options.factory,
        weights=options.weights,
        input_shape=options.input_shape,
        seed=options.seed or 0,
    )


def refuse_idle_overrides(overrides: Sequence[str], recipes: Iterable[str | None]) -> None:
    """Checks that there is a recipe for the overrides to change.

    Raises:
        UsageError: there is none.
    """
    if overrides and not any(recipe is not None and is_recipe(recipe) for recipe in recipes):
        raise UsageError(f"{overrides[0]!r} changes a recipe, and no recipe was given")

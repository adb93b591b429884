"""`prunekit recipe`: the recipes that come with the package, and what a recipe may hold."""

from __future__ import annotations

from pathlib import Path

import click

from prunekit.artifacts import write_text
from prunekit.cli.options import common_options
from prunekit.cli.output import Console, table
from prunekit.errors import UsageError

force_option = click.option("--force", is_flag=True, help="Write over a file that is there.")


@click.group("recipe", short_help="List, show and copy recipes; look up what their keys mean.")
def recipe_group() -> None:
    """Recipes that come with the package, and the reference of every key.

    A command that takes a recipe takes a file, or the name of one of these: prunekit finetune resnet34
    """


@recipe_group.command("list", short_help="List the recipes that come with the package.")
@common_options
def list_recipes(as_json: bool) -> None:
    """List the recipes that come with the package, with a line each."""
    from prunekit.recipe.packaged import recipe_names, recipe_summary

    found = [(name, recipe_summary(name)) for name in recipe_names()]
    payload = {"recipes": [{"name": name, "summary": summary} for name, summary in found]}
    Console(as_json).result(payload, table(("recipe", "summary"), found, text=("recipe", "summary")))


@recipe_group.command("show", short_help="Print a recipe.")
@click.argument("name")
@common_options
def show_recipe(name: str, as_json: bool) -> None:
    """Print the recipe of this name, comments included."""
    from prunekit.recipe.packaged import recipe_text

    text = recipe_text(name)
    Console(as_json).result({"name": name.removesuffix(".yaml"), "text": text}, text)


@recipe_group.command("copy", short_help="Copy a recipe, to change it.")
@click.argument("name")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@force_option
@common_options
def copy_recipe(name: str, file: Path | None, force: bool, as_json: bool) -> None:
    """Copy the recipe of this name to FILE, to change it.  [default: NAME.yaml in this folder]"""
    from prunekit.recipe.packaged import recipe_text

    text = recipe_text(name)
    path = file or Path(f"{name.removesuffix('.yaml')}.yaml")
    write_new(path, text, force=force)
    Console(as_json).result({"path": str(path)}, f"Wrote {path}; run it with: prunekit finetune {path}")


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Writes a file whole or not at all.

    Raises:
        UsageError: it is there already, and `force` was not given.
    """
    if path.exists() and not force:
        raise UsageError(f"{path}: there is such a file already; choose another name, or write over it with --force")
    write_text(path, text)

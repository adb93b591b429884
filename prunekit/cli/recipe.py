"""`prunekit recipe`: the recipes that come with the package, and what a recipe may hold."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

import click

from prunekit.artifacts import write_text
from prunekit.cli.options import common_options
from prunekit.cli.output import Console, table
from prunekit.errors import UsageError

force_option = click.option("--force", is_flag=True, help="Write over a file that is there.")


_INDENTED: dict[str, Any] = {
    "initial_indent": "  ",
    "subsequent_indent": "  ",
    "break_long_words": False,
    "break_on_hyphens": False,
}


@click.group("recipe", short_help="List, show and copy recipes; explain their keys.")
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


@recipe_group.command("reference", short_help="Show what keys mean.")
@click.argument("key", default="", metavar="[KEY]")
@common_options
def show_reference(key: str, as_json: bool) -> None:
    """Show what a key of a recipe may hold, its default, what it means, and an example; of a section all of its keys.

    KEY is dotted, for example: prune.budget.macs. Without one all of them are shown.
    """
    from prunekit.recipe.reference import find

    keys = find(key)
    payload = [
        {
            "key": one.name,
            "allowed": one.allowed,
            "required": one.required,
            "default": one.default,
            "meaning": one.meaning,
            "example": one.example,
        }
        for one in keys
    ]
    text = "\n\n".join(f"{one.name}\n{fill(one.text, 96, **_INDENTED)}" for one in keys)
    Console(as_json).result({"keys": payload}, text)


@recipe_group.command("schema", short_help="Write the JSON schema of recipes, for editors.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@force_option
def show_schema(file: Path | None, force: bool) -> None:
    """Write the JSON schema of recipes to FILE, or print it.

    Editors that know yaml-language-server complete and check a recipe that begins with the line
    "# yaml-language-server: $schema=FILE".
    """
    from prunekit.recipe.reference import schema_text

    if file is None:
        Console(False).result({}, schema_text())
        return
    write_new(file, schema_text(), force=force)
    Console(False).result({}, f"Wrote {file}; begin a recipe with: # yaml-language-server: $schema={file}")


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Writes a file whole or not at all.

    Raises:
        UsageError: it is there already, and `force` was not given.
    """
    refuse_present(path, force=force)
    write_text(path, text)


def refuse_present(path: Path, *, force: bool) -> None:
    """Checks that a file is not there, unless it may be written over.

    Raises:
        UsageError: it is.
    """
    if path.exists() and not force:
        raise UsageError(f"{path}: there is such a file already; choose another name, or write over it with --force")

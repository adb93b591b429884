"""`prunekit recipe` and `prunekit init`: packaged recipes, the reference of keys, and a first recipe of one's own."""

import shlex
from pathlib import Path
from textwrap import fill
from typing import Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.options import common_options, split_overrides, zoo_option
from prunekit.cli.output import Console
from prunekit.errors import UsageError
from prunekit.recipe.draft_request import DraftRequest, require_known

_INDENTED: dict[str, Any] = {
    "initial_indent": "  ",
    "subsequent_indent": "  ",
    "break_long_words": False,
    "break_on_hyphens": False,
}


@click.group()
def recipe_group() -> None:
    """Show recipes that come with the package (prunekit list recipes), and the reference of every key.

    A command that takes a recipe takes a file, or the name of one of these: prunekit finetune resnet34
    """


register_command("recipe", about="Show recipes, and explain their keys.", place=17)(recipe_group)


@recipe_group.command("show", short_help="Print a recipe.")
@click.argument("name")
@common_options
def show_recipe(name: str, as_json: bool) -> None:
    """Print the recipe of this name, comments included; to change it: prunekit recipe show resnet34 > mine.yaml."""
    from prunekit.recipe.loading import recipe_text

    text = recipe_text(name)
    Console(as_json).result({"name": name.removesuffix(".yaml"), "text": text}, text)


@recipe_group.command("reference", short_help="Show what keys mean.")
@click.argument("key", default="", metavar="[KEY]")
@common_options
def show_reference(key: str, as_json: bool) -> None:
    """Show the allowed values of a key of a recipe, its default, its meaning, and an example; for a section all keys.

    KEY is dotted, for example: prune.budget.macs. Without it all keys are shown.
    """
    from prunekit.recipe.reference import find

    keys, facts = find(key), ("allowed", "required", "default", "meaning", "example")
    payload = [{"key": one.name, **{name: getattr(one, name) for name in facts}} for one in keys]
    text = "\n\n".join(f"{one.name}\n{fill(one.text, 96, **_INDENTED)}" for one in keys)
    Console(as_json).result({"keys": payload}, text)


@recipe_group.command("schema", short_help="Print the JSON schema of recipes, for editors.")
def show_schema() -> None:
    """Print the JSON schema of recipes, for example: prunekit recipe schema > recipe.schema.json.

    Editors that know yaml-language-server complete and check a recipe that begins with the line
    "# yaml-language-server: $schema=recipe.schema.json".
    """
    from prunekit.recipe.reference import schema_text

    Console(False).result({}, schema_text())


@register_command("init", about="Write a commented recipe for a model and a data set.", place=1)
@click.argument("arguments", nargs=-1, metavar="FILE [KEY=VALUE]...")
@click.option(
    "--model",
    required=True,
    metavar="NAME|FOLDER|FILE.py:FACTORY",
    help="A zoo's model, the folder of one of transformers, or your own.",
)
@click.option("--data", required=True, metavar="DATA", help="The images or texts, see above.")
@zoo_option
@click.option("--weights", metavar="FILE|NAME", help="Of the dense model.  [default: it is trained first]")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@common_options
def init_command(
    arguments: tuple[str, ...], model: str, data: str, zoo: str | None, weights: str | None, force: bool, as_json: bool
) -> None:
    """Look at a model and a data set, and write a recipe that prunes one on the other, with a comment at each key.

    DATA is digits (they come with the package), a folder with one folder of images for each class or of images without
    labels, an .npz file, a data set of torchvision such as CIFAR10, one of Hugging Face's such as uoft-cs/cifar10, or
    your own FILE.py:FACTORY. A file of text, or a folder of such, is for language models; the recipe's task is that of
    the model.

    For example: prunekit init --model resnet18 --data path/to/folder mine.yaml prune.budget.macs=0.4
    """
    files, overrides = split_overrides(arguments)
    if len(files) != 1:
        raise UsageError(f"expected one FILE for the recipe, such as mine.yaml, got {len(files)}: {' '.join(files)}")
    path = Path(files[0])
    if path.exists() and not force:
        raise UsageError(f"{path}: the file exists already; choose another name, or overwrite it with --force")
    console = Console(as_json)
    request = DraftRequest(model, data, zoo, weights, tuple(overrides))
    require_known(request)
    from prunekit.recipe.draft import write_draft

    with console.running():
        made = write_draft(path, request)
    run = shlex.join(made.command)
    lines = [f"Wrote {path}", *(f"  {note}" for note in made.notes), f"Try it: {run} --dry-run", f"Run it: {run}"]
    console.result({"path": str(path), "command": made.command, "notes": list(made.notes)}, "\n".join(lines))

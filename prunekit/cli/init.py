"""`prunekit init`: a first recipe for a model and a data set."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import get_args

import click

from prunekit.cli.options import Zoo, common_options, split_overrides
from prunekit.cli.output import Console
from prunekit.cli.recipe import force_option, refuse_present
from prunekit.errors import UsageError


@click.command("init", short_help="Write a commented recipe for a model and a data set.")
@click.argument("arguments", nargs=-1, metavar="FILE [KEY=VALUE]...")
@click.option("--model", required=True, metavar="NAME|FILE.py:FACTORY", help="A zoo's model, or your own.")
@click.option("--data", required=True, metavar="DATA", help="The images, see above.")
@click.option(
    "--zoo", type=click.Choice(get_args(Zoo)), help="Where the model is from.  [default: torchvision, else cifar]"
)
@click.option("--weights", metavar="FILE|NAME", help="Of the dense model.  [default: it is trained first]")
@force_option
@common_options
def init_command(
    arguments: tuple[str, ...],
    model: str,
    data: str,
    zoo: str | None,
    weights: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Look at a model and a data set, and write a recipe that prunes one on the other, with a comment at each key.

    DATA is digits (they come with the package), a folder with one folder of images for each class, an .npz file, a data
    set of torchvision such as CIFAR10, one of Hugging Face's such as uoft-cs/cifar10, or your own FILE.py:FACTORY.

    For example: prunekit init --model resnet18 --data path/to/folder mine.yaml prune.budget.macs=0.4
    """
    files, overrides = split_overrides(arguments)
    if len(files) != 1:
        raise UsageError(f"expected one FILE for the recipe, such as mine.yaml, got {len(files)}: {' '.join(files)}")
    path = Path(files[0])
    refuse_present(path, force=force)
    console = Console(as_json)
    from prunekit.recipe.draft import Asked, write_draft

    with console.running():
        made = write_draft(path, Asked(model, data, zoo, weights, tuple(overrides)))
    run = shlex.join(made.command)
    lines = [f"Wrote {path}", *(f"  {note}" for note in made.notes), f"Try it: {run} --dry-run", f"Run it: {run}"]
    console.result({"path": str(path), "command": made.command, "notes": list(made.notes)}, "\n".join(lines))

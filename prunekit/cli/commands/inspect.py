"""`prunekit inspect`: what can be pruned, what cannot and why, and where the MACs are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, check_recipes, model_command, one_target
from prunekit.cli.options import split_overrides
from prunekit.cli.output import Console
from prunekit.utils.files import write_text

if TYPE_CHECKING:
    from prunekit.jobs.run.command_subject import Subject


@register_command("inspect", about="Show channel groups, blocks, locks, and MACs per layer.", place=15)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--layers", is_flag=True, help="Instead: shapes, parameters, MACs and activation memory by module.")
@model_command("inspect.json; with --layers: layers.json, layers.csv and layers.html.", device=False)
def inspect_command(
    console: Console, given: ModelOptions, arguments: tuple[str, ...], layers: bool, output: Path | None
) -> None:
    """Show channel groups, locked channels with the reason, blocks, and the MACs of each layer.

    A block is a residual branch, or a part of a concatenation, that may go as a whole (prune.depth); those that stay
    are listed with the reason.

    With --layers show instead a table of all modules, in order of execution.

    MODEL is a recipe (its dense model), a model folder, or the name of a torchvision or CIFAR model; instead of it, or
    of a recipe's model, --model gives your own. KEY=VALUE changes the recipe. Of an exported file (.onnx, .xml, .pt2)
    inputs, outputs and sizes are shown, and how images become its input.
    """
    targets, overrides = split_overrides(arguments)
    check_recipes(targets, overrides, given)
    from prunekit.jobs.analyses.inspect import inspect as look

    with console.running():
        target = one_target(targets, overrides, given, needs_module="show layers of" if layers else "")
        if layers:
            return _layers(target, output, console)
        found = look(target)
    console.show(found, found.figures(), "inspect", output)


def _layers(target: Subject, output: Path | None, console: Console) -> None:
    """Show the table of modules, in order of execution."""
    from dataclasses import asdict

    from prunekit.report.pages.model_summary import summary

    found = summary(target.model, target.example_inputs, name=target.name)
    result = {**asdict(found), "rows": found.rows()}
    del result["modules"]
    if output is not None:
        console.log(f"wrote {found.to_csv(output / 'layers.csv')}")
        write_text(output / "layers.html", found.to_html())
        console.log(f"wrote {output / 'layers.html'}")
    console.show(found, result, "layers", output)

"""`prunekit inspect`: what can be pruned, what cannot and why, and where the MACs are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, check_recipes, model_command, one_target
from prunekit.cli.options import split_overrides
from prunekit.cli.output import Console, save
from prunekit.utils.display import table
from prunekit.utils.files import write_text

if TYPE_CHECKING:
    from prunekit.formats.exported_model import ExportedModel
    from prunekit.jobs.run.model_sources import InputModel


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
    from prunekit.jobs.inspect import inspect as look

    with console.running():
        target = one_target(targets, overrides, given, needs_module="show layers of" if layers else "")
        from prunekit.formats.exported_model import ExportedModel

        if isinstance(target.model, ExportedModel):
            return _exported(target.model, output, console)
        if layers:
            return _layers(target, output, console)
        result = look(target)
    save(result, output, "inspect.json", console)
    console.result(result, _text(result))


def _exported(model: ExportedModel, output: Path | None, console: Console) -> None:
    """Show the interface and the size of an exported file."""
    from prunekit.jobs.run.exported_model import inspect_exported
    from prunekit.utils.display import listed, plural, size

    result = inspect_exported(model)
    save(result, output, "inspect.json", console)
    known = model.interface
    shown = [("input", str(spec)) for spec in known.inputs] + [("output", str(spec)) for spec in known.outputs]
    shown += [("task", known.task)] if known.task else []
    shown += [("classes", f"{len(known.classes)}: {listed(known.classes, 10)}")] if known.classes else []
    if known.preprocessing is not None:
        given = known.preprocessing.as_dict().items()
        shown.append(("preprocessing", ", ".join(f"{name} {value}" for name, value in given)))
    head = f"{model.path} ({model.form}): {size(result['bytes'])} in {plural(len(model.files), 'file')}"
    console.result(result, f"{head}\n{table(('what', 'is'), shown, text=('is',))}")


def _layers(target: InputModel, output: Path | None, console: Console) -> None:
    """Show the table of modules, in order of execution."""
    from dataclasses import asdict

    from prunekit.report.pages.model_summary import summary
    from prunekit.utils.display import text_of

    found = summary(target.model, target.example_inputs(), name=target.name)
    result = {**asdict(found), "rows": found.rows()}
    del result["modules"]
    save(result, output, "layers.json", console)
    if output is not None:
        console.log(f"wrote {found.to_csv(output / 'layers.csv')}")
        write_text(output / "layers.html", found.to_html())
        console.log(f"wrote {output / 'layers.html'}")
    console.result(result, text_of(found))


def _text(result: dict[str, Any]) -> str:
    from prunekit.utils.display import count, plural, share

    total = result["macs"] or 1
    groups = [(row["name"], row["channels"], row["axes"]) for row in result["groups"]]
    locks = [(row["module"] or "(root)", row["operator"], row["channels"], row["reason"]) for row in result["locks"]]
    layers = [
        (row["module"] or "(root)", row["kind"], count(row["macs"]), share(row["macs"] / total), count(row["params"]))
        for row in result["layers"]
    ]
    blocks = [
        (row["block"], len(row["layers"]), row["channels"], count(row["macs"]), share(row["share"]))
        for row in result["blocks"]
    ]
    staying = [(row["block"] or "(root)", row["reason"]) for row in result["block_locks"]]
    shape = "x".join(map(str, result["input_shape"]))
    return "\n".join(
        [
            f"{result['model']} ({result['architecture']}), input {shape}: {count(result['params'])} parameters, "
            f"{count(result['macs'])} MACs, {share(result['free_share'])} of the parameters can be pruned",
            f"\n{len(groups)} channel group{'s'[: len(groups) != 1]} (channels that are kept or removed together)",
            table(("group", "channels", "axes"), groups),
            f"\n{len(locks)} lock{'s'[: len(locks) != 1]} (channels that are kept, and why)",
            table(("module", "operator", "channels", "reason"), locks, text=("operator", "reason")),
            f"\n{plural(len(blocks), 'block')} (residual branches and parts of concatenations that may go as a whole)",
            table(("block", "layers", "channels", "MACs", "share"), blocks),
            *([f"\n{plural(len(staying), 'block')} that stay{'s'[: len(staying) == 1]}, and why"] if staying else []),
            *([table(("block", "reason"), staying, text=("reason",))] if staying else []),
            "\nMACs by layer",
            table(("module", "kind", "MACs", "share", "parameters"), layers, text=("kind",)),
        ]
    )

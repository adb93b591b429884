"""`prunekit explain`: why a pruned model is not faster."""

from dataclasses import replace
from pathlib import Path

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, check_recipes, model_command, one_target
from prunekit.cli.options import split_overrides
from prunekit.cli.output import Console, plain
from prunekit.errors import UsageError

SHOWN = 15
"""Operators of an explanation that are shown."""


@register_command("explain", about="Show why a pruned model is not faster.", place=10)
@click.argument("arguments", nargs=-1, metavar="PRUNED [KEY=VALUE]...")
@click.option("--dense", metavar="MODEL", help="What it is compared with.  [default: what PRUNED was made from]")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Samples in a forward pass.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="CPU threads.")
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(min=5), help="Timed runs of each.")
@model_command("explain.json and explain.html.")
def explain_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    dense: str | None,
    batch: int,
    threads: int,
    repeats: int,
    device: str | None,
    output: Path | None,
) -> None:
    """Show the time of each operator, dense against pruned, and the measured causes of what is missing from the ideal.

    PRUNED is a model folder; its dense model is built from what the folder says, or by --model if it is of your own
    code, or is --dense: a recipe, a folder, or the name of a model. With --dense, PRUNED may be any of these too.
    The ideal is the ratio of their multiply-accumulates. Eager, without gradients.
    """
    names, overrides = split_overrides(arguments)
    check_recipes([*names, dense], overrides, given)
    if not names:
        raise UsageError("expected a pruned model: prunekit explain FOLDER, or MODEL with --dense MODEL")
    from prunekit.jobs.analyses.explain import explain
    from prunekit.jobs.run.dense_model import build_dense
    from prunekit.report.sections.explanation import write_explanation

    with console.running():
        target = one_target(names, overrides, given, needs_module="time one by one")
        if dense is not None:
            against = one_target([dense], overrides, replace(given, weights=None), needs_module="time").model
        elif Path(names[0]).is_dir():
            against = build_dense(Path(names[0]), given.factory)
        else:
            raise UsageError(
                f"{names[0]}: expected a model folder, which says what it was pruned from, or --dense MODEL"
            )
        example = target.timing_inputs.sample(batch)  # random where it can be: on zeros, activations would be zeros too
        found = explain(
            against, target.model, example, threads=threads, device=device or "auto", rounds=repeats, log=console.log
        )
    payload = plain({"pruned": target.name, "dense": dense or "its dense model", **found.figures()})
    if output is not None:
        console.log(f"wrote {write_explanation(output, payload)}")
    console.show(found, payload, "explain", output, before=f"{target.name} ", most=SHOWN, all_in="explain.json")

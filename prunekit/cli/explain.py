"""`prunekit explain`: why a pruned model is not faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prunekit.cli.models import ModelOptions, check_recipes, one_target
from prunekit.cli.options import (
    common_options,
    device_option,
    model_options,
    output_option,
    seed_option,
    split_overrides,
)
from prunekit.cli.output import Console, check_folder, plain, save, table
from prunekit.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

SHOWN = 15


@click.command("explain", short_help="Show why a pruned model is not faster.")
@click.argument("arguments", nargs=-1, metavar="PRUNED [KEY=VALUE]...")
@click.option("--dense", metavar="MODEL", help="What it is compared with.  [default: what PRUNED was made from]")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Samples in a forward pass.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="CPU threads.")
@click.option("--repeats", default=15, show_default=True, type=click.IntRange(min=5), help="Timed runs of each.")
@model_options
@device_option
@seed_option
@output_option("explain.json and explain.html.")
@common_options
def explain_command(
    arguments: tuple[str, ...],
    dense: str | None,
    batch: int,
    threads: int,
    repeats: int,
    device: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Time by operator, dense against pruned, and the causes of what is missing from the ideal, each measured.

    PRUNED is a model folder; its dense model is built from what the folder says, or by --model where your own code
    made it, or is --dense: a recipe, a folder, or the name of a model. With --dense, PRUNED may be any of these too.
    The ideal is the ratio of their multiply-accumulates. Eager, without gradients.
    """
    console = Console(as_json)
    check_folder(output)
    names, overrides = split_overrides(arguments)
    check_recipes([*names, dense], overrides, ModelOptions(**options))
    if not names:
        raise UsageError("expected a pruned model: prunekit explain FOLDER, or MODEL with --dense MODEL")
    from prunekit import report
    from prunekit.workflow.explain import explain

    with console.running():
        target = one_target(names, overrides, ModelOptions(**options))
        against = _dense(names[0], dense, overrides, ModelOptions(**options))
        example = target.timed.sample(batch)  # random where it can be: on zeros, activations would be zeros too
        found = explain(
            against, target.model, example, threads=threads, device=device or "auto", rounds=repeats, log=console.log
        )
    payload = plain({"pruned": target.name, "dense": dense or "its dense model", **found.figures()})
    save(payload, output, "explain.json", console)
    if output is not None:
        console.log(f"wrote {report.write_explanation(output, payload)}")
    console.result(payload, text(payload))


def _dense(name: str, dense: str | None, overrides: list[str], options: ModelOptions) -> nn.Module:
    if dense is not None:
        return one_target([dense], overrides, replace(options, weights=None)).model
    if not Path(name).is_dir():
        raise UsageError(f"{name}: expected a model folder, which says what it was pruned from, or --dense MODEL")
    from prunekit.workflow.counterpart import dense_of

    return dense_of(Path(name), options.factory)


def text(result: dict[str, Any]) -> str:
    """The explanation as lines for a terminal."""
    return "\n".join([*_headline(result), "", *_causes(result["causes"]), "", *_rows(result), *result["notes"]])


def _headline(result: dict[str, Any]) -> list[str]:
    from prunekit.numbers import digits, factor, interval, share

    speedup, ratio = result["speedup"], result["macs_ratio"]
    outside, inside = result["pruned_outside_ms"], result["pruned_operators_ms"]
    lines = [
        f"{result['pruned']} on {result['device']}, batch {result['batch']}, threads {result['threads']}: "
        f"{digits(result['pruned_ms'])} ms, dense {digits(result['dense_ms'])} ms",
        f"{factor(speedup['median'])} faster {interval(speedup['low'], speedup['high'])}; its multiply-accumulates say "
        f"{factor(ratio)}: {share(speedup['median'] / ratio, 0)} of the ideal, "
        f"{digits(abs(result['shortfall_ms']))} ms {'more' if result['shortfall_ms'] > 0 else 'less'} than that",
    ]
    dense_inside, dense_outside = result["dense_operators_ms"], result["dense_outside_ms"]
    lines.append(
        f"in operators {digits(inside)} ms (dense {digits(dense_inside)}), outside of them (Python, dispatch) "
        f"{digits(outside)} ms (dense {digits(dense_outside)}): {share(outside / (inside + outside), 0)} of the time"
    )
    return lines


def _causes(causes: list[dict[str, Any]]) -> list[str]:
    from prunekit.numbers import digits

    if not causes:
        return ["No cause was found: nothing that was tried makes it faster."]
    lines = ["Causes, each measured; they overlap, so that their milliseconds do not add up:"]
    for cause in causes:
        lines += [f"  {cause['name']} (about {digits(cause['ms'])} ms)", f"    {cause['evidence']}."]
        lines.append(f"    To fix it: {cause['fix']}.")
    return lines


def _rows(result: dict[str, Any]) -> list[str]:
    from prunekit.report.explain import operator_cells

    rows = [row for row in result["rows"] if row["pruned"]]
    heading = "Operators" if len(rows) <= SHOWN else f"The {SHOWN} slowest of {len(rows)} operators"
    headings = (
        "module",
        "operator",
        "dense ms",
        "pruned ms",
        "MACs",
        "pruned",
        "faster",
        "ideal",
        "share",
        "MACs/byte",
    )
    return [heading, table(headings, [operator_cells(row) for row in rows[:SHOWN]], text=("operator",))]

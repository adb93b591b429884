"""`prunekit profile`: what each layer takes at which widths."""

from __future__ import annotations

from typing import Any

import click

from prunekit.cli.options import common_options, load_job, output_option, own_options, seed_option
from prunekit.cli.output import Console, check_folder, table

SLOWEST = 20
HOW = ("widths step by", "kernel changes at")


@click.command("profile", short_help="Measure each layer's latency against its widths.")
@click.argument("recipe", metavar="RECIPE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--networks", type=click.IntRange(min=10), default=40, show_default=True, help="How many to measure.")
@click.option("--again", is_flag=True, help="Measure anew what was timed on a machine too noisy.")
@own_options
@seed_option
@output_option("runs.  [default: runs]")
@common_options
def profile_command(
    recipe: str,
    overrides: tuple[str, ...],
    networks: int,
    again: bool,
    factory: str | None,
    data: str | None,
    task: str | None,
    optimizer: str | None,
    allow_code: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Latency of a recipe's dense model, layer by layer, on the runtime and device of prune.target.

    Networks of widths all over the range are timed whole, layer by layer in place; a table is fitted to them, and
    tested on those that were held out; a report shows both. Budgets `speedup` and `latency_ms` are planned by it. What
    was measured is kept in ~/.cache/prunekit (or PRUNEKIT_CACHE): an interrupted profile goes on, a finished one is not
    measured again.

    KEY=VALUE changes the recipe, for example: prune.target.runtime=onnxruntime.
    """
    console = Console(as_json)
    job = load_job(recipe, overrides, factory=factory, data=data, task=task, allow_code=allow_code, **options)
    check_folder(job.output)
    from prunekit.workflow import Own, profile_job

    with console.running():
        run = profile_job(
            job,
            networks=networks,
            again=again,
            log=console.log,
            own=Own(factory, data, optimizer),
        )
    places = f"Table: {run.folder / 'profile.csv'}\nReport: {run.folder / 'report.html'}"
    console.result({"folder": str(run.folder), **run.metrics}, f"{_text(run.metrics)}\n{places}")


def _text(metrics: dict[str, Any]) -> str:
    from prunekit.numbers import share

    setting = metrics["setting"]
    where = f"{setting['runtime']}, {setting['device']}, batch {setting['batch']}, threads {setting['threads']}"
    rows = [
        (
            row["module"] or "(the model's own code)",
            f"{row['dense_ms']:.3f}",
            share(row["share"], 1),
            row["steps"] or "-",
            row["changes_at"] or "-",
            "-" if row["error"] is None else share(row["error"], 1),
        )
        for row in metrics["layers"][:SLOWEST]
    ]
    left_out = len(metrics["layers"]) - len(rows)
    worst = max(abs(check["error"]) for check in metrics["checks"])
    lines = [
        f"Dense: {metrics['dense_ms']:.3f} ms ({where}, {setting['dtype']}, {setting['memory_format']})",
        table(("module", "ms", "share", *HOW, "fit error"), rows, text=HOW),
        *([f"... and {left_out} more in profile.csv"] if left_out else []),
        f"Sum of the layers against whole networks that were held out: median error {share(metrics['error'], 1)}, "
        f"at most {share(worst, 1)} ({len(metrics['checks'])} of {metrics['networks']} networks, "
        f"{metrics['seconds']:.0f} s)",
        *(f"Note: {note}" for note in metrics["notes"]),
    ]
    return "\n".join(lines)

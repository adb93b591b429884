"""`prunekit bench`: latency, and a gate for deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from prunekit.cli.models import ModelOptions, all_targets, refuse_idle_overrides
from prunekit.cli.options import (
    common_options,
    device_option,
    model_options,
    output_option,
    seed_option,
    split_overrides,
)
from prunekit.cli.output import Console, check_folder, save, table


def _counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected positive whole numbers with commas between them, got {value!r}")
    return tuple(int(part) for part in parts)


@click.command("bench", short_help="Time one or more models beside each other.")
@click.argument("arguments", nargs=-1, metavar="[MODEL]... [KEY=VALUE]...")
@click.option("--batch", default="1,16", show_default=True, callback=_counts, help="Batch sizes.")
@click.option("--threads", default="1", show_default=True, callback=_counts, help="CPU thread counts.")
@click.option("--repeats", default=30, show_default=True, type=click.IntRange(min=5), help="Timed runs of each.")
@click.option(
    "--max-latency-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Exit with 1 when the last model's median is above this, for any batch, thread count or device.",
)
@model_options
@device_option
@seed_option
@output_option("bench.json.")
@common_options
def bench_command(
    arguments: tuple[str, ...],
    batch: tuple[int, ...],
    threads: tuple[int, ...],
    repeats: int,
    max_latency_ms: float | None,
    device: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Latency of one or more models, timed alternately; speedups are relative to the first.

    MODEL is a recipe (its dense model), a model folder, or the name of a torchvision or CIFAR model; --model adds your
    own as the first, or takes the place of a recipe's model. A latency is that of the whole batch. Without --device the
    CPU is timed, and CUDA where there is one.
    """
    console = Console(as_json)
    check_folder(output)
    targets, overrides = split_overrides(arguments)
    refuse_idle_overrides(overrides, targets, options["data"])
    from prunekit.measure import LatencySettings
    from prunekit.workflow.bench import bench as measure
    from prunekit.workflow.bench import too_slow

    with console.running():
        models = all_targets(targets, overrides, ModelOptions(**options))
        result = measure(models, LatencySettings(batch, threads, repeats), device or "auto")
    slow = [] if max_latency_ms is None else too_slow(result["latency"], max_latency_ms)
    payload = result if max_latency_ms is None else {**result, "max_latency_ms": max_latency_ms, "passed": not slow}
    save(payload, output, "bench.json", console)
    console.result(payload, _text(result))
    for row in slow:
        where = f"{row['model']} on {row['device']}, batch {row['batch']}, threads {row['threads']}"
        console.log(f"prunekit: too slow: {where}: {row['median_ms']:.3g} ms > {max_latency_ms:g} ms")
    if slow:
        click.get_current_context().exit(1)


def _text(result: dict[str, Any]) -> str:
    from prunekit.report.numbers import digits, factor, interval

    where = ("device", "runtime", "batch", "threads")
    times = ("median_ms", "p10_ms", "p90_ms", "p99_ms")
    rows = [
        (row["model"], *(row[key] for key in where), row["dtype"], *(digits(row[key]) for key in times))
        for row in result["latency"]
    ]
    text = ("device", "runtime", "dtype")
    parts = [table(("model", *where, "dtype", "median ms", "p10", "p90", "p99"), rows, text)]
    speedups = [
        (row["model"], *(row[key] for key in where), factor(row["median"]), interval(row["low"], row["high"]))
        for row in result["speedup"]
    ]
    if speedups:
        parts.append(table(("against the first", *where, "speedup", "95 % interval"), speedups, text))
    return "\n\n".join([*parts, *result["notes"]])

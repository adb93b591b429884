"""`prunekit bench`: latency, and a gate for deployment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, all_targets, check_recipes, model_command
from prunekit.cli.options import split_overrides
from prunekit.cli.output import Console
from prunekit.errors import nearest
from prunekit.known_names import RUNTIMES, DtypeName, MemoryFormat


def _list_option(name: str, item: Callable[[str], Any], **options: Any) -> Callable[..., Any]:
    """Return an option for items with commas between them, each taken once; `item` makes the text of one its value."""

    def items(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
        return None if value is None else tuple(dict.fromkeys(item(part.strip()) for part in value.split(",")))

    return click.option(name, callback=items, show_default=True, **options)


def _count(part: str) -> int:
    if not part.isdecimal() or not int(part):
        raise click.BadParameter(f"expected positive whole numbers with commas between them, got {part!r}")
    return int(part)


def _runtime(part: str) -> str:
    if (problem := RUNTIMES.problem(part)) is not None:
        raise click.BadParameter(problem)
    return part


def _names_option(name: str, default: str, allowed: tuple[str, ...], what: str) -> Callable[..., Any]:
    def known(part: str) -> str:
        if part not in allowed:
            raise click.BadParameter(f"{part!r}: {nearest(part, allowed)}")
        return part

    return _list_option(name, known, default=default, help=f"{what}: {', '.join(allowed)}.")


@register_command("bench", about="Time one or more models beside each other.", place=9)
@click.argument("arguments", nargs=-1, metavar="[MODEL]... [KEY=VALUE]...")
@_list_option(
    "--runtime",
    _runtime,
    default="eager",
    metavar="NAME,...",
    help="What runs the models, each in a process of its own: names with commas between them "
    "(prunekit list runtimes), or file.py:object of your own.",
)
@_list_option("--batch", _count, help="Batch sizes.  [default: 1,16; with --max-latency-ms: 1]")
@_list_option("--threads", _count, default="1", help="CPU thread counts.")
@_names_option("--dtype", "fp32", get_args(DtypeName), "What the models compute in")
@_names_option("--memory-format", "contiguous", get_args(MemoryFormat), "Layout in torch's own runtimes")
@click.option("--repeats", default=30, show_default=True, type=click.IntRange(min=5), help="Timed runs of each.")
@click.option(
    "--max-latency-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Exit with 1 unless the last model is shown to be this fast in every setting that is timed: the median, or "
    "where it is unstable the whole interval.",
)
@model_command("bench.json.")
def bench_command(
    console: Console,
    given: ModelOptions,
    arguments: tuple[str, ...],
    runtime: tuple[str, ...],
    batch: tuple[int, ...] | None,
    threads: tuple[int, ...],
    device: str | None,
    dtype: tuple[DtypeName, ...],
    memory_format: tuple[MemoryFormat, ...],
    repeats: int,
    max_latency_ms: float | None,
    output: Path | None,
) -> None:
    """Measure the latency of one or more models, timed alternately; speedups are relative to the first.

    MODEL is a recipe (its dense model), a model folder, an exported file, or the name of a torchvision or CIFAR model;
    --model adds your own as the first, or replaces a recipe's model. Without --runtime a file is timed in its own
    runtime: .onnx in ONNX Runtime, .xml in OpenVINO, .pt2 by PyTorch; onnxruntime and openvino take an .onnx as it is.
    A latency is that of the whole batch. Without --device, which takes several with commas, the CPU is timed, and CUDA
    if there is one; files on the CPU alone. Lists are combined as far as their items are compatible.

    Every runtime is checked against eager float32 first; if it differs, it is not timed and the exit code is 1.
    A figure that the samples do not support is marked unstable, with what would make it stable.
    """
    targets, overrides = split_overrides(arguments)
    check_recipes(targets, overrides, given)
    from prunekit.jobs.analyses.bench import bench_targets, gated
    from prunekit.measure.latency.comparison import devices
    from prunekit.settings.deployment import LatencySettings

    batch = batch or ((1, 16) if max_latency_ms is None else (1,))
    settings = LatencySettings(batch, threads, repeats, runtime, dtype, memory_format)
    with console.running():
        devices(device or "auto", settings)  # before models are built, which may take long
        found = bench_targets(all_targets(targets, overrides, given), settings, device or "auto", log=console.log)
    result = found.figures()
    gates = [] if max_latency_ms is None else gated(result["latency"], max_latency_ms)
    passed = all(fast for _, fast in gates) and not result["failures"]
    payload = result if max_latency_ms is None else {**result, "max_latency_ms": max_latency_ms, "passed": passed}
    console.show(found, payload, "bench", output)
    _conclude(result["failures"], gates, max_latency_ms, console)
    if not passed:
        click.get_current_context().exit(1)


def _conclude(
    failures: list[Any], gates: list[tuple[dict[str, Any], bool]], max_latency_ms: float | None, console: Console
) -> None:
    """Log what was not measured, and for each setting whether the model is within the limit."""
    from prunekit.measure.latency.row_text import failure_lines, setting_text

    for line in failure_lines(failures):
        console.log(f"prunekit: error: not measured: {line}")
    for row, fast in gates:
        doubt = "" if row["stable"] else f", unstable: 95 % up to {row['high_ms']:.3g} ms"
        found = f"{row['median_ms']:.3g} ms{doubt}; the limit is {max_latency_ms:g} ms"
        console.log(f"prunekit: {'fast enough' if fast else 'too slow'}: {row['model']} ({setting_text(row)}): {found}")

"""`prunekit export`: a model in the format of another runtime, checked before it gets its name."""

from pathlib import Path
from typing import Any

import click

from prunekit.cli.groups import register_command
from prunekit.cli.models import ModelOptions, model_and_data, model_or_trained, require_targets
from prunekit.cli.options import common_options, model_options, seed_option
from prunekit.cli.output import Console
from prunekit.errors import UsageError
from prunekit.jobs.run.early_checks import require_format
from prunekit.known_names import FORMATS


@register_command("export", about="Write a model for other runtimes, and check the file.", place=11)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [KEY=VALUE]...")
@click.option("--to", "formats", multiple=True, metavar="FORMAT", help=f"{', '.join(FORMATS.names)}.  [default: onnx]")
@click.option("--output", type=click.Path(path_type=Path), metavar="PATH", help="The file or folder to write.")
@click.option("--recipe", "data_recipe", metavar="RECIPE", help="Whose test images the file is checked and scored on.")
@click.option(
    "--dynamic",
    multiple=True,
    metavar="AXES",
    help="Sizes that may differ, besides the batch: image, sequence or INPUT:AXIS; may be repeated.",
)
@click.option("--batch", type=click.IntRange(min=1), help="The only batch size, where a model cannot have any.")
@click.option("--opset", type=click.IntRange(min=18), help="Version of ONNX's operators.")
@click.option("--half", is_flag=True, help="Store weights in float16, where the format can.")
@click.option("--int8", is_flag=True, help="Quantize the file, calibrated on the data: for onnx and openvino.")
@click.option(
    "--max-drop",
    type=click.FloatRange(min=0),
    help="Most points of the score that --int8 may cost; layers are returned to float.",
)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads when timed.")
@click.option("--no-timing", is_flag=True, help="Do not time the file beside eager.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@model_options
@seed_option
@common_options
def export_command(
    as_json: bool,
    arguments: tuple[str, ...],
    formats: tuple[str, ...],
    output: Path | None,
    data_recipe: str | None,
    dynamic: tuple[str, ...],
    batch: int | None,
    opset: int | None,
    half: bool,
    int8: bool,
    max_drop: float | None,
    threads: int,
    no_timing: bool,
    force: bool,
    **given: Any,
) -> None:
    """Write a model in other formats; each file is checked against the model, scored and timed before it is reported.

    MODEL is a model folder, a recipe (its dense model, trained first where it has no weights), or the name of a
    torchvision or CIFAR model; instead of it, --model gives your own. A model folder inside a run folder is checked on
    the test images of that run, others on those of --recipe or --data, or else on random inputs.
    """
    console, options = Console(as_json), ModelOptions(**given)
    wanted = formats or ("onnx",)
    if output is not None and len(wanted) > 1:
        raise UsageError(f"--output names one file, got {len(wanted)} formats: {', '.join(wanted)}; leave it out")
    if max_drop is not None and not int8:
        raise UsageError("--max-drop goes with --int8")
    for format_name in wanted:
        require_format(format_name)
    targets, _, job = model_and_data(arguments, data_recipe, options)
    require_targets(targets, options)
    from prunekit.backends.files.export_source import ExportOptions
    from prunekit.jobs.run.command_subject import Own
    from prunekit.jobs.stages.export_model import ExportRequest, require_exportable
    from prunekit.jobs.stages.quantize_export import export_target, require_quantizable
    from prunekit.settings.deployment import QuantizeSettings

    limit = QuantizeSettings.max_drop if max_drop is None else max_drop
    quantize, timed = QuantizeSettings(max_drop=limit) if int8 else None, () if no_timing else ExportRequest.timed
    written = ExportOptions(opset, half)
    requests = [
        ExportRequest(name, output, written, dynamic, batch, force, timed, threads, quantize) for name in wanted
    ]
    name = targets[0] if targets else (options.factory or "model").rpartition(":")[2]
    for request in requests:
        require_quantizable(request)
        require_exportable(request, name)
    with console.running():
        own, task = Own(data=options.data), job.task if job else options.task
        target = model_or_trained(targets, job, options, console)
        target = target.with_data(job.known_data if job else None, own, "check the export on", task)
        folder = Path(targets[0]) if targets and Path(targets[0]).is_dir() else None
        found = [export_target(target, request, folder=folder, log=console.log) for request in requests]
    files = [file for one in found for file in (one, one.int8) if file is not None]
    console.result({"exports": [file.figures() for file in files]}, "\n\n".join(map(str, found)))

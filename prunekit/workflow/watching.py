"""What a run shows in TensorBoard: every training while it goes on, and the run as a whole at its end."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.artifacts import flat
from prunekit.channels import ChannelMap
from prunekit.planning import Plan
from prunekit.settings.job import JobSettings
from prunekit.training import EpochRow, Part, PlanInForce, Watching
from prunekit.training.watching import filters, sparsity_figure
from prunekit.workflow.model_graph import model_graph
from prunekit.workflow.runs import RunFolder

FIGURES = ("macs", "params", "size_bytes")


def watching(run: RunFolder, job: JobSettings, name: str, plan: PlanInForce = lambda: None) -> list[Part]:
    """What watches a training, `tensorboard/<name>` and `scalars/<name>.csv`; nothing where the job wants none."""
    if job.watch is None:
        return []
    events, table = _places(run.path, name)
    return [Watching(job.watch, events, table, plan, lambda message: run.log(f"{name}: {message}"))]


def watched_before(run: RunFolder, job: JobSettings, name: str, rows: Iterable[EpochRow]) -> None:
    """Writes down a training that another run has made, if this one has nothing of it."""
    events, table = _places(run.path, name)
    if job.watch is None or table.exists():
        return
    again = Watching(job.watch, events, table)
    for row in rows:
        again.scalars(row)
    again.close()


def _places(run: Path, name: str) -> tuple[Path, Path]:
    return run / "tensorboard" / name, run / "scalars" / f"{name}.csv"


def write_summary(
    run: RunFolder,
    job: JobSettings,
    chart: ChannelMap,
    plan: Plan,
    models: tuple[nn.Module, nn.Module],
    metrics: Mapping[str, Any],
) -> None:
    """The run as one row of TensorBoard's hyper-parameters: the recipe and what came out; and the model's graph.

    With `watch.images` the filters of the dense (step 0) and the compact model (step 1) too, and what went of each
    layer. It goes to `tensorboard/run`, in the place of what an earlier attempt left there.

    Args:
        chart: of the model as it was traced.
        models: the dense and the compact one.
        metrics: of the run.
    """
    if job.watch is None or not job.watch.tensorboard:
        return
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "tensorboard" / "run"
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        graph = model_graph(chart, plan).SerializeToString()
        writer._get_file_writer().add_event(Event(graph_def=graph))
        writer.add_hparams(dict(_hyperparameters(asdict(job))), dict(_outcome(metrics)), run_name=".")
        if job.watch.images:
            for step, model in enumerate(models):
                if (image := filters(model)) is not None:
                    writer.add_image("filters", image, step)
            writer.add_figure("sparsity", sparsity_figure(_pruned_shares(plan)), 0, close=False)


def _pruned_shares(plan: Plan) -> dict[str, float]:
    """Of every weight with two axes or more the share that went."""
    shapes = {name: shape for name, shape in plan.channel_map.shapes.items() if len(shape) >= 2}
    sizes = {
        name: (plan.channel_map.parameters_kept(plan.keep, [name]), _size(shape)) for name, shape in shapes.items()
    }
    return {f"sparsity/{name.rpartition('.')[0] or name}": 1 - kept / size for name, (kept, size) in sizes.items()}


def _size(shape: Iterable[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _hyperparameters(job: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Every value of a recipe under its dotted key; what TensorBoard has no type for as text, what is not set left out.

    Where runs are written to, and when, is no setting to compare.
    """
    for key, value in flat(job):
        if value not in (None, {}) and key not in ("output", "name"):
            if isinstance(value, bool):  # which `add_hparams` would write as 0.0 or 1.0
                value = str(value).lower()
            yield key, value if isinstance(value, int | float) else str(value)


def _outcome(metrics: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    scores = [score["name"] for score in metrics["task"]["scores"]]
    for model in ("dense", "control", "pruned"):
        for name in (*scores, *FIGURES):
            if metrics.get(model, {}).get(name) is not None:
                yield f"{model}/{name}", float(metrics[model][name])
    for row in metrics["speedup"]:
        where = f"{row['device']}, {row['runtime']}, batch {row['batch']}, {row['dtype']}"
        yield f"speedup/{row['model']} ({where})", float(row["median"])
    yield "parity/max_relative_difference", float(metrics["parity"]["max_relative_difference"])

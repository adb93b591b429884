"""The TensorBoard log of a run: its trainings, its hyper-parameters and its model graph."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.planning.plan import Plan
from prunekit.settings.job import JobSettings
from prunekit.training.callbacks.callback import Callback, CurrentPlan, EpochRow
from prunekit.training.callbacks.tensorboard import TensorBoardLogger
from prunekit.utils.availability import missing_packages
from prunekit.utils.files import flattened

if TYPE_CHECKING:
    from tensorboard.compat.proto.graph_pb2 import GraphDef

FIGURES = ("macs", "params", "size_bytes")
INPUT = "input"


def watching(run: RunFolder, job: JobSettings, name: str, plan: CurrentPlan = lambda: None) -> list[Callback]:
    """Return the callbacks that write `tensorboard/<name>` and `scalars/<name>.csv` of a training, if asked for."""
    if job.watch is None:
        return []
    events, table = _places(run.path, name)
    return [TensorBoardLogger(job.watch, events, table, plan, lambda message: run.log(f"{name}: {message}"))]


def watched_before(run: RunFolder, job: JobSettings, name: str, rows: Iterable[EpochRow]) -> None:
    """Write the scalars of a training that another run has made, unless they are there."""
    events, table = _places(run.path, name)
    if job.watch is None or table.exists():
        return
    again = TensorBoardLogger(job.watch, events, table)
    for row in rows:
        again.scalars(row)
    again.close()


def _places(run: Path, name: str) -> tuple[Path, Path]:
    return run / "tensorboard" / name, run / "scalars" / f"{name}.csv"


def write_summary(run: RunFolder, job: JobSettings, chart: ChannelMap, plan: Plan, metrics: Mapping[str, Any]) -> None:
    """Write `tensorboard/run`: recipe and results as one row of hyper-parameters, and the model's graph.

    What an earlier attempt left there is replaced.
    """
    if job.watch is None or not job.watch.tensorboard or missing_packages(["tensorboard"]):
        return
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "tensorboard" / "run"
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        graph = model_graph(chart, plan).SerializeToString()
        writer._get_file_writer().add_event(Event(graph_def=graph))
        writer.add_hparams(dict(_hyperparameters(asdict(job))), dict(_outcome(metrics)), run_name=".")


def _hyperparameters(job: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the values of a recipe that are set, but the run's name and folder, by dotted key; as text if need be."""
    for key, value in flattened(job):
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


def model_graph(chart: ChannelMap, plan: Plan) -> GraphDef:
    """Return the operators that were traced for the channel map, under the modules that they ran in.

    Nothing is run for this. A node is `<module path>/<operator>`, with `/` for the dots, so that TensorBoard folds
    modules; edges are tensors. Each node holds the shapes of its results, the shapes of its module's parameters before
    and after the plan (`64x3x7x7 -> 40x3x7x7`), and the module's multiply-accumulates before and after. Operators that
    read nothing but parameters, such as the transposition of a weight, are left out.
    """
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.versions_pb2 import VersionDef

    macs = plan.channel_map.layer_macs(), plan.channel_map.layer_macs(plan.keep)
    graph = GraphDef(versions=VersionDef(producer=22))
    graph.node.add(name=INPUT, op="Placeholder")
    names = {-1: INPUT}
    taken: Counter[str] = Counter()
    for number, operator in enumerate(chart.traced.trace.runs[0].operators):
        sources = [names[source] for source in operator.reads if source in names]
        if not sources:
            continue
        kind = operator.name.removeprefix("aten.").strip("_")
        name = "/".join([*operator.module.split("."), kind]) if operator.module else kind
        taken[name] += 1
        names[number] = name if taken[name] == 1 else f"{name}_{taken[name] - 1}"
        node = graph.node.add(name=names[number], op=kind, input=sources)
        for shape in operator.call[2]:
            sizes = node.attr["_output_shapes"].list.shape.add()
            for size in shape:
                sizes.dim.add(size=size)
        for key, text in _facts(operator.module, plan, macs).items():
            node.attr[key].s = text.encode()
    return graph


def _facts(module: str, plan: Plan, macs: tuple[dict[str, int], dict[str, int]]) -> dict[str, str]:
    """Return the shapes of a module's own parameters, and its MACs, before and after the plan."""
    found = {}
    for name, shape in plan.channel_map.shapes.items():
        owner, _, own = name.rpartition(".")
        if owner == module:
            left = [len(plan.kept(name, axis)) for axis in range(len(shape))]
            found[own] = f"{_times(shape)} -> {_times(left)}"
    if module in macs[0]:
        found["macs"] = f"{macs[0][module]} -> {macs[1][module]}"
    return found


def _times(shape: Any) -> str:
    return "x".join(map(str, shape)) or "1"

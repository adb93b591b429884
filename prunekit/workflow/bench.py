"""The latency of models beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prunekit.context import resolve_device
from prunekit.errors import UsageError
from prunekit.measure import LatencySettings, count_macs, count_parameters, measure_latency
from prunekit.measure.choosing import choose
from prunekit.measure.runtimes import RUNTIMES
from prunekit.workflow.runs import Log
from prunekit.workflow.targets import InputModel, probe


def bench(
    targets: Sequence[InputModel], settings: LatencySettings, device: str = "auto", *, log: Log
) -> dict[str, Any]:
    """Times models alternately; the speedup of each is relative to the first.

    Args:
        targets: one or more models that take the same input.
        settings: runtimes, batches, CPU threads, dtypes, memory formats, repeats.
        device: as for `devices`.
        log: is told what is exported and timed next.

    Returns:
        `models` (name -> `params`, `macs`), and `latency`, `speedup`, `notes`, `failures` and `machine`: the rows and
        facts of `LatencyReport`.

    Raises:
        UsageError: the models take inputs of different shapes, a device does not exist, or a runtime is not installed
            or cannot do what is asked; nothing was measured.
        ModelError: a model does not run on its input.
    """
    places = devices(device, settings)
    _same_shape(targets)
    models = dict(zip(_unique([target.name for target in targets]), targets, strict=True))
    for target in targets:
        probe(target)
    measured = {name: target.model for name, target in models.items()}
    report = measure_latency(measured, targets[0].timed, settings, places, log=log)
    sizes = {
        name: {"params": count_parameters(target.model), "macs": count_macs(target.model, target.example_inputs())}
        for name, target in models.items()
    }
    return {
        "models": sizes,
        "latency": [dict(row) for row in report.rows],
        "speedup": [dict(row) for row in report.speedup],
        "notes": list(report.notes),
        "failures": [dict(row) for row in report.failures],
        "machine": dict(report.machine),
    }


def gated(latency: Sequence[dict[str, Any]], max_latency_ms: float) -> list[tuple[dict[str, Any], bool]]:
    """Return the rows of the last-named model, and whether each is shown to keep a limit, in ms for the whole batch.

    A stable row keeps it with its median, an unstable one with the whole 95 % interval: noise makes models slower, so
    one that is fast enough in it is fast enough.
    """
    rows = [row for row in latency if row["model"] == latency[-1]["model"]]
    return [(row, row["median_ms" if row["stable"] else "high_ms"] <= max_latency_ms) for row in rows]


def devices(names: str, settings: LatencySettings) -> list[torch.device]:
    """The devices that names with commas between them stand for, checked with what is to be timed there.

    Args:
        names: `auto` is the CPU, and CUDA where there is one, as far as the runtimes run there.

    Raises:
        UsageError: a device does not exist on this machine, or a runtime is not installed or cannot do what is asked.
    """
    found = _named(names, settings)
    choose(settings, found)
    return found


def _named(names: str, settings: LatencySettings) -> list[torch.device]:
    if names != "auto":
        return list(dict.fromkeys(resolve_device(name.strip()) for name in names.split(",")))
    found = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    kinds = {kind for name in settings.runtimes for kind in RUNTIMES.get(name).devices}
    return [device for device in found if device.type in kinds] or found[:1]


def _same_shape(targets: Sequence[InputModel]) -> None:
    shapes = {target.name: "x".join(map(str, target.sample_shape)) for target in targets}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} takes {shape}" for name, shape in shapes.items())
        raise UsageError(f"expected models that take the same input, but {found}; give --input-shape for all of them")


def _unique(names: Sequence[str]) -> list[str]:
    """Names made different: a model timed against itself is a fair check of the timer."""
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]

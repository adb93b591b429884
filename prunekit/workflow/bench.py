"""The latency of models beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prunekit.context import resolve_device
from prunekit.errors import UsageError
from prunekit.measure import LatencySettings, count_macs, count_parameters, measure_latency
from prunekit.workflow.targets import Target, probe


def bench(targets: Sequence[Target], settings: LatencySettings, device: str = "auto") -> dict[str, Any]:
    """Times models alternately; the speedup of each is relative to the first.

    Args:
        targets: one or more models that take the same input.
        settings: batches, CPU threads, repeats.
        device: `auto` for the CPU, and CUDA where there is one; else one device.

    Returns:
        `models` (name -> `params`, `macs`), `latency` (rows: model, device, runtime, batch, threads, dtype, median_ms,
        p10_ms, p90_ms, p99_ms), `speedup` (rows: model, device, runtime, batch, threads, median, low, high), `notes`.

    Raises:
        UsageError: the models take inputs of different shapes, or the device does not exist.
        ModelError: a model does not run on its input.
    """
    _same_shape(targets)
    models = dict(zip(_unique([target.name for target in targets]), targets, strict=True))
    for target in targets:
        probe(target)
    report = measure_latency(
        {name: target.model for name, target in models.items()}, targets[0].sample_shape, settings, devices(device)
    )
    sizes = {
        name: {"params": count_parameters(target.model), "macs": count_macs(target.model, target.example_inputs())}
        for name, target in models.items()
    }
    return {
        "models": sizes,
        "latency": [dict(row) for row in report.rows],
        "speedup": [dict(row) for row in report.speedup],
        "notes": list(report.notes),
    }


def too_slow(latency: Sequence[dict[str, Any]], max_latency_ms: float) -> list[dict[str, Any]]:
    """The rows of the last-named model whose median is above a limit, in milliseconds for the whole batch."""
    last = latency[-1]["model"]
    return [row for row in latency if row["model"] == last and row["median_ms"] > max_latency_ms]


def devices(name: str) -> list[torch.device]:
    """The devices that a name stands for: `auto` is the CPU, and CUDA where there is one."""
    if name != "auto":
        return [resolve_device(name)]
    cuda = [torch.device("cuda", 0)] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *cuda]


def _same_shape(targets: Sequence[Target]) -> None:
    shapes = {target.name: "x".join(map(str, target.sample_shape)) for target in targets}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} takes {shape}" for name, shape in shapes.items())
        raise UsageError(f"expected models that take the same input, but {found}; give --input-shape for all of them")


def _unique(names: Sequence[str]) -> list[str]:
    """Names made different: a model timed against itself is a fair check of the timer."""
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]

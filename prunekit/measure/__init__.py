"""Measuring: accuracy, size, MACs and latency, each with its unit and its uncertainty.

Names are imported on first use (PEP 562): a process that only times a model starts without the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunekit.measure.latency import LatencyReport, measure_latency
    from prunekit.measure.scoring import Scores, evaluate, wilson_interval
    from prunekit.measure.size import count_bytes, count_macs, count_memory, count_parameters, size_bytes
    from prunekit.settings.latency import LatencySettings

_PLACES = {
    "LatencyReport": "prunekit.measure.latency",
    "LatencySettings": "prunekit.settings.latency",
    "Scores": "prunekit.measure.scoring",
    "count_bytes": "prunekit.measure.size",
    "count_macs": "prunekit.measure.size",
    "count_memory": "prunekit.measure.size",
    "count_parameters": "prunekit.measure.size",
    "evaluate": "prunekit.measure.scoring",
    "measure_latency": "prunekit.measure.latency",
    "size_bytes": "prunekit.measure.size",
    "wilson_interval": "prunekit.measure.scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'prunekit.measure' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


__all__ = [
    "LatencyReport",
    "LatencySettings",
    "Scores",
    "count_bytes",
    "count_macs",
    "count_memory",
    "count_parameters",
    "evaluate",
    "measure_latency",
    "size_bytes",
    "wilson_interval",
]

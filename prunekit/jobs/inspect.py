"""The inspection of a model: which channels are coupled or locked, which blocks may go, and where its MACs are."""

from __future__ import annotations

from typing import Any

from prunekit.channels.channel_map import ChannelMap
from prunekit.channels.trace import trace
from prunekit.jobs.run.model_sources import InputModel, probe
from prunekit.measure.model_size import count_macs, count_parameters


def inspect(target: InputModel) -> dict[str, Any]:
    """Trace a model, and return its channel groups, locks, blocks and layers."""
    probe(target)
    channel_map = trace(target.model, target.example_inputs())
    return {
        "model": target.name,
        "architecture": type(target.model).__name__,
        "input_shape": [1, *target.sample_shape],
        "params": count_parameters(target.model),
        "macs": count_macs(target.model, target.example_inputs()),
        "free_share": channel_map.free_share(name for name, _ in target.model.named_parameters()),
        "groups": [
            {"name": group.name, "channels": len(group.labels), "axes": len(group.slots)}
            for group in channel_map.groups
        ],
        "locks": [
            {"module": lock.module, "operator": lock.operator, "channels": lock.channels, "reason": lock.reason}
            for lock in channel_map.locks
        ],
        "blocks": channel_map.block_rows(),
        "block_locks": [{"block": lock.name, "reason": lock.reason} for lock in channel_map.branches.locks],
        "layers": _layers(target, channel_map),
    }


def _layers(target: InputModel, channel_map: ChannelMap) -> list[dict[str, Any]]:
    modules = dict(target.model.named_modules())
    rows = []
    for path, macs in channel_map.layer_macs().items():
        own = sum(parameter.numel() for parameter in modules[path].parameters(recurse=False))
        rows.append({"module": path, "kind": type(modules[path]).__name__, "macs": macs, "params": own})
    return rows

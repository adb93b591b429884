"""The tables of a run: rows of `layers.csv`, `scores.csv`, `locks.csv`, `history.csv` and others."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from torch import nn

from prunekit.planning.candidates import Scores
from prunekit.planning.plan import Plan

SIZES = (("in_channels", "out_channels"), ("in_features", "out_features"), ("num_features", "num_features"))


def layer_rows(dense: nn.Module, compact: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Return widths, MACs (one sample) and parameters of every layer with a width, before and after pruning.

    Widths after are 0 for a layer of a block that is gone; what is left of its parameters is the constant in its place.
    """
    chart, small = plan.channel_map, dict(compact.named_modules())
    before, after = chart.layer_macs(), chart.layer_macs(plan.keep)
    rows = []
    for path, module in dense.named_modules():
        names = next((pair for pair in SIZES if hasattr(module, pair[0])), None)
        if names is None or any(module.children()):
            continue
        there = chart.is_present(path, plan.keep)
        rows.append(
            {
                "module": path,
                "kind": type(module).__name__,
                "in_before": getattr(module, names[0]),
                "in_after": getattr(small[path], names[0]) if there else 0,
                "out_before": getattr(module, names[1]),
                "out_after": getattr(small[path], names[1]) if there else 0,
                "macs_before": before.get(path, 0),
                "macs_after": after.get(path, 0),
                "params_before": _size(module),
                "params_after": _size(small[path]) if path in small else 0,
            }
        )
    return rows


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def score_rows(plan: Plan, scores: Scores) -> list[dict[str, Any]]:
    """Return the score of every free label, by group, and whether it is kept."""
    return [
        {"group": group.name, "channel": index, "score": float(scores[label]), "kept": int(plan.keep[label])}
        for group in plan.channel_map.groups
        for index, label in enumerate(group.labels)
        if np.isfinite(scores[label])
    ]


def coupling_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return every axis of a parameter or buffer that carries channels of a group.

    Axis 0 of a weight is a module's output, the others its input; in transposed convolutions it is the other way round.
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in plan.channel_map.labels)
    positions = {module: position for position, module in enumerate(modules)}
    rows = []
    for group in plan.channel_map.groups:
        kept = int(np.count_nonzero(plan.keep[group.labels]))
        for name, axis in group.slots:
            module, _, tensor = name.rpartition(".")
            row = {"group": group.name, "channels": len(group.labels), "kept": kept, "module": module}
            rows.append(row | {"tensor": tensor, "axis": axis, "position": positions[module]})
    return rows


def lock_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return every lock with its module, operator and reason."""
    return [asdict(lock) for lock in plan.channel_map.locks]


SCORE_COLUMNS = ("group", "channel", "score", "kept")


COUPLING_COLUMNS = ("group", "channels", "kept", "module", "tensor", "axis", "position")


LOCK_COLUMNS = ("reason", "module", "operator", "channels")

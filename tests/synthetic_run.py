"""A run folder with made-up figures, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

LAYER_NUMBERS = [f"{name}_{when}" for name in ("in", "out", "macs", "params") for when in ("before", "after")]
SETTINGS = {"runtime": "eager", "threads": 1, "dtype": "float32"}


def metrics() -> dict[str, Any]:
    rows = [
        {"model": model, "device": "cpu", "batch": batch, "median_ms": ms, "p10_ms": ms * 0.97, "p90_ms": ms * 1.08}
        | {"p99_ms": ms * 1.3, **SETTINGS}
        for model, batch, ms in (("dense", 1, 9.1), ("pruned", 1, 5.2), ("dense", 16, 40.4), ("pruned", 16, 18.3))
    ]
    accuracy = {
        "dense": {"top1": 98.7, "low": 97.43, "high": 99.35, "correct": 533, "n_test": 540},
        "control": {"top1": 98.89, "low": 97.6, "high": 99.49, "correct": 534, "n_test": 540},
        "pruned": {"top1": 98.52, "low": 97.1, "high": 99.25, "correct": 532, "n_test": 540},
    }
    sizes = {"params": 21_289_802, "macs": 74_973_184, "size_bytes": 85_230_000}
    return {
        "dense": {**sizes, "top1": 98.7, "n_test": 540},
        "control": {**sizes, "top1": 98.89, "n_test": 540},
        "pruned": {"params": 9_412_000, "macs": 33_700_000, "size_bytes": 37_700_000, "top1": 98.52, "n_test": 540},
        "accuracy": accuracy,
        "sparsity": {"weights": 0.557, "channels": 0.331},
        "latency": rows,
        "speedup": [
            {"device": "cpu", "batch": batch, "median": ratio, "low": ratio - 0.05, "high": ratio + 0.06, **SETTINGS}
            for batch, ratio in ((1, 1.74), (16, 2.21))
        ],
        "plan": {"budgets": {"macs": {"asked": 0.45, "left": 0.4495, "dense": 1.0}}, "binding": "macs"},
        "parity": {"max_relative_difference": 3.1e-15},
        "latency_notes": ["no CUDA device"],
        "shortfalls": [],
        "seconds": 174.2,
    }


def write_run(folder: Path, *, groups: int = 30, only: Collection[str] | None = None) -> Path:
    """Writes a run folder.

    Args:
        only: tables that it has, by name; None for all. Figures of what is not there take no time to draw.
    """
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    times = {"finished": "2026-11-20T11:02:54+00:00"}
    status = {**times, "state": "finished", "started": "2026-11-20T11:00:00+00:00"}
    environment = {"python": "3.11.7", "torch": {"version": "2.15.0", "threads": 1}, "devices": ["cpu"]}
    for name, value in (("status", status), ("metrics", metrics()), ("environment", environment)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "recipe.yaml").write_text("name: resnet34\nprune:\n  budget:\n    macs: 0.45\n")
    wanted = {name: rows for name, rows in tables(random, groups).items() if only is None or name in only}
    for name, rows in wanted.items():
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    return folder


def tables(random: np.random.Generator, groups: int) -> dict[str, list[dict[str, Any]]]:
    widths = [2 ** (6 + index * 4 // groups) for index in range(groups)]
    return {
        "layers": [
            {"module": f"layer{index * 4 // groups + 1}.{index}.conv1", "kind": "Conv2d", "in_before": width}
            | {"in_after": width * 2 // 3, "out_before": width, "out_after": width * (4 + index % 4) // 8}
            | {"macs_before": width * 9000, "macs_after": width * 4000}
            | {"params_before": width * 576, "params_after": width * 300}
            for index, width in enumerate(widths)
        ]
        + [
            dict.fromkeys(LAYER_NUMBERS, 64)
            | {"module": "bn1", "kind": "BatchNorm2d", "macs_before": 0, "macs_after": 0}
        ],
        "history": [
            {"run": run, "epoch": epoch, "lr": 0.05, "train_loss": start / (epoch + 1), "train_top1": 90.0}
            | {"validation_loss": 1.1 * start / (epoch + 1), "validation_top1": 99 - 20 * start / (epoch + 1) ** 2}
            | {"images_per_s": 900.0, "seconds": 6.0}
            for run, epochs, start in (("baseline", 8, 2.0), ("pruned", 4, 0.9), ("control", 4, 0.2))
            for epoch in range(epochs)
        ],
        "scores": [
            {"group": f"layer{index * 4 // groups + 1}.{index}.conv1", "channel": channel, "score": score}
            | {"kept": int(score > 0.9)}
            for index in range(groups)
            for channel, score in enumerate(random.normal(1, 0.2, 64))
        ],
        "coupling": [
            {"group": f"layer{index * 4 // groups + 1}.{index}.conv1", "channels": 64, "kept": 40}
            | {"module": f"layer{at * 4 // groups + 1}.{at}.conv1", "tensor": "weight"}
            | {"axis": at - index, "position": at}
            for index in range(groups)
            for at in (index, index + 1)
            if at < groups
        ],
        "locks": [
            {"module": "fc", "operator": "aten.addmm", "channels": 10, "reason": "output of the model"},
            {"module": "", "operator": "", "channels": 3, "reason": "input <of> the model & its 'channels'"},
        ],
        "latency_samples": [
            {"model": row["model"], "device": "cpu", "batch": row["batch"], "ms": ms, **SETTINGS}
            for row in metrics()["latency"]
            for ms in row["median_ms"] * random.lognormal(0, 0.04, 30)
        ],
    }

"""A job of the user's own network, in files that are written into a folder."""

from __future__ import annotations

from pathlib import Path

import prunekit as pk

RECIPE = """
name: mine
data: {image_size: 8, batch: 64}
calibration: {images: 48}
prune: {budget: {macs: 0.5}, criterion: elimination, scope: per_mac}
repair: {}
finetune: {epochs: 0}
latency: {batches: [1], repeats: 5, explain: false}
device: cpu
threads: 1
"""
CODE = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 10))
"""
MINE = ("mine.yaml", "--model", "own.py:net")
"""Arguments of a command that runs the job."""
OWN = pk.Own("own.py:net")


def write_job(folder: Path, recipe: str = RECIPE, code: str = CODE) -> None:
    """Write the recipe and the network's code."""
    (folder / "own.py").write_text(code, encoding="utf-8")
    (folder / "mine.yaml").write_text(recipe, encoding="utf-8")

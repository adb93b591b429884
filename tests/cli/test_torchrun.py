"""`torchrun -m prunekit`: the command as a launcher starts it, in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
name: tiny
model: {name: net, zoo: own}
data: {image_size: 16, batch: 128}
baseline: {epochs: 1, lr: 0.05}
calibration: {images: 128, fused: false}
prune: {budget: {macs: 0.6}, criterion: l2, scope: global}
finetune: {epochs: 1, lr: 0.02}
latency: {batches: [1], threads: [1], repeats: 5, explain: false}
device: cpu
threads: 1
"""
NET = """
from torch import nn


def net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )
"""


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "several.py").write_text(NET)
    (folder / "tiny.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "prunekit"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )


def test_finetune_in_two_processes(tmp_path: Path) -> None:
    done = launched(tmp_path, "finetune", "tiny.yaml", "--model", "several.py:net", "--json")
    result = json.loads(done.stdout)  # one object: one process has written
    assert done.returncode == bool(result["shortfalls"]), done.stderr
    assert result["environment"]["processes"] == 2
    assert result["pruned"]["n_test"] == 539
    (folder,) = (each for each in (tmp_path / "runs" / "tiny").iterdir() if each.name != "calibration")
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert (folder / "report.html").is_file()
    for line in ("run: ", "baseline: training several.py:net on 1079 images", "verify: masked == compact"):
        assert done.stderr.count(line) == 1
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("finetune", "tiny.yaml", "data.batch=2"),
            "data.batch: expected at least 4, two images for each of 2 processes",
        ),
        (("inspect", "resnet18"), "inspect: expected a single process, but a launcher started several"),
    ],
)
def test_what_is_wrong_is_said_once(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    model = ("--model", "several.py:net") if arguments[0] == "finetune" else ()
    done = launched(tmp_path, *arguments, *model)
    assert done.returncode != 0
    assert done.stderr.count("prunekit: error: ") == 1, done.stderr
    assert f"prunekit: error: {said}" in done.stderr

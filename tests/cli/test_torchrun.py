"""`torchrun -m prunekit` and `accelerate launch -m prunekit`: the command in two processes, as launchers start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from process_group import together

from prunekit.cli import cli
from prunekit.distributed.process_group import rank

RECIPE = """
name: tiny
model: {name: net, zoo: own}
data: {image_size: 8, batch: 128}
baseline: {epochs: 1, lr: 0.05}
calibration: {images: 128}
prune: {budget: {macs: 0.6}, criterion: l2, scope: global}
finetune: {epochs: 1, lr: 0.02}
checkpoint: {every_steps: 2}
latency: {batches: [1], threads: [1], repeats: 5, explain: false}
device: cpu
threads: 1
"""
NET = """
import os
import signal
from pathlib import Path

from torch import nn


class Deadly(nn.Identity):
    def forward(self, images):
        if os.environ.get("KILLED") == os.environ["RANK"] and list(Path("runs").glob("tiny/*/resume/pruned/epoch*")):
            os.kill(os.getpid(), signal.SIGKILL)
        return images


def net():
    return nn.Sequential(
        Deadly(),
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )
"""


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate": (
        *(
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes=2",
            "--num_machines=1",
            "--main_process_port=0",
        ),
        *("--mixed_precision=no", "--dynamo_backend=no"),
    ),
}


def launched(launcher: str, folder: Path, *arguments: str, killed: str = "none") -> subprocess.CompletedProcess[str]:
    (folder / "several.py").write_text(NET)
    (folder / "tiny.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "-m", "prunekit", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    environment |= {"KILLED": killed, "PRUNEKIT_CACHE": str(folder / "cache")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
def test_finetune_in_two_processes_of_which_one_is_killed(tmp_path: Path) -> None:
    """One launcher's run goes on under the other: they say the same in the environment."""
    command = ("finetune", "tiny.yaml", "--model", "several.py:net", "--json")
    ended = launched("torchrun", tmp_path, *command, killed="1")
    assert ended.returncode != 0
    assert ended.stdout == ""
    (folder,) = (each.parent for each in (tmp_path / "runs" / "tiny").glob("*/status.json"))
    assert json.loads((folder / "status.json").read_text())["state"] != "finished"
    done = launched("accelerate", tmp_path, *command, "--resume", "auto")
    result = json.loads(done.stdout)  # one object: one process has written
    assert done.returncode == bool(result["shortfalls"]), done.stderr
    assert (result["environment"]["processes"], result["resumed"]) == (2, 1)
    assert result["pruned"]["n_test"] == 539
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert (folder / "report.html").is_file()
    assert ended.stderr.count("dense: training several.py:net on 1079 images") == 1
    for line in ("run: ", "pruned: resumed from ", "verify: masked == compact"):
        assert done.stderr.count(line) == 1
    assert "Warning" not in done.stderr


def refused(folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a command that cannot run, in one of several processes."""
    os.environ |= {"RANK": str(rank()), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    arguments = ["finetune", str(folder / "tiny.yaml"), "data.batch=2", "--model", f"{folder / 'several.py'}:net"]
    done = CliRunner().invoke(cli, arguments)
    return done.exit_code, done.stderr


@pytest.mark.slow
def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(NET)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    codes, each = zip(*together(2, tmp_path / "meet", refused, tmp_path), strict=True)
    said = "".join(each)
    assert all(codes)
    assert said.count("prunekit: error: ") == 1, said
    assert "prunekit: error: data.batch: expected at least 4, two images for each of 2 processes" in said

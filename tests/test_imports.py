"""What is imported when, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CORE = """
import sys
import torch
from torch import nn
import prunekit as pk

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))

x, model = torch.randn(2, 3, 4, 4), build().eval()
assert pk.trace(model, x).groups
assert len(pk.calibrate(model, [x, x]))
pk.calibrate(model, [x]).save("statistics")
plan = pk.plan(model, x, macs=0.5)
plan.save("plan")
assert pk.load_plan("plan").widths() == plan.widths()
with pk.masked(model, plan):
    model(x)
assert pk.verify(model, pk.compact(model, plan), plan, x).max_relative_difference < 1e-6
folder = pk.save(pk.prune(model, x, macs=0.5), "small")
assert pk.load(folder, model=build)[0].out_channels < 8
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pruner = pk.Pruner(model, optimizer, x, macs=0.5, steps=2)
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    pruner.step()
pruner.finish()
print(sorted({"pandas", "matplotlib", "tensorboard", "accelerate"} & set(sys.modules)))
"""
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("matplotlib", "tensorboard") else found(name, *more)
sys.meta_path.insert(0, Missing())
from prunekit.cli import main
main()
"""


@pytest.mark.slow
def test_the_core_runs_without_what_draws_and_tabulates(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert (tmp_path / "statistics" / "channel_stats.csv").read_text().startswith("module,side,call,channel,count,")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["finetune"], ["profile"], ["sensitivity"], ["visualize", "filters"]],
)
def test_jobs_say_at_once_what_pictures_need(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: job\nmodel: {name: resnet20, zoo: cifar}\ndata: {source: digits}\nbaseline: {epochs: 1}\n"
        "prune: {budget: {macs: 0.5}}\nfinetune: {epochs: 1}\n"
    )
    command = [sys.executable, "-c", WITHOUT, *arguments, "job.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    message = 'error: pictures and reports need matplotlib and tensorboard: pip install "prunekit[report]"'
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]

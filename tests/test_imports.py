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


JOB = """\
name: job
model: {name: resnet8, zoo: cifar}
data: {source: digits, image_size: 8, batch: 256}
baseline: {epochs: 4}
prune: {budget: {macs: 0.5}}
finetune: {epochs: 2}
latency: {repeats: 5, batches: [1]}
threads: 1
"""
LEFT_OUT = (
    'without figures and TensorBoard\'s events, which need matplotlib and tensorboard: pip install "prunekit[report]"'
)


def _without(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.slow
def test_a_job_runs_to_its_report_without_what_draws_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    plan = _without(tmp_path, "finetune", "job.yaml", "--dry-run")
    assert (plan.returncode, f"dry run: {LEFT_OUT}" in plan.stderr) == (0, True), plan.stderr
    done = _without(tmp_path, "finetune", "job.yaml")
    assert (done.returncode, LEFT_OUT in done.stderr) == (0, True), done.stderr
    run = next((tmp_path / "runs" / "job").glob("*/report.html")).parent
    assert not (run / "tensorboard").exists()
    assert list((run / "scalars").iterdir())
    again = _without(tmp_path, "report", str(run), "--output", "page.html")
    assert again.returncode == 0, again.stderr
    for page in (run / "report.html", tmp_path / "page.html"):
        text = page.read_text(encoding="utf-8")
        assert "Matplotlib, which draws the figures, is not installed" in text
        assert "<table" in text
        assert "<svg" not in text
        assert "This run has no" not in text

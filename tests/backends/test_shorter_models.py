"""Models without some of their blocks in folders that run without prunekit, and in the files of other runtimes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision

import prunekit as pk
from prunekit.compaction.compact_model import compact
from prunekit.planning.plan import Plan

ALONE = """
import sys, torch
sys.modules["prunekit"] = None
sys.path.insert(0, sys.argv[1])
from model import load
x, wanted = torch.load(sys.argv[2])
with torch.no_grad():
    print(float((load()(x) - wanted).abs().max() / wanted.abs().max()))
"""


@pytest.fixture(scope="module")
def small() -> tuple[torch.nn.Module, torch.Tensor]:
    """Without every other block: some are replaced by constants, others with the code around them."""
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_small(weights=None, num_classes=5).eval()
    x = torch.randn(1, 3, 32, 32)
    chart = pk.trace(model, x)
    keep = np.ones(chart.n_labels, dtype=bool)
    for branch in chart.branches.found[::2]:
        keep[branch.labels] = False
    plan = Plan(chart, keep)
    assert len(plan.gone) == 3
    return compact(model, plan).eval(), x


@pytest.mark.slow
def test_a_folder_runs_without_prunekit(small: tuple[torch.nn.Module, torch.Tensor], tmp_path: Path) -> None:
    model, x = small
    pk.export(model, x, to="standalone", path=tmp_path / "alone")
    with torch.no_grad():
        torch.save((x, model(x)), tmp_path / "wanted.pt")
    command = [sys.executable, "-c", ALONE, str(tmp_path / "alone"), str(tmp_path / "wanted.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1e-5


@pytest.mark.slow
def test_an_onnx_file_has_no_layer_of_what_is_gone(small: tuple[torch.nn.Module, torch.Tensor], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, x = small
    found = pk.export(model, x, to="onnx", path=tmp_path / "small.onnx")
    assert found.path.exists()
    kinds = [node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node]
    layers = sum(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    assert kinds.count("Conv") == layers

"""A job by the command, whose recipe names objects of the user's own: nothing of the package knows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from prunekit.cli import cli

CODE = """
import numpy as np
import prunekit as pk
from prunekit.backends.eager import placed


@pk.register_criterion("first", needs=("weights",), measures="how late a channel comes")
def late(evidence):
    return np.arange(evidence.channel_map.n_labels, dtype=float)


@pk.register_budget("weights", share=True, about="parameters of layers")
def weights(countable):
    return countable.terms("params")


@pk.register_runtime("plain", about="the module itself", times_layers=False)
def plain(source, sample, setting):
    module, sample = placed(source, sample, setting)
    return pk.Session(lambda: module(*sample))
"""
RECIPE = """\
name: own
model: {name: resnet8, zoo: cifar}
data: {image_size: 8}
baseline: {epochs: 0}
calibration: {images: 32}
prune:
  criterion: mine.py:late
  budget: {'mine.py:weights': 0.6}
latency: {batches: [1], threads: [1], repeats: 5, explain: false, runtimes: ['mine.py:plain']}
threads: 1
device: cpu
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "mine.py").write_text(CODE)
    (beside / "own.yaml").write_text(RECIPE)
    return beside / "own.yaml"


@pytest.mark.slow
def test_a_job_with_a_criterion_a_budget_and_a_runtime_of_ones_own(recipe: Path, tmp_path: Path) -> None:
    arguments = ["prune", str(recipe), "--output", str(tmp_path / "runs")]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 2
    assert all(f"own.yaml:{line}:" in refused.stderr for line in (7, 8, 9)), refused.stderr
    assert "--allow-code" in refused.stderr
    assert not (tmp_path / "runs").exists()
    done = CliRunner().invoke(cli, [*arguments, "--allow-code"])
    assert done.exit_code in (0, 1), done.output  # 1: it falls short of the dense model, which is not trained either
    assert "error:" not in done.stderr
    (run,) = (tmp_path / "runs" / "own").glob("2*")
    metrics = json.loads((run / "metrics.json").read_text())
    written = json.loads((run / "plan.json").read_text())["provenance"]
    mine = recipe.with_name("mine.py")
    assert written["prune"]["criterion"] == f"{mine}:late"
    assert written["budgets"][f"{mine}:weights"]["left"] <= 0.6
    assert {row["runtime"] for row in metrics["latency"]} == {f"{mine}:plain"}
    page = (run / "report.html").read_text()
    assert all(f"mine.py:{name}" in page for name in ("late", "weights", "plain"))
    again = CliRunner().invoke(cli, ["report", str(run)])  # runs none of it
    assert again.exit_code == 0, again.output

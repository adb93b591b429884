"""The commands that look into models, on examples of tasks: what they say, and which tasks they refuse."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch.utils.data import Subset

from prunekit.cli import cli

RECIPE = """
name: NAME
task: python:NAME:task
model: {name: own, zoo: own}
data: {source: own, batch: 16}
calibration: {images: 16}
prune: {budget: {macs: 0.5}}
baseline: {epochs: 1, optimizer: adamw, lr: 3e-3}
device: cpu
threads: 1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Run a command on an example's recipe, with a few of its samples."""
    example = importlib.import_module(name)
    small = tuple(Subset(part, range(count)) for part, count in zip(example.data(), (32, 8), strict=True))
    monkeypatch.setattr(example, "data", lambda: small)
    Path("mine.yaml").write_text(RECIPE.replace("NAME", name))
    own = [f"--{part}=python:{name}:{part}" for part in ("model", "data")]
    return CliRunner().invoke(cli, [*command.split(), "mine.yaml", *own, "--allow-code"])


@pytest.mark.slow
def test_sensitivity_is_measured_by_the_score_of_the_task(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("sensitivity --measured --groups 0", "pose", monkeypatch)
    assert done.exit_code == 0, done.output
    assert "Dense model on 3 validation images: PCK@0.1 " in done.stdout
    (folder,) = (here / "runs" / "pose" / "sensitivity").glob("2*")
    facts = json.loads((folder / "sensitivity.json").read_text())
    assert facts["images"] == 16
    assert facts["dense"].keys() == {"loss", "pck"}
    assert facts["measured"]["0"][0].keys() == {"kept", "error", "kl", "loss", "pck"}
    page = (folder / "report.html").read_text()
    assert "PCK@0.1" in page
    assert "top-1" not in page.lower()
    assert (folder / "sensitivity.csv").read_text().splitlines()[0].endswith(",kl,loss,pck")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_sensitivity_of_a_task_without_images_does_not_speak_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("sensitivity", "sentences", monkeypatch)
    assert done.exit_code == 0, done.output
    assert "most sensitive group first" in done.stdout
    assert "top-1" not in done.output.lower()
    assert "images" not in done.output

"""A run's folder holds its whole recipe and its report, whichever way it was started, and is found from anywhere."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import prunekit
from prunekit.cli import cli
from prunekit.errors import DataError, UsageError
from prunekit.jobs.analyses.sensitivity import analyze
from prunekit.jobs.finetune import prune_job
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.run.resume import resolved
from prunekit.models.zoo import build_model
from prunekit.recipe.loading import load
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings, dump
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def net():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(16, 2))


def samples():
    labels = torch.arange(96) % 2
    pixels = torch.randint(0, 100, (96, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    pixels = (pixels + 100 * labels[:, None, None, None]).to(torch.uint8)
    return TensorDataset(pixels[:64], labels[:64]), TensorDataset(pixels[64:], labels[64:])
"""


def silent(message: str) -> None:
    """A log that nobody reads."""


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that jobs are started in: data and weights lie below it, and the user's own code in it."""
    folder = tmp_path / "home"
    (folder / "inputs").mkdir(parents=True)
    labels = np.arange(120) % 2
    pixels = np.random.default_rng(0).integers(0, 100, (120, 8, 8, 3)) + 100 * labels[:, None, None, None]
    np.savez(folder / "inputs" / "two.npz", images=pixels.astype(np.uint8), labels=labels)
    torch.save(build_model(ModelSettings("resnet8", "cifar"), num_classes=2).state_dict(), folder / "inputs/dense.pt")
    (folder / "own.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    return folder


def job(**changes: Any) -> JobSettings:
    settings: dict[str, Any] = {
        "model": ModelSettings("resnet8", "cifar", weights="inputs/dense.pt"),
        "data": DataSettings("npz", root=Path("inputs/two.npz"), image_size=8, batch=16),
        "calibration": CalibrationSettings(images=32),
        "prune": PruneSettings(BudgetSettings(channels=0.6), criterion="l1"),
        "finetune": TrainSettings(epochs=1, lr=0.02),
        "control": False,
        "latency": LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        "device": "cpu",
        "threads": 1,
    }
    return JobSettings("either", **settings | changes)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "tfevents" not in path.name}


@pytest.mark.slow
def test_both_ways_in_leave_the_same_folder_and_it_is_found_from_anywhere(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = prunekit.finetune(job(), log=silent).folder.resolve()
    Path("mine.yaml").write_text(dump(job()), encoding="utf-8")
    done = command("finetune", "mine.yaml", "--json")
    assert done.exit_code in (0, 1), done.output
    shell = Path(json.loads(done.stdout)["folder"]).resolve()
    assert (python / "recipe.yaml").read_text() == (shell / "recipe.yaml").read_text()
    assert "finished" in (python / "report.html").read_text()
    assert files(python) == files(shell)
    assert load(python / "recipe.yaml") == resolved(job())

    monkeypatch.chdir(home.parent / "elsewhere")
    for run in (python, shell):
        tested = command("evaluate", str(run / "model"), "--json")
        assert json.loads(tested.stdout)["top1"] == json.loads((run / "metrics.json").read_text())["pruned"]["top1"]
    for words in (
        ["evaluate", str(python / "recipe.yaml")],
        ["report", str(python)],
        ["report", str(python), str(shell)],
    ):
        found = command(*words)
        assert found.exit_code == 0, (words, found.output)


@pytest.mark.slow
def test_runs_of_your_own_code_say_which(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Own(model="own.py:net", data="own.py:samples")
    mine = job(model=ModelSettings("anything", "own"), data=DataSettings("own", image_size=8, batch=16))
    mine = replace(mine, baseline=TrainSettings(epochs=1))
    run = prune_job(mine, log=silent, own=own).folder.resolve()
    text = (run / "recipe.yaml").read_text()
    options = dict(re.findall(r"^#   (--\w+) (.*)$", text, re.M))
    assert options == {"--model": f"{home / 'own.py'}:net", "--data": f"{home / 'own.py'}:samples"}
    assert load(run / "recipe.yaml") == resolved(mine, own)
    (again,) = re.findall(r"prunekit prune [^<\n]*recipe\.yaml[^<\n]*", (run / "report.html").read_text())
    assert shlex.split(again)[3:] == ["--model", options["--model"], "--data", options["--data"]]

    monkeypatch.chdir(home.parent / "elsewhere")
    refused = command("evaluate", str(run / "model"))
    assert (refused.exit_code, "--model file.py:factory" in refused.stderr) == (2, True), refused.output
    refused = command("evaluate", str(run / "model"), "--model", options["--model"])
    assert (refused.exit_code, "--data file.py:factory" in refused.stderr) == (2, True), refused.output
    words = [word for pair in options.items() for word in pair]
    tested = command("evaluate", str(run / "model"), *words, "--json")
    assert json.loads(tested.stdout)["top1"] == json.loads((run / "metrics.json").read_text())["pruned"]["top1"]
    assert command("evaluate", str(run / "recipe.yaml"), *words).exit_code == 0


@pytest.mark.slow
def test_an_analysis_from_python_is_whole_as_well(home: Path) -> None:
    run = analyze(job(), groups=["*conv1"], log=silent).folder
    assert load(run / "recipe.yaml") == resolved(job())
    assert "finished" in (run / "report.html").read_text()


def test_what_no_recipe_can_hold_is_refused_before_anything_runs(home: Path) -> None:
    model = ModelSettings("resnet18", arguments={"norm_layer": nn.InstanceNorm2d})
    with pytest.raises(UsageError, match=r"model\.arguments\.norm_layer: .* got type; .* factory of your own"):
        prune_job(job(model=model), log=silent)
    assert not Path("runs").exists()
    assert "width: 2.5" in dump(job(model=ModelSettings("resnet8", "cifar", {"width": np.float64(2.5)})))


def test_paths_of_a_recipe_are_the_shells_and_else_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "mine.yaml").write_text(dump(job()), encoding="utf-8")
    here = load("mine.yaml")
    assert (here.data.root, here.model.weights) == (Path("inputs/two.npz"), "inputs/dense.pt")
    there = home.parent / "elsewhere"
    monkeypatch.chdir(there)
    beside = load(Path("../home/mine.yaml"))
    assert beside.data.root is not None
    assert beside.data.root.resolve() == home / "inputs/two.npz"
    assert Path(str(beside.model.weights)).resolve() == home / "inputs/dense.pt"
    assert beside.output == Path("runs")  # results go where the command is run
    (there / "inputs").mkdir()
    (there / "inputs" / "two.npz").touch()
    assert load(home / "mine.yaml").data.root == Path("inputs/two.npz")


def test_an_override_is_the_shells_alone_and_what_is_nowhere_says_where_it_was_looked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "mine.yaml").write_text(dump(job()), encoding="utf-8")
    monkeypatch.chdir(home.parent / "elsewhere")
    given = load(home / "mine.yaml", ["data.root=inputs/two.npz"])
    assert given.data.root == Path("inputs/two.npz")
    with pytest.raises(DataError, match=r"elsewhere/inputs/two\.npz does not exist; .* here or beside the recipe"):
        prune_job(given, log=silent)
    weights = load(home / "mine.yaml", ["model.weights=inputs/dense.pt"])
    with pytest.raises(DataError, match=r"elsewhere/inputs/dense\.pt: there is no such file .* nor beside the recipe"):
        prune_job(weights, log=silent)

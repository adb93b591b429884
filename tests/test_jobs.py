"""Recipes run from Python: the folder of the command, a result that shows itself, and the sweeps of the guide."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from efforts import LITTLE

import prunekit as pk
from prunekit import recipe_jobs as jobs
from prunekit.cli import cli
from prunekit.errors import ArtifactError, RecipeError, UsageError
from prunekit.measure.measurement_effort import effort_of
from prunekit.recipe import loading as packaged
from prunekit.recipe.loading import load
from prunekit.settings.job import dump

GUIDE = Path(pk.__file__).parent / "guide" / "how_to" / "sweeps.md"
STAND_INS = Path(__file__).parent / "stand_ins"
SMALL = """# A job of seconds, in the place of the packaged one.
name: resnet34
model: {name: resnet8, zoo: cifar}
data: {image_size: 8, batch: 256}
baseline: {epochs: 1}
calibration: {images: 32}
prune: {budget: {macs: 0.5}}
finetune: {epochs: 2, lr: 0.02}
latency: {batches: [1], repeats: 5, explain: false}
watch: null
control: false
checkpoint: null
device: cpu
threads: 1
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory, in whose package the recipe `resnet34` is a small one."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "resnet34.yaml").write_text(SMALL)
    with effort_of(LITTLE), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PRUNEKIT_CACHE", str(folder / "cache"))
        patch.setattr(packaged, "folder", lambda: folder / "recipes")
        yield folder


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """The epochs of the run below."""
    return []


@pytest.fixture(scope="module")
def run(home: Path, seen: list[dict[str, Any]]) -> pk.RunResult:
    return pk.finetune("resnet34", {"prune.budget.macs": 0.4, "name": "python"}, on_epoch=seen.append)


@pytest.mark.slow
def test_python_and_command_leave_the_same_folder(run: pk.RunResult) -> None:
    done = CliRunner().invoke(cli, ["finetune", "resnet34", "prune.budget.macs=0.4", "name=python", "--json"])
    shell = Path(json.loads(done.stdout)["folder"])
    assert {path.name for path in run.folder.iterdir()} == {path.name for path in shell.iterdir()}
    assert (run.folder / "recipe.yaml").read_text() == (shell / "recipe.yaml").read_text()
    models = (folder / "model" / "model.safetensors" for folder in (run.folder, shell))
    assert next(models).read_bytes() == next(models).read_bytes()


@pytest.mark.slow
def test_a_result_shows_itself_and_loads_its_models(run: pk.RunResult, tmp_path: Path) -> None:
    assert repr(run).startswith(f"<RunResult: {run.folder}: MACs −6")
    assert len(repr(run)) < 200
    assert str(run.report) in str(run)
    assert "pruned against dense" in str(run)
    assert "<table" in run._repr_html_()
    assert [row["model"] for row in run.rows()] == ["dense", "pruned"]
    small, dense, x = run.model(), run.dense(), torch.zeros(1, 3, 8, 8)
    assert small(x).shape == dense(x).shape == (1, 10)
    assert sum(p.numel() for p in small.parameters()) == run.metrics["pruned"]["params"]
    assert sum(p.numel() for p in dense.parameters()) == run.metrics["dense"]["params"]
    assert run.plan.channel_map.macs(run.plan.keep) == run.metrics["pruned"]["macs"]
    assert run.shortfalls == run.metrics["shortfalls"]
    moved = shutil.copytree(run.folder / "model", tmp_path / "model").parent
    with pytest.raises(ArtifactError, match="expected the dense weights, but the run has not kept them"):
        replace(run, folder=moved).dense()


@pytest.mark.slow
def test_epochs_are_told_as_the_history_has_them(run: pk.RunResult, seen: list[dict[str, Any]]) -> None:
    assert [(row["run"], row["epoch"], row["epochs"]) for row in seen] == [
        ("baseline", 1, 1),
        ("pruned", 1, 2),
        ("pruned", 2, 2),
    ]
    columns = run.history[0].keys()  # a row that has nothing in a column is told without it
    told = [{key: math.nan if row.get(key) is None else row[key] for key in columns} for row in seen]
    assert run.history == [pytest.approx(row, nan_ok=True) for row in told]
    chosen = run.metrics["trainings"]["pruned"]
    assert run.validation == chosen["validation"] == seen[chosen["best_epoch"]]["validation_top1"]


@pytest.mark.slow
def test_what_looks_on_may_end_a_run(home: Path) -> None:
    class NotWorthIt(Exception):
        pass

    def on_epoch(row: dict[str, Any]) -> None:
        if row["run"] == "pruned":
            raise NotWorthIt("no")

    with pytest.raises(NotWorthIt, match="no"):
        pk.finetune("resnet34", {"name": "ended", "checkpoint": {}}, on_epoch=on_epoch)
    (folder,) = (home / "runs" / "ended").glob("2*")
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["error"]) == ("interrupted", "NotWorthIt: no")
    again = pk.finetune("resnet34", {"name": "ended", "checkpoint": {}}, resume="auto")
    assert again.folder.samefile(folder)
    assert again.validation is not None


def test_overrides_are_laid_over_settings_too(home: Path) -> None:
    job = load("resnet34")
    assert jobs.job_of(job) is job
    assert jobs.job_of(job, {"seed": 3}).seed == 3
    assert jobs.job_of("resnet34", {"output": Path("a b"), "prune.ignore": ("a", "b")}).prune.ignore == ("a", "b")
    assert jobs.job_of("resnet34", ["seed=3"]) == jobs.job_of("resnet34", {"seed": 3})
    assert jobs.job_of("resnet34", own=pk.Own(model="net.py:Net")).model.zoo == "own"
    with pytest.raises(RecipeError, match=r"override 'prune.budget.macs=7': prune.budget.macs: expected a number"):
        jobs.job_of(job, {"prune.budget.macs": 7})
    with pytest.raises(UsageError, match=r"model\.arguments\.width: expected a number"):
        jobs.job_of(job, {"model.arguments.width": torch.ones(1)})


@pytest.mark.slow
def test_the_other_commands_have_the_same_form(home: Path) -> None:
    (home / "mine.yaml").write_text(dump(load("resnet34")))
    quick = {"baseline.epochs": 0}
    assert jobs.calibrate("mine.yaml", quick).path.is_file()
    pruned = jobs.prune("mine.yaml", quick)
    assert pruned.validation is None
    assert not pruned.history
    assert pruned.metrics["fine_tuned"] is False
    assert jobs.sensitivity("mine.yaml", quick, groups=["layer1.*"]).folder.is_dir()


def library(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """The library itself where it is installed, else a stand-in with its signatures."""
    if find_spec(name) is None:
        patch.syspath_prepend(STAND_INS)
        patch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    patch.setitem(sys.modules, name, module)
    return module


def block(name: str, what: str = "pk.finetune") -> str:
    """The guide's code for a library, with two trials for twenty."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    found = next(text for text in blocks if f"import {name}\n" in text and what in text)
    return re.sub(r"(n_trials|count)=20", r"\1=2", str(found))


def executed(name: str, what: str = "pk.finetune") -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block(name, what), str(GUIDE), "exec"), names)
    return names


@pytest.mark.slow
def test_a_run_from_python_runs_as_written(home: Path) -> None:
    first = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)[0]
    names: dict[str, Any] = {}
    exec(compile(first, str(GUIDE), "exec"), names)
    assert [row["epoch"] for row in names["epochs"] if row["run"] == "pruned"] == [1]


@pytest.mark.slow
def test_optuna_runs_as_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("optuna", monkeypatch)
    study = executed("optuna")["study"]
    assert len(study.trials) == 2
    assert 0 < study.best_value <= 100


@pytest.mark.slow
def test_weights_and_biases_runs_as_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb = library("wandb", monkeypatch)
    if not hasattr(wandb, "RUNS"):  # sweeps need a server
        monkeypatch.setattr(wandb, "sweep", lambda sweep, project: "sweep")
        monkeypatch.setattr(wandb, "agent", lambda sweep_id, function, count: None)
        executed("wandb")
        return
    executed("wandb")
    assert [run.config for run in wandb.RUNS] == [{"lr": 0.001}] * 2
    for run in wandb.RUNS:
        assert 0 < run.summary["validation"] <= 100
        assert [data["pruned/epoch"] for data in run.logged if "pruned/epoch" in data] == [1, 2]


@pytest.mark.slow
def test_mlflow_runs_as_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (home / "mlruns").as_uri())
    mlflow = library("mlflow", monkeypatch)
    executed("mlflow")
    if not hasattr(mlflow, "RUNS"):
        assert list((home / "mlruns").rglob("report.html"))
        return
    assert [run["params"] for run in mlflow.RUNS] == [{"finetune.lr": 0.005}, {"finetune.lr": 0.02}]
    for run in mlflow.RUNS:
        assert [step for key, _, step in run["metrics"] if key == "pruned/epoch"] == [1, 2]
        assert run["metrics"][-1][0] == "validation"
        assert (Path(run["artifacts"][0]) / "report.html").is_file()


def test_a_model_in_the_place_of_a_recipe_says_where_it_goes() -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"recipe: expected a file, .* got Linear; .* prunekit.prune\(model, x"):
        pk.finetune(model)


def test_stages_in_a_loop_of_ones_own_are_logged_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    mlflow = library("mlflow", monkeypatch)
    pruner = executed("mlflow", "pk.Pruner")["pruner"]
    assert pruner.done
    if hasattr(mlflow, "RUNS"):
        logged = [(step, value) for key, value, step in mlflow.RUNS[-1]["metrics"] if key == "macs_left"]
        assert logged == [(row["step"], row["macs_left"]) for row in pruner.rows()]

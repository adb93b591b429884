"""Which run is resumed, and which is refused."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_jobs import PLANNED, QUICK, folder_of, job

from prunekit.errors import ResumeError
from prunekit.jobs.finetune import finetune, prune_job
from prunekit.jobs.run.run_folder import alive
from prunekit.reading.text_files import read_json
from prunekit.settings.calibration import RepairSettings
from prunekit.settings.inputs import DataSettings
from prunekit.settings.train import TrainSettings
from prunekit.utils.files import write_json


def until_repair(output: Path, **changes: Any) -> Path:
    """The folder of a run that was interrupted before its repair."""

    def interrupt(message: str) -> None:
        if PLANNED in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_job(job(output, **QUICK | changes), log=interrupt)
    return folder_of(output)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an interrupted run, to be copied."""
    torch.set_num_threads(1)
    return until_repair(tmp_path_factory.mktemp("interrupted"))


@pytest.fixture
def left(interrupted: Path, tmp_path: Path) -> Path:
    """A copy, with an output folder of its own."""
    shutil.copytree(interrupted.parents[1], tmp_path / "runs")
    return tmp_path / "runs" / interrupted.relative_to(interrupted.parents[1])


def go_on(folder: Path, resume: str | Path | None = None, **changes: Any) -> list[str]:
    """Resumes until the plan is made again; returns what was logged."""
    said: list[str] = []

    def log(message: str) -> None:
        said.append(message)
        if PLANNED in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_job(job(folder.parents[1], **QUICK | changes), log=log, resume=resume or folder)
    return said


@pytest.mark.slow
def test_output_and_checkpoints_may_be_others(left: Path, tmp_path: Path) -> None:
    said = go_on(left, checkpoint=None)
    assert f"run: {left}, resumed" in said[0]
    assert said[-1] == f"run: {left} has not finished; --resume {left} goes on with it"
    assert f"run: {left}, resumed" in go_on(left, "auto")[0]
    assert f"run: {left}, resumed" in go_on(tmp_path / "else" / "small" / "time", left)[0]
    assert len(read_json(left / "status.json")["resumed"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 1}, ["recipe.seed: 0 there, 1 here", "model.weights: "]),
        ({"finetune": TrainSettings(epochs=0, lr=0.5)}, ["recipe.finetune.lr: 0.05 there, 0.5 here"]),
        ({"repair": RepairSettings()}, ["recipe.repair: None there, {"]),
        ({"data": DataSettings(image_size=32, batch=256, split_seed=3)}, ["recipe.data.split_seed: 0 there", "data: "]),
    ],
)
def test_a_run_of_another_recipe_is_refused(left: Path, changes: dict[str, Any], expected: list[str]) -> None:
    before = sorted(left.parents[1].rglob("*"))
    with pytest.raises(ResumeError, match="is of another recipe, plan or version") as caught:
        prune_job(job(left.parents[1], **QUICK | changes), log=lambda _: None, resume=left)
    lines = str(caught.value).splitlines()
    assert all(any(line.strip().startswith(text) for line in lines) for text in expected), lines
    assert sorted(left.parents[1].rglob("*")) == before
    said = go_on(left, "auto", **changes)
    assert said[0].startswith("resume: no run of this recipe")
    assert said[1].startswith(f"resume: {left} is unfinished, and was started otherwise: {expected[0]}")
    assert said[2].startswith("run: ")
    assert str(left) not in said[2]


@pytest.mark.slow
def test_another_version_is_refused_also_where_any_run_would_do(left: Path) -> None:
    path = left / "resume" / "run.json"
    write_json(path, read_json(path) | {"versions": {"prunekit": "0.0.1", "torch": "1.0"}})
    for resume in (left, "auto"):
        with pytest.raises(ResumeError, match="versions.torch: '1.0' there, '" + re.escape(torch.__version__)):
            prune_job(job(left.parents[1], **QUICK), log=lambda _: None, resume=resume)


def test_fine_tuning_does_not_go_on_with_a_run_that_has_none(left: Path) -> None:
    with pytest.raises(ResumeError, match="command: 'prune' there, 'finetune' here"):
        finetune(job(left.parents[1], **QUICK), log=lambda _: None, resume=left)


@pytest.mark.slow
def test_a_run_that_still_runs_is_left_alone(left: Path) -> None:
    status = read_json(left / "status.json")
    write_json(left / "status.json", status | {"state": "running"})  # by this very process
    assert alive(read_json(left / "status.json"))
    with pytest.raises(ResumeError, match=f"still running, as process {os.getpid()}; end that first"):
        prune_job(job(left.parents[1], **QUICK), log=lambda _: None, resume=left)
    said = go_on(left, "auto")
    assert said[0] == f"resume: {left} is of this recipe, and still runs"
    assert said[1].startswith("resume: no run of this recipe")
    write_json(left / "status.json", status | {"state": "running", "pid_since": 1.0})  # another, long ago
    assert not alive(read_json(left / "status.json"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "expected the folder of a run, with a status.json, or 'auto'"),
        (lambda folder: shutil.rmtree(folder / "resume"), "ended before it had anything to resume"),
        (
            lambda folder: write_json(
                folder / "status.json", read_json(folder / "status.json") | {"state": "finished"}
            ),
            "has finished; there is nothing to resume",
        ),
    ],
)
def test_a_folder_that_cannot_be_resumed_is_refused(left: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(left)
    with pytest.raises(ResumeError, match=message):
        prune_job(job(left.parents[1], **QUICK), log=lambda _: None, resume=left)


@pytest.mark.slow
def test_the_newest_run_of_the_recipe_is_taken(left: Path) -> None:
    older = left.with_name("20000101-000000")
    shutil.copytree(left, older)
    write_json(older / "status.json", read_json(older / "status.json") | {"started": "2000-01-01T00:00:00+00:00"})
    assert str(left) in go_on(left, "auto")[0]
    write_json(left / "status.json", read_json(left / "status.json") | {"state": "finished"})
    assert str(older) in go_on(left, "auto")[0]


@pytest.mark.slow
def test_a_run_goes_on_with_the_code_that_it_began_with_alone(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    code = "import numpy as np\n\n\ndef late(evidence):\n    return np.arange(float(evidence.channel_map.n_labels))\n"
    own.write_text(code)
    changes = {"prune": replace(job(tmp_path, **QUICK).prune, criterion=f"{own}:late")}
    folder = until_repair(tmp_path / "runs", **changes)
    own.write_text(code.replace("return ", "return -"))
    with pytest.raises(ResumeError, match=r"mine\.py:late"):
        prune_job(job(folder.parents[1], **QUICK | changes), log=lambda _: None, resume=folder)
    own.write_text(code)
    assert f"run: {folder}, resumed" in go_on(folder, **changes)[0]

"""A job that is killed in each of its stages, and resumed each time, ends as one that is not."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import safetensors.torch
import torch
from killing import die, forked, patched
from resume_jobs import folder_of, job

from prunekit import artifacts, states
from prunekit.artifacts import read_json
from prunekit.workflow import finetune

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
SAID = {
    "calibrate": "calibration: reduction",
    "plan": "plan: 5",
    "repair": "repair: takes",
    "thresholds": "fine-tune: ",
    "compact": "verify: ",
    "measure": "test: control",
}
"""What is logged in the middle of a stage."""
TRAININGS = ("baseline", "pruned", "control")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process has written is there without waiting for the disk."""
    monkeypatch.setattr(artifacts, "_sync", lambda path: None)


def run(output: Path, dying: str = "", resume: str | None = "auto") -> None:
    """Runs the job, and is killed in a stage, in the third checkpoint of a training, or at the very end."""
    left, write = [3], states.save_tensors

    def log(message: str) -> None:
        if dying in SAID and message.startswith(SAID[dying]):
            die()

    def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        write(path, tensors)
        if path.parent.parent.name == dying:
            left[0] -= 1
            if not left[0]:
                path.write_bytes(path.read_bytes()[:100])
                die()

    with patched() as patch:
        patch.setattr(states, "save_tensors", save)
        finetune(job(output), log=log, resume=resume, finish=lambda _: die() if dying == "report" else None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed."""
    output = tmp_path_factory.mktemp("whole")
    assert forked(partial(run, output, resume=None)) == 0
    return folder_of(output)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed in each stage once."""
    output = tmp_path_factory.mktemp("resumed")
    stages = ("baseline", "calibrate", "plan", "repair", "thresholds", "pruned", "compact", "control", "measure")
    for stage in (*stages, "report"):
        assert forked(partial(run, output, stage)) == 9, stage
        assert read_json(folder_of(output) / "status.json")["state"] == "running"
    assert forked(partial(run, output)) == 0
    return folder_of(output)


def test_weights_are_bit_identical(whole: Path, resumed: Path) -> None:
    files = ["model/model.safetensors", "plan.safetensors", "statistics/channel_stats.safetensors"]
    files += [f"checkpoints/{name}.safetensors" for name in ("dense", "pruned", "control")]
    for name in files:
        one, other = (safetensors.torch.load_file(folder / name) for folder in (whole, resumed))
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == [], name


def test_every_figure_but_time_is_the_same(whole: Path, resumed: Path) -> None:
    for name in ("history", "clamps", "repair", "scores", "locks", "coupling", "layers"):
        one, other = (
            pd.read_csv(folder / f"{name}.csv").drop(columns=["images_per_s", "seconds"], errors="ignore")
            for folder in (whole, resumed)
        )
        pd.testing.assert_frame_equal(one, other, check_exact=True, obj=name)
    before, after = (read_json(folder / "metrics.json") for folder in (whole, resumed))
    for key in ("dense", "control", "pruned", "accuracy", "sparsity", "plan", "parity", "activations", "repair"):
        assert before[key] == after[key], key
    assert before["clamps"] == after["clamps"]
    assert (before["resumed"], after["resumed"]) == (0, 10)


def test_the_run_says_that_it_was_resumed_and_leaves_nothing_behind(whole: Path, resumed: Path) -> None:
    status = read_json(resumed / "status.json")
    assert (status["state"], len(status["resumed"])) == ("finished", 10)
    log = (resumed / "log.txt").read_text()
    assert log.count(", resumed; it was started") == 10
    for name in TRAININGS:
        assert f"{name}: resumed from {resumed / 'resume' / name}" in log
    assert log.count("baseline: training") == 2
    assert log.count("plan: that of the run") == 7  # once for each attempt after the plan was made
    assert log.count("repair: that of the run") == 6
    names = [path.relative_to(resumed).as_posix() for path in resumed.rglob("*")]
    known = [path.relative_to(whole).as_posix() for path in whole.rglob("*")]
    plain = [[name for name in found if "events.out" not in name] for found in (names, known)]
    assert sorted(plain[0]) == sorted(plain[1])
    assert not any(path.name == "resume" or path.name.startswith(".") for path in resumed.rglob("*"))
    assert len(list((resumed / "tensorboard" / "pruned").iterdir())) == 1

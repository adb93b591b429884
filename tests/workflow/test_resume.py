"""A job that is killed in each of its stages, and resumed each time, ends as one that is not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import safetensors.torch
import torch
from killing import die, forked, patched

from prunekit import artifacts, states
from prunekit.artifacts import read_json
from prunekit.calibration import CalibrationSettings
from prunekit.data import DataSettings
from prunekit.masking import ActivationSettings, ClampSettings
from prunekit.measure import LatencySettings
from prunekit.models import ModelSettings
from prunekit.planning import BudgetSettings, PruneSettings
from prunekit.repair import RepairSettings
from prunekit.training import CheckpointSettings, TrainSettings
from prunekit.workflow import JobSettings, finetune

KEEPING_ALL = CheckpointSettings(every_steps=1)
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


def job(output: Path, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="small",
        model=ModelSettings("resnet20", "cifar"),
        data=DataSettings(image_size=12, augment="shift", batch=128),
        baseline=TrainSettings(epochs=1, lr=0.05),
        calibration=CalibrationSettings(images=64),
        prune=PruneSettings(budget=BudgetSettings(macs=0.5), criterion="activation", scope="global"),
        repair=RepairSettings(),
        finetune=TrainSettings(
            epochs=1, lr=0.02, accumulate=2, optimizer="adam", clamp_weight_grad=ClampSettings(limit=0.01)
        ),
        activations=ActivationSettings(modules=("layer1.*relu*", "relu"), target=0.6),
        checkpoint=KEEPING_ALL,
        latency=LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )
    return replace(settings, **changes)


def run(output: Path, dying: str = "", resume: str | None = "auto", **changes: Any) -> None:
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
        finetune(job(output, **changes), log=log, resume=resume, finish=lambda _: die() if dying == "report" else None)


def folder_of(output: Path) -> Path:
    """The one run below an output folder."""
    (found,) = (path.parent for path in (output / "small").glob("*/status.json"))
    return found


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


QUICK: dict[str, Any] = {
    "model": ModelSettings("squeezenet1_1"),
    "data": DataSettings(image_size=32, batch=256),
    "baseline": TrainSettings(epochs=0),
    "repair": None,
    "activations": None,
    "finetune": TrainSettings(epochs=0),
}


def until_repair(output: Path, **changes: Any) -> Path:
    """The folder of a run that was interrupted before its repair."""

    def interrupt(message: str) -> None:
        if message.startswith("plan: 5"):
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
        if message.startswith("plan: 5"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_job(job(folder.parents[1], **QUICK | changes), log=log, resume=resume or folder)
    return said


def test_output_and_checkpoints_may_be_others(left: Path, tmp_path: Path) -> None:
    assert f"run: {left}, resumed" in go_on(left, checkpoint=None)[0]
    assert f"run: {left}, resumed" in go_on(left, "auto")[0]
    assert f"run: {left}, resumed" in go_on(tmp_path / "else" / "small" / "time", left)[0]
    assert len(read_json(left / "status.json")["resumed"]) == 3


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
    assert said[1].startswith("run: ")
    assert str(left) not in said[1]


def test_another_version_is_refused_also_where_any_run_would_do(left: Path) -> None:
    path = left / "resume" / "run.json"
    write_json(path, read_json(path) | {"versions": {"prunekit": "0.0.1", "torch": "1.0"}})
    for resume in (left, "auto"):
        with pytest.raises(ResumeError, match=rf"versions.torch: '1.0' there, '{torch.__version__}' here"):
            prune_job(job(left.parents[1], **QUICK), log=lambda _: None, resume=resume)


def test_fine_tuning_does_not_go_on_with_a_run_that_has_none(left: Path) -> None:
    with pytest.raises(ResumeError, match="command: 'prune' there, 'finetune' here"):
        finetune(job(left.parents[1], **QUICK), log=lambda _: None, resume=left)


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
        (lambda folder: shutil.rmtree(folder / "resume"), "ended before it had anything to go on with"),
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


def test_the_newest_run_of_the_recipe_is_taken(left: Path) -> None:
    older = left.with_name("20000101-000000")
    shutil.copytree(left, older)
    write_json(older / "status.json", read_json(older / "status.json") | {"started": "2000-01-01T00:00:00+00:00"})
    assert str(left) in go_on(left, "auto")[0]
    write_json(left / "status.json", read_json(left / "status.json") | {"state": "finished"})
    assert str(older) in go_on(left, "auto")[0]


def test_a_plan_that_was_exchanged_is_refused(tmp_path: Path) -> None:
    """The plan in the folder must be the one that the run made."""
    small = {**QUICK, "repair": RepairSettings(joint_steps=0), "calibration": CalibrationSettings(images=8)}

    def interrupt(message: str) -> None:
        if message.startswith("repair: "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_job(job(tmp_path, **small), log=interrupt)
    folder = folder_of(tmp_path)
    plan = prunekit.load_plan(folder)
    keep = plan.keep.copy()
    keep[next(iter(plan.channel_map.groups)).labels] = True
    replace(plan, keep=keep).save(folder)
    with pytest.raises(ResumeError, match=r"plan\.safetensors: not the plan that this run was made with"):
        prune_job(job(tmp_path, **small), log=lambda _: None, resume="auto")
    assert read_json(folder / "status.json")["state"] == "failed"

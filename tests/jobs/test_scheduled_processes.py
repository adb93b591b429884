"""Jobs that prune while they train, teach and average in several processes; and that are killed in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from killing import die
from process_group import together
from resume_jobs import require_same_tables, require_same_tensors
from safetensors.torch import load_file
from several_jobs import job, ran, written

import prunekit
from prunekit.distributed.process_group import rank
from prunekit.errors import ResumeError
from prunekit.jobs.finetune import finetune
from prunekit.jobs.run.command_subject import Own
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.inputs import DataSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import AverageSettings, CheckpointSettings, DistillSettings, FeatureSettings, TrainSettings
from prunekit.training.run_state import RunState

Finished = tuple[Path, dict[str, Any], list[str]]
SCHEDULE = ScheduleSettings("iterative", begin=0.3, end=1.0, rounds=2, regrow=True, freeze=1.4, rewind_lr=True)
CHANGES: dict[str, Any] = {
    "baseline": TrainSettings(epochs=1, lr=0.05),
    "data": DataSettings(image_size=8, batch=128),
    "calibration": CalibrationSettings(images=320),
    "prune": PruneSettings(
        BudgetSettings(macs=0.5), criterion="activation", scope="global", schedule=SCHEDULE, compact_early=True
    ),
    "finetune": TrainSettings(
        epochs=2,
        lr=0.02,
        distill=DistillSettings(features=FeatureSettings(modules=("4",))),
        average=AverageSettings(),
    ),
    "checkpoint": CheckpointSettings(every_steps=3),
}
WEIGHTS = ("dense", "pruned", "control")


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, factory: str) -> Finished:
    """A job in two processes that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    one, other = together(2, folder / "meet", ran, folder, factory, CHANGES)
    assert one[:2] == other[:2]
    return one


def unclocked(log: list[str]) -> list[str]:
    """The lines that do not come from a clock: how many of those there are hangs on how quiet the machine is."""
    return [line for line in log if not line.startswith("latency: ")]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 4])
def test_schedules_do_not_depend_on_the_number_of_processes(
    processes: int, whole: Finished, factory: str, tmp_path: Path
) -> None:
    found = together(processes, tmp_path / "meet", ran, tmp_path / "runs", factory, CHANGES)
    folder, metrics, log = found[0]
    assert [each[:2] for each in found] == [(folder, metrics)] * processes
    assert len(unclocked(log)) == len(unclocked(whole[2]))
    assert prunekit.load_plan(folder).digest == prunekit.load_plan(whole[0]).digest
    changes, expected = (pd.read_csv(each / "schedule.csv") for each in (folder, whole[0]))
    pd.testing.assert_frame_equal(changes, expected, check_exact=True)
    assert len(changes) >= 3
    assert changes["regrown"].any()
    assert metrics["plan"]["budgets"]["macs"]["left"] <= 0.5 * metrics["plan"]["budgets"]["macs"]["dense"]
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    early = whole[1]["compacted_early"]
    assert metrics["compacted_early"]["epoch"] == early["epoch"] == changes["epoch"].max() > SCHEDULE.begin
    for name in WEIGHTS:
        theirs = load_file(whole[0] / "checkpoints" / f"{name}.safetensors")
        for key, weight in load_file(folder / "checkpoints" / f"{name}.safetensors").items():
            torch.testing.assert_close(weight, theirs[key], rtol=1e-2, atol=1e-3, msg=f"{name}: {key}")


def killed(output: Path, factory: str, who: int, training: str) -> str:
    """One process is killed when a training's third checkpoint is due; what the others say."""
    left, write = [3], RunState._write

    def dying(self: RunState, *arguments: Any, **named: Any) -> None:
        assert self.checkpoints is not None
        left[0] -= self.checkpoints.folder.name == training
        if not left[0] and rank() == who:
            die()
        write(self, *arguments, **named)

    RunState._write = dying  # type: ignore[method-assign]
    try:
        ran(output, factory, CHANGES, "auto")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
def test_a_run_that_lost_a_process_goes_on_bit_identically(whole: Finished, factory: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for who, training in ((1, "pruned"), (0, "pruned-compact"), (1, "control")):
        (said,) = together(2, tmp_path / training, killed, runs, factory, who, training, killed=[who])
        assert said.startswith("RunError: another process has ended without a message")
        (status,) = (runs / "small").glob("*/status.json")
    with pytest.raises(ResumeError, match="processes: 2 there, 1 here"):
        finetune(job(runs, **CHANGES), log=print, own=Own(model=factory), resume="auto")
    (folder, metrics, log), _ = together(2, tmp_path / "again", ran, runs, factory, CHANGES, str(status.parent))
    assert folder == status.parent
    assert metrics["resumed"] == 3
    assert any(line.startswith("control: resumed from ") for line in log)
    require_same_tensors(whole[0], folder, "model/model", "plan", *(f"checkpoints/{name}" for name in WEIGHTS))
    require_same_tables(whole[0], folder, "history", "schedule", "scores", "layers")
    assert json.loads(status.read_text())["state"] == "finished"

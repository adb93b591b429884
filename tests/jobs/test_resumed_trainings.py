"""What sparsifies, prunes while training, teaches and averages is resumed together, in every training of a job."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from killing import forked
from resume_jobs import folder_of, job, require_same_tables, require_same_tensors, run

from prunekit.reading.text_files import read_json
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import (
    AverageSettings,
    CheckpointSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
TRAININGS = ("sparsified", "pruned", "control_before", "control")


def together(output: Path) -> JobSettings:
    schedule = ScheduleSettings(
        "iterative", begin=0.3, end=1.0, rounds=2, score="movement", regrow=True, freeze=1.8, rewind_lr=True
    )
    features = FeatureSettings(modules=("layer2",))
    return job(
        output,
        sparsify=TrainSettings(epochs=1, lr=0.02, regularize=RegularizerSettings("growing", every=2)),
        prune=PruneSettings(budget=BudgetSettings(macs=0.5), scope="global", schedule=schedule),
        repair=None,
        finetune=TrainSettings(
            epochs=2, lr=0.02, nesterov=True, distill=DistillSettings(features=features), average=AverageSettings()
        ),
        activations=None,
        checkpoint=CheckpointSettings(every_steps=2),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed."""
    output = tmp_path_factory.mktemp("whole_together")
    assert forked(partial(run, together(output), resume=None)) == 0
    return folder_of(output)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed in most trainings once, and when all was done."""
    output = tmp_path_factory.mktemp("resumed_together")
    for stage in ("sparsified", "pruned", "control", "report"):
        assert forked(partial(run, together(output), stage)) == 9, stage
    assert forked(partial(run, together(output))) == 0
    return folder_of(output)


@pytest.mark.slow
def test_weights_and_plan_are_bit_identical(whole: Path, resumed: Path) -> None:
    require_same_tensors(
        whole, resumed, "model/model", "plan", *(f"checkpoints/{name}" for name in ("dense", *TRAININGS))
    )


@pytest.mark.slow
def test_every_figure_but_time_is_the_same(whole: Path, resumed: Path) -> None:
    require_same_tables(whole, resumed, "history", "schedule", "scores", "coupling", "layers")
    before, after = (read_json(folder / "metrics.json") for folder in (whole, resumed))
    for key in ("dense", "control", "pruned", "accuracy", "sparsity", "plan", "parity", "schedule"):
        assert before[key] == after[key], key
    assert before["plan"]["budgets"]["macs"]["left"] <= 0.5 * before["plan"]["budgets"]["macs"]["dense"]
    assert (before["resumed"], after["resumed"]) == (0, 4)


@pytest.mark.slow
def test_plans_changed_while_training(whole: Path) -> None:
    changes = pd.read_csv(whole / "schedule.csv")
    assert len(changes) >= 2
    assert (changes["pruned"] > 0).any()

"""Fine-tuning of jobs that goes on with the compact model: the same training, faster."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import prunekit
from prunekit.jobs.run.baseline_cache import Baseline
from prunekit.jobs.run.job_subject import prepare
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.jobs.stages.job_schedule import JobSchedule
from prunekit.jobs.stages.training_stage import Finetuning, Trainings
from prunekit.pruning.plan_search import PlanSearch
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import (
    CheckpointSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)

SETTINGS = TrainSettings(
    epochs=2,
    lr=0.02,
    distill=DistillSettings(features=FeatureSettings(("layer1.0",))),
    regularize=RegularizerSettings("bn_l1"),
)


def tuned(folder: Path, schedule: ScheduleSettings | None, *, early: bool) -> tuple[Any, ...]:
    """Trains a random model: the masked one, what was said of it, the plan, the curve, and the log."""
    prune = PruneSettings(BudgetSettings(macs=0.4), schedule=schedule, compact_early=early)
    job = JobSettings(
        name="early",
        model=ModelSettings("resnet8", "cifar"),
        data=DataSettings(image_size=8, batch=64, test_share=0.7),
        baseline=TrainSettings(epochs=1),
        prune=prune,
        finetune=SETTINGS,
        checkpoint=CheckpointSettings(every_steps=1),
        device="cpu",
        threads=1,
        output=folder,
    )
    prepared = prepare(job)
    dense = prepared.model
    planned = PlanSearch.trace(dense, prepared.example_inputs, replace(prune, schedule=None)).find()
    log: list[str] = []
    run = RunFolder(folder, "", log.append)
    run.resume.mkdir(parents=True)
    trainings = Trainings(prepared, run, Baseline(dense, (), (), reused=False), progress=False)
    parts = None if schedule is None else JobSchedule(prepared, planned.plan, planned.scores, run)
    masked, said = Finetuning(prepared, run, trainings, parts).tune(copy.deepcopy(dense), planned.plan)
    plan = planned.plan if parts is None else parts.part.plan
    curve = [(row["epoch"], row["train_loss"], row["validation_loss"]) for row in trainings._history]
    return masked, said, plan, curve, log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "epoch"),
    [(None, 0.0), (ScheduleSettings("linear", rounds=2, end=1.4), 1.4)],
    ids=["one-shot", "schedule"],
)
def test_the_curve_is_that_of_masked_training(schedule: Any, epoch: float, tmp_path: Path) -> None:
    masked, nothing, plan, curve, _ = tuned(tmp_path / "masked", schedule, early=False)
    model, said, same, going_on, log = tuned(tmp_path / "early", schedule, early=True)
    assert nothing is None
    assert said["epoch"] == epoch
    assert said["max_relative_difference"] < 1e-12
    assert any(line.startswith(f"compact early: epoch {epoch:.2f}: masked == compact to") for line in log)
    assert (plan.keep == same.keep).all()
    assert going_on == [pytest.approx(row, rel=1e-4) for row in curve]
    assert len(curve) == 2
    weights = prunekit.compact(model, plan).state_dict()
    for name, value in prunekit.compact(masked, plan).state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-2, atol=1e-3, msg=name)
    for name, parameter in model.named_parameters():
        mask = plan.mask(name)
        assert mask is None or not (parameter * ~mask).any()
    assert (tmp_path / "early" / "resume" / "pruned-compact").exists() == (schedule is not None)
    before, after = (pd.read_csv(tmp_path / name / "scalars" / "pruned.csv") for name in ("masked", "early"))
    assert after["tag"].to_list() == before["tag"].to_list()  # of each epoch once, sparsity of each layer too
    rows = after["tag"].str.startswith("sparsity/")
    assert set(after["epoch"][rows]) == {1, 2}
    assert after["value"][rows].to_list() == before["value"][rows].to_list()
    assert after["value"][after["tag"] == "sparsity/all"].iloc[-1] > 0.2

"""Whole jobs that sparsify, distil and average, and train with the user's own optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from prunekit.errors import UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.jobs.finetune import finetune, prune_job
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.stages.calibration_stage import calibrate
from prunekit.planning.plan import load_plan
from prunekit.report.pages.run_page import write_report
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import (
    AverageSettings,
    DistillSettings,
    FeatureSettings,
    RegularizerSettings,
    TrainSettings,
)
from prunekit.training import rate_search

CODE = """
import torch
from torch import nn
from torch.optim import Optimizer


def block(inputs, outputs, stride):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Net(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem, self.body, self.last = block(3, 8, 2), block(8, 8, 1), block(8, 24, 2)
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.last(x + self.body(x)).mean((2, 3)))


class SignMomentum(Optimizer):
    '''Steps of one size along the sign of momentum, as Lion's are.'''

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum.sign(), alpha=group["lr"])


def sign_momentum():
    return SignMomentum


def not_one():
    return 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "learner.py"
    path.write_text(CODE, encoding="utf-8")
    return path


def job(output: Path, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="learning",
        model=ModelSettings("Net", "own"),
        data=DataSettings(image_size=8, batch=32),
        baseline=TrainSettings(epochs=3, lr=0.1),
        prune=PruneSettings(budget=BudgetSettings(channels=0.5)),
        finetune=TrainSettings(epochs=2, lr=0.05),
        latency=LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        threads=1,
        device="cpu",
        output=output,
    )
    return replace(settings, **changes)


GROWING = RegularizerSettings("growing", 10.0, every=2)
DISTILL = DistillSettings(0.5, 2.0, FeatureSettings(("body", "*.1"), 0.2))


@pytest.mark.slow
def test_a_job_sparsifies_distils_and_averages(file: Path, tmp_path: Path) -> None:
    finetuned = TrainSettings(epochs=2, lr=0.05, distill=DISTILL, average=AverageSettings(decay=0.9))
    sparsify = TrainSettings(epochs=2, lr=0.05, regularize=GROWING)
    log: list[str] = []
    whole = job(tmp_path, sparsify=sparsify, finetune=finetuned)
    result = finetune(whole, log=log.append, own=Own(f"{file}:Net"))
    folder, metrics = result.folder, result.metrics
    assert metrics["parity"]["max_relative_difference"] < 1e-9
    assert metrics["sparsity"]["channels"] == pytest.approx(0.5)
    epochs = pd.read_csv(folder / "history.csv").groupby("run")["epoch"].count().to_dict()
    assert epochs == {"baseline": 3, "sparsified": 2, "pruned": 2, "control_before": 2, "control": 2}
    assert metrics["stages"]["sparsify"] > 0
    assert "sparsify: growing, epochs: 2" in log
    assert metrics["pruned"]["top1"] > 70
    sizes = [removed_size(folder, name) for name in ("dense", "sparsified")]
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.slow
def test_a_learning_rate_is_found_and_the_run_says_which(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_search, "SHARE", 1.0)
    monkeypatch.setattr(rate_search, "STEPS", 2)
    log: list[str] = []
    found = finetune(job(tmp_path, finetune=TrainSettings(epochs=1, lr="auto")), log=log.append, own=Own(f"{file}:Net"))
    rows = pd.read_csv(found.folder / "rates.csv")
    assert list(rows) == ["run", "rate", "steps", "held_out_loss"]
    for name in ("pruned", "control"):
        trained = found.metrics["trainings"][name]
        tried = rows[rows["run"] == name]
        assert len(tried) == len(trained["rates"]) >= 4
        assert trained["lr"] in set(tried["rate"])
        assert trained["start"] is not None
        (line,) = [line for line in log if line.startswith(f"{name}: lr {trained['lr']:g} was taken")]
        assert f"of {len(tried) - 1} tried" in line
        assert line in write_report(found.folder).read_text()
        assert f"Training of {line}" in " ".join(str(found).split())


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_a_job_trains_for_int8_and_says_so(file: Path, tmp_path: Path, early: bool) -> None:
    settings = job(tmp_path, finetune=TrainSettings(epochs=1, lr=0.05, fake_quantize="int8"), control=False)
    log: list[str] = []
    pruning = replace(settings.prune, compact_early=early)
    result = finetune(replace(settings, prune=pruning), log=log.append, own=Own(f"{file}:Net"))
    assert result.metrics["parity"]["max_relative_difference"] < 1e-9
    assert result.metrics["trainings"]["pruned"]["fake_quantize"] == {"dtype": "int8", "layers": 4}
    said = "pruned: saw int8 in weights and inputs of 4 layers, also where epochs were compared"
    assert said in log
    assert f"{said}." in write_report(result.folder).read_text()
    assert "Training of pruned: saw int8" in str(result)
    assert count_hooks(result.model()) == 0


def removed_size(folder: Path, name: str) -> float:
    """Root mean square of the weights that a run's plan removes, in one of its checkpoints."""
    plan, weights = load_plan(folder), load_file(folder / "checkpoints" / f"{name}.safetensors")
    masks = {key: plan.mask(key) for key in weights if "running" not in key}
    gone = [weights[key][~mask.expand(weights[key].shape)] for key, mask in masks.items() if mask is not None]
    return float(torch.cat(gone).square().mean().sqrt())


@pytest.mark.slow
def test_group_lasso_comes_before_the_plan_and_without_training_is_left_out(file: Path, tmp_path: Path) -> None:
    lasso = TrainSettings(epochs=2, lr=0.05, regularize=RegularizerSettings("group_lasso", 3e-3))
    short = job(tmp_path, sparsify=lasso, finetune=TrainSettings(epochs=0))
    log: list[str] = []
    finetune(short, log=log.append, own=Own(model=f"{file}:Net"))
    order = [next(i for i, line in enumerate(log) if line.startswith(start)) for start in ("sparsify: group", "plan")]
    assert order == sorted(order)
    log.clear()
    prune_job(short, log=log.append, own=Own(model=f"{file}:Net"))
    assert "sparsify: left out, because it is training" in log


@pytest.mark.slow
def test_the_users_own_optimizer_trains_and_keeps_masks(file: Path, tmp_path: Path) -> None:
    own = Own(model=f"{file}:Net", optimizer=f"{file}:sign_momentum")
    lion = TrainSettings(epochs=3, lr=0.003, optimizer="own")
    result = finetune(job(tmp_path, baseline=lion, finetune=replace(lion, epochs=1)), log=lambda _: None, own=own)
    assert result.metrics["parity"]["max_relative_difference"] < 1e-9
    assert result.metrics["dense"]["top1"] > 50
    history = pd.read_csv(result.folder / "history.csv")
    assert np.isfinite(history["train_loss"]).all()


@pytest.mark.parametrize(
    ("changes", "own", "message"),
    [
        ({"finetune": TrainSettings(optimizer="own")}, {}, r"finetune\.optimizer is 'own': expected --optimizer file"),
        ({}, {"optimizer": "{}:sign_momentum"}, r"expected finetune\.optimizer, .* to be 'own', got 'sgd' and 'sgd'"),
        ({"finetune": TrainSettings(optimizer="own")}, {"optimizer": "{}:not_one"}, "an optimizer's class.*got int"),
        ({"finetune": TrainSettings(optimizer="own")}, {"optimizer": "{}:lion"}, "no function or class 'lion' here"),
        (
            {"finetune": TrainSettings(distill=DistillSettings(features=FeatureSettings(("boody",))))},
            {},
            r"distill\.features\.modules: 'boody' matches no module path.*'body'",
        ),
        ({"baseline": TrainSettings(distill=DISTILL)}, {}, r"baseline\.distill: .* the dense model is the teacher"),
        ({"finetune": TrainSettings(regularize=GROWING)}, {}, r"finetune\.regularize\.method: .*use it in `sparsify`"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    changes: dict[str, Any], own: dict[str, str], message: str, file: Path, tmp_path: Path
) -> None:
    given = {name: value.format(file) for name, value in own.items()}
    with pytest.raises(UsageError, match=message):
        finetune(job(tmp_path, **changes), log=lambda _: None, own=Own(model=f"{file}:Net", **given))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dense_model_that_is_not_trained_needs_no_optimizer(file: Path, tmp_path: Path) -> None:
    wanted = job(tmp_path, finetune=TrainSettings(optimizer="own"))
    assert calibrate(wanted, log=lambda _: None, own=Own(model=f"{file}:Net")).path.exists()

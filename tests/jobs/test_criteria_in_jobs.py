"""Every criterion gets in a job what it needs, and says from Python what to pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch.nn import functional as F

import prunekit
from prunekit.criteria.scoring import normalize, score
from prunekit.errors import UsageError
from prunekit.jobs.dry_run import dry_run
from prunekit.known_names import CRITERIA
from prunekit.pruning.plan_search import WEIGHTS_ALONE, importance
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings


def job(output: Path, criterion: Any) -> JobSettings:
    return JobSettings(
        name="criteria",
        model=ModelSettings("resnet8", zoo="cifar"),
        data=DataSettings(image_size=16),
        baseline=TrainSettings(epochs=0),
        calibration=CalibrationSettings(images=64),
        prune=PruneSettings(budget=BudgetSettings(macs=0.5), criterion=criterion, scope="global"),
        finetune=TrainSettings(epochs=0),
        latency=LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )


@pytest.mark.slow
def test_a_dry_run_plans_by_what_each_criterion_needs(tmp_path: Path) -> None:
    for criterion in ("lamp", "apoz", "taylor", "elimination"):  # weights, statistics, gradients, patches
        log: list[str] = []
        found = dry_run(job(tmp_path, criterion), log=log.append)
        assert found["macs_after"] <= 0.5 * found["macs_before"], criterion
        assert any("gradients of the loss on 64" in line for line in log) == (criterion == "taylor")
        assert any("Gram matrices of the patches of" in line for line in log) == (criterion == "elimination")


@pytest.mark.slow
def test_pruning_by_gradients_in_one_call() -> None:
    model = torchvision.models.resnet18(num_classes=4).train()
    x = torch.randn(4, 3, 32, 32)
    gradients = prunekit.collect_gradients(model, [(x, torch.arange(4))], F.cross_entropy)
    pruned = prunekit.prune(model, (x,), macs=0.5, criterion="taylor", gradients=gradients)
    assert pruned.max_relative_difference <= 1e-9
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(UsageError, match=r"'taylor' needs gradients .* pass gradients=collect_gradients"):
        prunekit.prune(model, (x,), macs=0.5, criterion="taylor")


def test_scores_are_normalized_only_where_layers_cannot_be_compared() -> None:
    comparable = {name for name in CRITERIA.declared if CRITERIA.get(name).comparable}
    assert comparable == {"lamp", "elimination", "taylor", "taylor2", "obd"}
    model = torchvision.models.resnet18(num_classes=4)
    chart = prunekit.trace(model, (torch.randn(1, 3, 32, 32),))
    for criterion, scope, normalized in (("l2", "global", True), ("l2", "uniform", False), ("lamp", "global", False)):
        settings = PruneSettings(criterion=criterion, scope=scope)  # type: ignore[arg-type]
        raw = score(criterion, model, chart)
        expected = normalize(raw, chart) if normalized else raw
        np.testing.assert_array_equal(importance(model, chart, settings, WEIGHTS_ALONE), expected)

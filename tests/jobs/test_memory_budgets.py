"""Budgets of memory in jobs: refused first, counted on the compact model, and planned again where that is more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from equivalence import Net, randomized
from torch import Tensor, nn
from torch.nn import functional as F

import prunekit
from prunekit.errors import PlanError
from prunekit.jobs.dry_run import dry_run
from prunekit.jobs.finetune import prune_job
from prunekit.measure.model_size import count_memory
from prunekit.pruning.plan_search import ATTEMPTS, Planned, PlanSearch
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import LatencySettings, Target
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings

MEMORY = PruneSettings(BudgetSettings(memory_mb=1.5, macs=0.9), target=Target(batch=8))
EXAMPLE = (torch.zeros(1, 5, 16),)


def job(output: Path, prune: PruneSettings = MEMORY) -> JobSettings:
    return JobSettings(
        "memory",
        model=ModelSettings("resnet20", "cifar"),
        data=DataSettings(image_size=16),
        baseline=TrainSettings(epochs=0),
        calibration=CalibrationSettings(images=32),
        prune=prune,
        latency=LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )


@pytest.mark.slow
def test_a_job_delivers_its_memory_and_says_so(tmp_path: Path) -> None:
    settings = job(tmp_path)
    planned = dry_run(settings, log=lambda _: None)
    result = prune_job(settings, log=lambda _: None)
    metrics = json.loads((result.folder / "metrics.json").read_text())
    loaded = prunekit.load(result.folder / "model")
    taken = count_memory(loaded, (torch.zeros(1, 3, 16, 16),), 8)
    assert 1.4e6 < metrics["pruned"]["memory_bytes"] == taken <= 1.5e6 < metrics["dense"]["memory_bytes"]
    found = metrics["plan"]["budgets"]["memory_mb"]
    assert found == {"asked": 1.5, "left": taken / 1e6, "dense": metrics["dense"]["memory_bytes"] / 1e6}
    assert planned["budgets"]["memory_mb"] == found
    assert planned["binding"] == metrics["plan"]["binding"] == "memory_mb"
    # A net with random weights knows nothing, and so small a one may run no faster: both are said, and nothing else.
    others = ("is not shown to be better than", "slower than the dense model")
    assert [text for text in metrics["shortfalls"] if not any(other in text for other in others)] == []


def test_what_cannot_be_had_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for refusing in (dry_run, prune_job):
        narrow = job(tmp_path, replace(MEMORY, budget=BudgetSettings(memory_mb=0.01)))
        with pytest.raises(PlanError, match=r"memory_mb: at most 0.01 MB was asked for, but .* no less than 0\.\d+ MB"):
            refusing(narrow, log=lambda _: None)  # type: ignore[operator]
        assert list(tmp_path.iterdir()) == []


def attention(net: Any, x: Tensor) -> Tensor:
    """Only the values lose positions, because the scores are scaled: then no fused kernel takes them."""
    q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (net.q, net.k, net.v))
    out = F.scaled_dot_product_attention(q, k, v)
    return net.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attentive() -> nn.Module:
    q, k, v = (nn.Linear(16, 32) for _ in range(3))
    return randomized(Net(attention, q=q, k=k, v=v, o=nn.Linear(32, 3))).eval()


def test_a_model_whose_kernel_refuses_narrow_values_is_refused_with_what_it_takes() -> None:
    model = attentive()
    dense = count_memory(model, EXAMPLE, 64) / 1e6
    settings = PruneSettings(BudgetSettings(memory_mb=0.9 * dense), target=Target(batch=64))
    with pytest.raises(PlanError, match=r"at most 0\.\d+ MB was asked for, but .* made for it takes 0\.\d+ MB; raise"):
        PlanSearch.trace(model, EXAMPLE, settings).find()


@pytest.mark.slow
def test_a_compact_model_with_other_operators_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows with one head need no copies, so that more channels can stay than was predicted."""
    model = randomized(torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5)).eval()
    example, aims = (torch.zeros(1, 3, 32, 32),), []

    tried = PlanSearch.try_plan

    def watched(search: PlanSearch, settings: PruneSettings, *rest: Any) -> Planned:
        aims.append(settings.budget.memory_mb)
        return tried(search, settings, *rest)

    monkeypatch.setattr(PlanSearch, "try_plan", watched)
    asked = count_memory(model, example, 16) / 2e6
    settings = PruneSettings(BudgetSettings(memory_mb=asked), scope="global", target=Target(batch=16))
    provenance = PlanSearch.trace(model, example, settings).find().plan.provenance
    assert 1 < len(aims) <= ATTEMPTS
    assert 0.95 * asked < provenance["budgets"]["memory_mb"]["left"] <= asked
    assert provenance["budgets"]["memory_mb"]["dense"] == 2 * asked
    assert provenance["prune"]["budget"]["memory_mb"] == asked == aims[0]

"""The compact model made ready to run, by a job: what it computes, how it lies, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import prunekit
from prunekit.errors import UsageError
from prunekit.jobs.finetune import prune_job
from prunekit.jobs.stages.deployment_stage import require_deployable
from prunekit.report.pages.run_page import write_report
from prunekit.settings.deployment import DeploySettings, LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_a_deployed_model_is_the_compact_one_folded_and_laid_out(tmp_path: Path) -> None:
    log: list[str] = []
    job = JobSettings(
        name="ready",
        model=ModelSettings("resnet8", "cifar"),
        data=DataSettings(image_size=16),
        baseline=TrainSettings(epochs=0),
        prune=PruneSettings(BudgetSettings(macs=0.6), criterion="l2"),
        deploy=DeploySettings(fold_batchnorm=True, channels_last=True),
        latency=LatencySettings(batches=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=tmp_path,
    )
    run = prune_job(job, log=log.append)
    small, ready = (prunekit.load(run.folder / name) for name in ("model", "deployed"))
    kernels = [module.weight for module in ready.modules() if isinstance(module, nn.Conv2d)]
    norms, left = (sum(isinstance(each, nn.BatchNorm2d) for each in model.modules()) for model in (small, ready))
    assert norms > left == 0
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in kernels)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        want, got = small.double()(images), ready.double()(images)
    assert float((want - got).abs().max() / want.abs().max()) < 1e-5  # the folder holds float32
    found = run.metrics["deployment"]
    assert (found["folded_norms"], found["norms_kept"], found["channels_last"]) == (norms, {}, True)
    assert found["inputs"] == 32
    assert found["max_relative_difference"] <= 1e-9
    assert 1e-9 < found["after_rounding"] < 1e-5
    assert run.metrics["deployed"]["macs"] == run.metrics["pruned"]["macs"]
    assert run.metrics["deployed"]["size_bytes"] < run.metrics["pruned"]["size_bytes"]
    layouts = {row["model"]: row["memory_format"] for row in run.metrics["latency"]}
    assert layouts == {"dense": "contiguous", "pruned": "contiguous", "deployed": "channels_last"}
    assert [row["model"] for row in run.metrics["speedup"]] == ["pruned", "deployed"]
    assert list(pd.read_csv(run.folder / "results.csv")["model"]) == ["dense", "pruned", "deployed"]
    assert any(line.startswith(f"deploy: {norms} norms folded, channels last") for line in log)
    page = write_report(run.folder).read_text()
    assert f"{norms} BatchNorms folded, channels last, equal to the pruned model" in page
    assert "deployed, channels_last" in page
    assert json.loads((run.folder / "deployed" / "prunekit.json").read_text())["channels_last"] is True


def prepared(model: nn.Module, *wanted: bool) -> Any:
    job = SimpleNamespace(deploy=DeploySettings(*wanted))
    return SimpleNamespace(job=job, model=model, example_inputs=(torch.randn(1, 3, 8, 8),))


def test_what_would_do_nothing_is_refused() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with pytest.raises(UsageError, match=r"deploy\.fold_batchnorm: .* \(it has none\).*; deploy\.channels_last: .*"):
        require_deployable(prepared(flat, True, True))
    apart = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))
    with pytest.raises(UsageError, match=r"2: what it reads is not the output of a convolution"):
        require_deployable(prepared(apart, True))
    require_deployable(prepared(apart, False, True))
    require_deployable(prepared(flat))
    require_deployable(prepared(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), True, True))

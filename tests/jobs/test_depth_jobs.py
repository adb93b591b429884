"""Whole jobs in which blocks go: what their files, their page and their log say of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import prunekit
from prunekit.jobs.dry_run import dry_run
from prunekit.jobs.finetune import finetune, prune_job
from prunekit.report.pages.run_page import lines, write_report
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import DeploySettings, LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import ActivationSettings, TrainSettings

WIDE = PruneSettings(BudgetSettings(macs=0.3), scope="per_mac", min_channels=14)
"""Widths alone leave more than this budget."""
Finished = tuple[Path, dict[str, Any], list[str]]


def job(output: Path, prune: PruneSettings, **changes: Any) -> JobSettings:
    settings: dict[str, Any] = {
        "model": ModelSettings("resnet20", "cifar"),
        "data": DataSettings(image_size=8, batch=64),
        "baseline": TrainSettings(epochs=1, lr=0.1),
        "calibration": CalibrationSettings(images=64),
        "finetune": TrainSettings(epochs=1, lr=0.05),
        "latency": LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        "control": False,
        "device": "cpu",
        "threads": 1,
        "output": output,
    }
    return JobSettings("shorter", prune=prune, **settings | changes)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def shorter(output: Path) -> Finished:
    log: list[str] = []
    settings = job(output, WIDE, activations=ActivationSettings(modules=("*relu*",), target=0.5))
    result = finetune(settings, log=log.append, finish=lambda folder: write_report(folder, state="finished"))
    return result.folder, result.metrics, log


@pytest.mark.slow
def test_metrics_and_log_name_the_blocks_that_are_gone(shorter: Finished) -> None:
    folder, metrics, log = shorter
    plan = prunekit.load_plan(folder)
    gone = [branch.name for branch in plan.gone]
    assert 0 < len(gone) < 9
    assert metrics["blocks"] == json.loads((folder / "metrics.json").read_text())["blocks"] == gone
    assert metrics["plan"]["blocks"] == 9
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    said = f"{len(gone)} of 9 blocks gone: {', '.join(gone)}"
    assert any(said in line for line in log)
    assert f"Blocks: {len(gone)} of 9 gone as a whole: {', '.join(gone)}" in lines(metrics, folder)
    assert not any(what in text for text in metrics["shortfalls"] for what in ("budget", "not measured"))


@pytest.mark.slow
def test_layers_of_a_block_that_is_gone_have_no_channels(shorter: Finished) -> None:
    folder, metrics, _ = shorter
    layers = pd.read_csv(folder / "layers.csv").set_index("module")
    inside = layers.index.str.rpartition(".").get_level_values(0).isin(metrics["blocks"])
    assert (layers.loc[inside, ["in_after", "out_after", "macs_after"]] == 0).all(axis=None)
    assert (layers.loc[~inside, ["in_after", "out_after"]] > 0).all(axis=None)
    assert layers["params_after"].sum() == metrics["pruned"]["params"]  # the constants that are left among them


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_the_page_draws_blocks_that_are_gone(shorter: Finished) -> None:
    folder, metrics, _ = shorter
    page = write_report(folder).read_text(encoding="utf-8")
    layers = 2 * len(metrics["blocks"])
    assert page.count('<tr class="gone">') == layers
    assert f"{layers} layers gone with their blocks" in page
    assert "gone with its block" in page


@pytest.mark.slow
def test_activation_masks_leave_out_what_does_not_run(shorter: Finished) -> None:
    _, metrics, _ = shorter
    masked = {row["module"] for row in metrics["activations"]["layers"]}
    assert masked
    assert not {f"{block}.relu1" for block in metrics["blocks"]} & masked


@pytest.mark.slow
def test_a_dry_run_names_the_blocks_that_would_go(output: Path) -> None:
    found = dry_run(job(output, replace(WIDE, criterion="l1")), log=lambda line: None)
    assert found["blocks"]
    assert all(row["out_after"] == 0 for row in found["widths"] if row["module"].rpartition(".")[0] in found["blocks"])


@pytest.mark.slow
def test_a_job_without_blocks_gone_says_nothing(output: Path) -> None:
    kept = PruneSettings(BudgetSettings(macs=0.6))
    log: list[str] = []
    result = prune_job(job(output, kept), log=log.append, finish=lambda folder: write_report(folder, state="finished"))
    assert result.metrics["blocks"] == []
    assert not any("block" in line for line in [*log, *lines(result.metrics, result.folder)])
    assert "gone with its block" not in result.report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_blocks_go_while_training_and_from_a_deployed_model(output: Path) -> None:
    prune = replace(WIDE, schedule=ScheduleSettings(rounds=2))
    result = finetune(
        job(output, prune, deploy=DeploySettings(fold_batchnorm=True)),
        log=lambda line: None,
        finish=lambda folder: write_report(folder, state="finished"),
    )
    assert result.metrics["blocks"]
    assert result.metrics["deployment"]["max_relative_difference"] <= 1e-9
    assert len(prunekit.load_plan(result.folder).gone) == len(result.metrics["blocks"])

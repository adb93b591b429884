"""Jobs without fine-tuning, and jobs that repair before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import prunekit
from prunekit.errors import DataError
from prunekit.jobs.finetune import RunResult, finetune, prune_job
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings

ELIMINATION = PruneSettings(BudgetSettings(macs=0.6), criterion="elimination", scope="per_mac")


def job(output: Path, **changes: Any) -> JobSettings:
    settings: dict[str, Any] = {
        "model": ModelSettings("resnet8", "cifar"),
        "data": DataSettings(image_size=8),
        "baseline": TrainSettings(epochs=2, lr=0.05),
        "calibration": CalibrationSettings(images=64),
        "prune": ELIMINATION,
        "repair": RepairSettings(rows=2048),
        "finetune": TrainSettings(epochs=1, lr=0.02),
        "latency": LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        "device": "cpu",
        "threads": 1,
        "output": output,
    }
    return JobSettings("without", **settings | changes)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the dense model is trained once."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(output: Path) -> tuple[RunResult, list[str]]:
    """A job without fine-tuning, and its log."""
    log: list[str] = []
    return prune_job(job(output), log=log.append), log


@pytest.mark.slow
def test_nothing_is_fine_tuned_and_all_is_proven(finished: tuple[RunResult, list[str]]) -> None:
    result, log = finished
    metrics = result.metrics
    assert metrics["pruned"]["macs"] <= 0.6 * metrics["dense"]["macs"]
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    assert metrics["repair"]["after"] < metrics["repair"]["before"]
    assert "control" not in metrics
    assert not (result.folder / "checkpoints" / "pruned.safetensors").exists()
    layers = pd.read_csv(result.folder / "repair.csv")
    assert metrics["repair"]["layers"] == len(layers) == 8
    assert metrics["repair"]["refitted"] == layers["applied"].notna().sum()
    assert set(pd.read_csv(result.folder / "history.csv")["run"]) == {"baseline"}
    assert not (result.folder / "statistics.safetensors").exists()  # which nothing asked for
    assert any(line.startswith("repair: output error on held-out images") for line in log)
    again = prunekit.load(result.folder / "model")
    assert json.loads((result.folder / "metrics.json").read_text())["pruned"]["params"] == sum(
        parameter.numel() for parameter in again.parameters()
    )


@pytest.mark.slow
def test_a_measurement_that_fails_costs_its_figure_and_not_the_run(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may run in training and not as a measurement runs it; what was trained must not hang on that."""

    def broken(*_: object, **named: object) -> None:
        raise AssertionError("Expected gradient function to be set")

    monkeypatch.setattr("prunekit.measure.model_size.count_macs", broken)
    monkeypatch.setattr("prunekit.jobs.stages.measurement_stage.measure_latency", broken)
    log: list[str] = []
    result = prune_job(job(output), log=log.append)
    assert prunekit.load(result.folder / "model") is not None
    assert json.loads((result.folder / "status.json").read_text())["state"] == "finished"
    assert (result.metrics["pruned"]["macs"], result.metrics["latency"]) == (None, [])
    assert result.metrics["pruned"]["top1"] > 0
    for what in ("MACs of the dense model", "MACs of the pruned model", "latency"):
        text = f"{what} not measured: AssertionError: Expected gradient function to be set"
        assert any(text in line for line in result.metrics["shortfalls"])
        assert any(text in line for line in log)
    assert "MACs of the pruned model not measured" in write_report(result.folder).read_text()


@pytest.mark.slow
def test_the_job_is_what_prune_makes_of_its_images(output: Path, finished: tuple[RunResult, list[str]]) -> None:
    from prunekit.jobs.run.baseline_cache import train_baseline
    from prunekit.jobs.run.job_subject import prepare

    settings, (result, _) = job(output), finished
    prepared = prepare(settings)
    dense = train_baseline(prepared, log=lambda _: None, progress=False).model
    images = prepared.calibration_images()
    same = prunekit.prune(dense, calibration=images, macs=0.6, repair=RepairSettings(rows=2048))
    loaded = prunekit.load(result.folder / "model").eval()
    assert [tensor.shape for tensor in loaded.state_dict().values()] == [
        tensor.shape for tensor in same.model.state_dict().values()
    ]
    with torch.no_grad():
        outputs, others = loaded(images), same.model.eval()(images)
    assert float((outputs - others).square().mean()) < 1e-5 * float(outputs.var())  # float32 sums in another order


@pytest.mark.slow
def test_fine_tuning_begins_where_repair_ends(output: Path, finished: tuple[RunResult, list[str]]) -> None:
    untrained = TrainSettings(epochs=0)
    repaired = finetune(job(output, finetune=untrained), log=lambda _: None)
    pruned, _ = finished
    for name, tensor in prunekit.load(repaired.folder / "model").state_dict().items():
        assert torch.equal(tensor, prunekit.load(pruned.folder / "model").state_dict()[name]), name
    trained = finetune(job(output), log=lambda _: None)
    assert trained.metrics["fine_tuned"]
    assert trained.metrics["parity"]["max_relative_difference"] <= 1e-9


@pytest.mark.slow
def test_without_repair_the_weights_that_stay_are_the_dense_ones(output: Path) -> None:
    plain = job(output, repair=None, prune=PruneSettings(BudgetSettings(macs=0.6), criterion="l2"))
    result = prune_job(plain, log=lambda _: None)
    assert result.metrics["repair"] is None
    plan = prunekit.load_plan(result.folder)
    from safetensors.torch import load_file

    dense = load_file(result.folder / "checkpoints" / "dense.safetensors")
    small = prunekit.load(result.folder / "model").state_dict()
    kept = torch.from_numpy(plan.kept("layer1.0.conv1.weight", 0))
    columns = torch.from_numpy(plan.kept("layer1.0.conv1.weight", 1))
    assert torch.equal(small["layer1.0.conv1.weight"], dense["layer1.0.conv1.weight"][kept][:, columns])


def test_too_few_images_are_refused(output: Path) -> None:
    with pytest.raises(DataError, match="expected at least 8 images"):
        prune_job(job(output, calibration=CalibrationSettings(images=5)), log=lambda _: None)

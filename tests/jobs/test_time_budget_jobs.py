"""Jobs with budgets of time, from the profile to the report, and profiles of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from efforts import LITTLE
from made_up_timings import time_by_macs
from torch import nn

from prunekit.channels.cut.shorter_model import AbsentModule, ConstantModule
from prunekit.channels.trace import trace
from prunekit.compaction.folded_norms import folds_of
from prunekit.errors import PlanError, UsageError
from prunekit.jobs.analyses.profile import profile_job
from prunekit.jobs.dry_run import dry_run
from prunekit.jobs.finetune import prune_job
from prunekit.jobs.run.command_subject import RECIPE_ONLY
from prunekit.jobs.run.job_subject import prepare
from prunekit.pruning import latency_budget_search
from prunekit.pruning.latency.device_clock import Timing
from prunekit.pruning.latency.latency_target import LatencyResult
from prunekit.pruning.plan_search import Planned
from prunekit.report.pages.profile_page import fitted
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import DeploySettings, LatencySettings, Target
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.settings.train import TrainSettings
from prunekit.utils.tensors import lies_channels_last


@pytest.fixture(autouse=True)
def _few(little_effort: None, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("PRUNEKIT_CACHE", str(cache))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that networks are measured once."""
    return tmp_path_factory.mktemp("cache")


def job(output: Path, speedup: float, **changes: Any) -> JobSettings:
    settings: dict[str, Any] = {
        "model": ModelSettings("resnet8", "cifar"),
        "data": DataSettings(image_size=32),
        "baseline": TrainSettings(epochs=0),
        "calibration": CalibrationSettings(images=64),
        "prune": PruneSettings(BudgetSettings(speedup=speedup), scope="per_mac"),
        "latency": LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        "device": "cpu",
        "threads": 1,
        "output": output,
    }
    return JobSettings("timed", **settings | changes)


@pytest.mark.slow
def test_a_job_delivers_what_was_measured_last_and_its_report_shows_the_attempts(tmp_path: Path) -> None:
    log: list[str] = []
    result = prune_job(job(tmp_path, 1.2), log=log.append, finish=lambda folder: write_report(folder, state="finished"))
    found = result.metrics["delivered"]
    assert found["asked"] == {"speedup": 1.2}
    assert found["excess"] == pytest.approx(1.2 / found["final"]["speedup"])
    assert 1 <= len(found["attempts"]) <= LITTLE.attempts
    # One figure for one thing: the table's speedup on the target is that of the budget, in the log as well.
    (speedup,) = result.metrics["speedup"]
    last = {key: found["final"][name] for key, name in (("median", "speedup"), ("low", "speedup_low"))}
    assert speedup.items() >= {**last, "high": found["final"]["speedup_high"]}.items()
    assert speedup["processes"] == found["final"]["processes"] == 1
    assert sum("the figure of the budget of time" in note for note in result.metrics["latency_notes"]) == 1
    shown = f"{speedup['median']:.2f}×" if speedup["stable"] else "unstable"
    assert any(line.startswith("latency: speedup of pruned (") and f"): {shown} [" in line for line in log)
    assert result.metrics["pruned"]["macs"] < result.metrics["dense"]["macs"]
    assert result.metrics["profile"]["networks"] == 10
    assert (
        any(
            text in shortfall for text in ("slower", "faster", "unstable") for shortfall in result.metrics["shortfalls"]
        )
        or found["within"]
    )
    assert json.loads((result.folder / "plan.json").read_text())["provenance"]["prune"]["budget"]["speedup"] == 1.2
    page = (result.folder / "report.html").read_text()
    assert "Asked for and delivered" in page
    assert page.split("Asked for and delivered")[1].split("</thead>")[0].count("<th>") == 6  # what fits a page
    assert "speedup 1.20× asked for" in page
    assert any("attempt 1: predicted" in line for line in log)
    assert any("measured last" in line for line in log)


@pytest.mark.slow
def test_what_is_deployed_is_what_a_job_delivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[nn.Module] = []

    deliver = latency_budget_search.TimedPlanSearch.deliver

    def spied(search: latency_budget_search.TimedPlanSearch, planned: Planned, model: nn.Module) -> LatencyResult:
        last.extend([search.latency.dense, model])
        return deliver(search, planned, model)

    monkeypatch.setattr(latency_budget_search.TimedPlanSearch, "deliver", spied)
    met = Timing(1.0, 0.9, 1.1, 1.21, 1.2, 1.22, True, ())  # small nets differ by less than the noise
    monkeypatch.setattr(latency_budget_search, "time_pair", lambda *_, **__: met)
    small: dict[str, Any] = {"baseline": TrainSettings(epochs=0), "data": DataSettings(image_size=16)}
    wanted = job(tmp_path, 1.2, deploy=DeploySettings(fold_batchnorm=True, channels_last=True), **small)
    result = prune_job(wanted, log=lambda text: None)
    assert len(last) == 2
    assert all(lies_channels_last(model) for model in last)
    dense, delivered = (set(folds_of(model)) for model in last)
    assert len(dense) == 7
    gone = AbsentModule, ConstantModule  # blocks may have gone
    assert delivered == dense & {name for name, module in last[1].named_modules() if not isinstance(module, gone)}
    assert delivered
    assert result.metrics["delivered"]["deployed"] == "BatchNorm folded and channels last"
    assert not [row for row in result.metrics["profile"]["layers"] if ".bn" in row["module"]]
    page = write_report(result.folder).read_text()
    assert "both as they are deployed (BatchNorm folded and channels last)" in page


@pytest.mark.slow
def test_a_dry_run_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time_by_macs(monkeypatch)
    found = dry_run(job(tmp_path, 1.2), log=lambda text: None)
    assert found["binding"] == "speedup"
    assert found["budgets"]["speedup"]["left"] >= 1.2


@pytest.mark.slow
def test_a_dry_run_that_measures_nothing_takes_a_profile_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    measured = dry_run(job(tmp_path, 1.2), log=log.append)
    assert log[0].startswith("dry run: a budget of time is planned for by a profile of the target")
    for place in (
        "prunekit.measure.latency_profile.network_timing._ProfileProcess.measure",
        "prunekit.pruning.latency_budget_search.time_pair",
    ):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("something was measured"))
    cached = dry_run(job(tmp_path, 1.2), log=log.append, measure=False)
    assert "10 of 10 networks of the profile are in" in cached["time"]
    assert "a median error of" in cached["time"]
    assert (cached["widths"], cached["budgets"]) == (measured["widths"], measured["budgets"])
    out_of_reach = dry_run(job(tmp_path, 500.0), log=log.append, measure=False)
    assert out_of_reach["budgets"]["speedup"]["left"] < 500
    assert any("a run measures whether it can be had" in line for line in log)


def test_a_dry_run_that_measures_nothing_and_has_no_profile_goes_by_macs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "empty"))
    for place in (
        "prunekit.measure.latency_profile.network_timing._ProfileProcess.measure",
        "prunekit.pruning.latency_budget_search.time_pair",
    ):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("something was measured"))
    log: list[str] = []
    found = dry_run(job(tmp_path, 2.5), log=log.append, measure=False)
    assert found["budgets"]["macs"]["asked"] == pytest.approx(0.4)
    assert found["macs_after"] <= 0.4 * found["macs_before"]
    assert "factor of two" in found["time"]
    assert any("0 of 10 networks" in line and "`prunekit profile RECIPE`" in line for line in log)
    in_ms = job(tmp_path, 2.5, prune=PruneSettings(BudgetSettings(latency_ms=1.0)))
    with pytest.raises(UsageError, match=r"latency_ms 1: .* `prunekit profile RECIPE` first"):
        dry_run(in_ms, log=log.append, measure=False)


@pytest.mark.slow
def test_what_cannot_be_had_is_refused_before_training(tmp_path: Path) -> None:
    for refusing in (prune_job, dry_run):
        with pytest.raises(PlanError, match=r"budget speedup 500.00×: the plan predicted to be fastest takes"):
            refusing(job(tmp_path, 500.0), log=lambda text: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_dry_run_shows_the_fastest_plan_where_only_the_table_holds_more_for_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = Timing(1.0, 0.9, 1.1, 501.0, 500.0, 502.0, True, ())
    monkeypatch.setattr(latency_budget_search, "time_pair", lambda *_, **__: met)
    found = dry_run(job(tmp_path, 500.0), log=lambda text: None)["budgets"]["speedup"]
    assert found["asked"] == 500
    assert 1 < found["left"] < 500


@pytest.mark.slow
def test_a_profile_keeps_its_layers_and_how_well_it_predicts(tmp_path: Path) -> None:
    run = profile_job(job(tmp_path, 1.2), networks=10, log=lambda text: None)
    layers = pd.read_csv(run.folder / "profile.csv")
    assert {"conv1", "layer3.0.conv2"} <= set(layers["module"])
    assert layers["share"].sum() == pytest.approx(1)
    assert layers["dense_ms"].is_monotonic_decreasing
    networks = pd.read_csv(run.folder / "networks.csv")
    errors = networks["predicted_ms"] / networks["measured_ms"] - 1
    assert errors.to_numpy() == pytest.approx(networks["error"].to_numpy())
    assert networks["held_out"].tolist() == [False, False, False, False, True] * 2
    assert run.metrics["error"] == pytest.approx(networks["error"][networks["held_out"]].abs().median())
    assert networks["macs_left"][0] == 1
    fits = {layer["module"]: layer for layer in json.loads((run.folder / "fits.json").read_text())["layers"]}
    assert list(fits) == layers["module"].fillna("").tolist()
    sides = [{"name": name, "channels": 32} for name in ("output channels", "input channels")]
    assert all(width in sides for width in fits["layer2.0.conv2"]["widths"])  # those that cost nothing are left out
    assert {width["name"] for width in fits["conv1"]["widths"]} <= {"output channels"}  # an image's three do not change
    prepared = prepare(job(tmp_path, 1.2), RECIPE_ONLY)
    final = trace(prepared.model, prepared.example_inputs).traced.final
    for layer in run.result.table.layers:
        if layer.module in fits:
            kept = np.array([row["kept"] for row in fits[layer.module]["measured"]], dtype=float)
            wanted = [layer.at(sample.keep[final]) for sample in run.result.samples]
            assert fitted(fits[layer.module], kept) == pytest.approx(np.array(wanted))
    again = profile_job(job(tmp_path, 1.2), networks=10, log=lambda text: None)
    assert again.metrics["checks"] == run.metrics["checks"]  # from the cache


def test_a_target_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    target = Target(runtime="onnxruntime", dtype="bf16")
    wanted = PruneSettings(BudgetSettings(speedup=1.2), target=target)
    with pytest.raises(UsageError, match="float32"):
        profile_job(job(tmp_path, 1.2, prune=wanted), log=lambda text: None)
    assert not list(tmp_path.iterdir())

"""Whole jobs that prune while they train, from the recipe's settings to the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from efforts import DRAWN
from made_up_timings import time_by_macs

import prunekit
from prunekit.errors import UsageError
from prunekit.jobs.dry_run import dry_run
from prunekit.jobs.finetune import finetune, prune_job
from prunekit.measure.measurement_effort import effort_of
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings, RepairSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import TrainSettings
from prunekit.settings.weight_pattern import PatternSettings

Finished = tuple[Path, dict[str, Any], list[str]]


def job(output: Path, prune: PruneSettings, **changes: Any) -> JobSettings:
    settings: dict[str, Any] = {
        "model": ModelSettings("resnet8", "cifar"),
        "data": DataSettings(image_size=8, batch=64),
        "baseline": TrainSettings(epochs=2, lr=0.1),
        "calibration": CalibrationSettings(images=64),
        "finetune": TrainSettings(epochs=3, lr=0.05),
        "latency": LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        "device": "cpu",
        "threads": 1,
        "output": output,
    }
    return JobSettings("scheduled", prune=prune, **settings | changes)


def run(output: Path, prune: PruneSettings, **changes: Any) -> Finished:
    log: list[str] = []
    result = finetune(
        job(output, prune, **changes), log=log.append, finish=lambda folder: write_report(folder, state="finished")
    )
    return result.folder, result.metrics, log


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def cubic(output: Path) -> Finished:
    schedule = ScheduleSettings("cubic", end=1.5, rounds=4)
    prune = PruneSettings(BudgetSettings(macs=0.4, params=0.6), scope="global", schedule=schedule)
    return run(output, prune, model=ModelSettings("resnet20", "cifar"))


@pytest.mark.slow
def test_the_last_plan_meets_the_budgets_and_is_the_one_that_is_handed_over(cubic: Finished) -> None:
    folder, metrics, log = cubic
    assert [text for text in metrics["shortfalls"] if "slower" not in text] == []  # which so small a net may be
    assert metrics["pruned"]["macs"] <= 0.4 * metrics["dense"]["macs"]
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    plan = prunekit.load_plan(folder)
    assert plan.provenance["schedule"]["progress"] == 1.0
    assert plan.provenance["prune"]["budget"]["macs"] == 0.4
    assert metrics["plan"]["macs_left"] == plan.channel_map.macs(plan.keep) / plan.channel_map.macs()
    assert metrics["plan"]["budgets"]["macs"]["asked"] == 0.4
    model = prunekit.load(folder / "model")
    assert sum(p.numel() for p in model.parameters()) == metrics["pruned"]["params"]
    coupling = pd.read_csv(folder / "coupling.csv").drop_duplicates("group").set_index("group")["kept"]
    assert coupling.to_dict() == {name: kept for name, (kept, _) in plan.widths().items()}
    assert "schedule: final masks; masked == compact to" in " ".join(log)


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_each_change_is_in_the_log_the_table_and_the_report(cubic: Finished, tmp_path: Path) -> None:
    folder, metrics, log = cubic
    table = pd.read_csv(folder / "schedule.csv")
    assert set(table["resource"]) == {"macs", "params"}
    macs = table[table["resource"] == "macs"]
    assert len(macs) == 4 == sum(line.startswith("schedule: epoch") for line in log)
    progress = (macs["epoch"] - 0) / 1.5
    assert macs["planned"].to_numpy() == pytest.approx(0.4 + 0.6 * (1 - progress.to_numpy()) ** 3, abs=0.02)
    for _, rows in table.groupby("resource"):
        assert (rows["actual"] <= rows["planned"] + 1e-9).all()
        assert (np.diff(rows["actual"]) < 0).all()
    assert (table["regrown"] == 0).all()
    page = write_report(folder).read_text()
    assert page.count("Pruning schedule: share of the dense model left") == 1
    assert "masks final" in page
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    (copy / "metrics.json").unlink()  # a run that has not come to its end
    assert "Pruning schedule: share of the dense model left" in write_report(copy).read_text()
    (copy / "schedule.csv").unlink()
    assert "Pruning schedule" not in write_report(copy).read_text()
    assert json.loads(json.dumps(metrics["schedule"]))["final"] == {"macs": 0.4, "params": 0.6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("criterion", "score"),
    [("taylor2", "criterion"), ("elimination", "criterion"), ("l2", "movement")],
)
def test_channels_are_scored_anew_and_come_back_until_they_freeze(criterion: Any, score: Any, output: Path) -> None:
    """By gradients and movement; Gram matrices are those of the dense model, so nothing can come back."""
    schedule = ScheduleSettings("linear", begin=0.25, end=1, every=0.25, regrow=True, freeze=2, score=score)
    prune = PruneSettings(BudgetSettings(macs=0.4), criterion=criterion, scope="global", schedule=schedule)
    folder, metrics, _ = run(output, prune, control=False)
    table = pd.read_csv(folder / "schedule.csv")
    assert table["epoch"].iloc[-1] == 2
    assert (table["regrown"].sum() > 0) == (criterion != "elimination")
    assert table["actual"].iloc[-1] <= 0.4
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    assert [text for text in metrics["shortfalls"] if "slower" not in text] == []  # which so small a net may be


@pytest.mark.slow
@pytest.mark.parametrize("through", ["masked", "straight_through"])
def test_single_weights_go_while_training_alone_and_with_channels(through: Any, output: Path) -> None:
    """By gradients in all channels; behind the masks in those that a budget leaves."""
    alone = through == "masked"
    budget = BudgetSettings() if alone else BudgetSettings(macs=0.6)
    pattern = PatternSettings("unstructured", sparsity=0.8) if alone else PatternSettings("2:4")
    schedule = ScheduleSettings("cubic", begin=0.25, end=1, every=0.25, regrow=True, freeze=2, gradients=through)
    prune = PruneSettings(budget, pattern=pattern, schedule=schedule)
    folder, metrics, log = run(output, prune, control=False)
    table = pd.read_csv(folder / "schedule.csv")
    assert set(table["resource"]) == ({"weights"} if alone else {"macs", "weights"})
    weights = table[table["resource"] == "weights"]
    assert weights["regrown"].sum() > 0
    assert metrics["schedule"]["final"]["weights"] == pytest.approx(1 - pattern.zeros)
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    model = prunekit.load(folder / "model")
    masked = set(prunekit.load_plan(folder).element_masks)
    kept = {name: float((weight != 0).float().mean()) for name, weight in model.named_parameters() if name in masked}
    assert kept
    if alone:
        assert weights["actual"].iloc[-1] == pytest.approx(0.2, abs=0.001)
        assert "weights pruned" in " ".join(log)
        with effort_of(DRAWN):
            assert "Weights at each change of the plan" in write_report(folder).read_text()
    else:
        assert all(share <= 0.5 for share in kept.values())
        assert metrics["pruned"]["macs"] <= 0.6 * metrics["dense"]["macs"]
    assert dry_run(job(output, prune))["schedule"]["stages"][-1]["weights"] == pytest.approx(1 - pattern.zeros)


@pytest.mark.slow
def test_rounds_rewind_the_learning_rate_of_the_model_and_of_its_control(output: Path) -> None:
    schedule = ScheduleSettings("iterative", rounds=3, rewind_lr=True)
    prune = PruneSettings(BudgetSettings(channels=0.5), pattern=PatternSettings("2:4"), schedule=schedule)
    folder, metrics, _ = run(output, prune, finetune=TrainSettings(epochs=3, lr=0.05, warmup=0.0))
    history = pd.read_csv(folder / "history.csv").set_index("run")["lr"]
    assert history["pruned"].to_list() == history["control"].to_list()
    assert len({round(lr, 9) for lr in history["pruned"]}) == 1
    assert metrics["sparsity"]["channels"] >= 0.5
    assert "The learning rate was rewound" in (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_budgets_of_time_go_by_macs_to_the_plan_that_was_measured(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))
    time_by_macs(monkeypatch)
    prune = PruneSettings(
        BudgetSettings(speedup=1.5), scope="per_mac", schedule=ScheduleSettings("exponential", end=1, rounds=3)
    )
    folder, metrics, log = run(output, prune, control=False)
    assert "control" not in metrics
    assert "control: left out, as the recipe asks; scores are compared with the dense model as it was" in log
    assert set(pd.read_csv(folder / "history.csv")["run"]) == {"baseline", "pruned"}
    page = (folder / "report.html").read_text()
    assert "against the dense model" in page
    assert "The dense model was not trained on" in page
    assert "dense control" not in page
    table = pd.read_csv(folder / "schedule.csv")
    assert set(table["resource"]) == {"macs"}
    assert table["actual"].iloc[-1] == pytest.approx(metrics["plan"]["macs_left"])
    assert (np.diff(table["actual"]) <= 0).all()
    assert metrics["delivered"]["asked"] == {"speedup": 1.5}
    assert metrics["delivered"]["final"]["speedup"] == pytest.approx(1.5, rel=0.05)
    assert "speedup" in prunekit.load_plan(folder).provenance["budgets"]


def test_a_dry_run_shows_the_stages(output: Path) -> None:
    schedule = ScheduleSettings("linear", begin=1, end=2, rounds=2)
    prune = PruneSettings(BudgetSettings(size_mb=0.2, macs=0.5), scope="global", schedule=schedule)
    found = dry_run(job(output, prune), log=lambda _: None)["schedule"]
    assert found["kind"] == "linear"
    steps = found["steps_per_epoch"]
    assert [stage["step"] for stage in found["stages"]] == [steps + round(steps / 2), 2 * steps]
    assert [stage["macs"] for stage in found["stages"]] == pytest.approx([0.75, 0.5], abs=0.02)
    assert set(found["stages"][0]) == {"step", "epoch", "macs", "size_mb"}
    assert dry_run(job(output, PruneSettings()), log=lambda _: None)["schedule"] is None


@pytest.mark.parametrize(
    ("prune", "changes", "message"),
    [
        ({"schedule": ScheduleSettings(end=3.0)}, {}, r"prune\.schedule\.end: expected less than the 3 epochs"),
        ({"schedule": ScheduleSettings()}, {"repair": RepairSettings()}, "repair: expected null"),
        ({"schedule": ScheduleSettings(freeze=2.0)}, {}, r"prune\.schedule\.freeze: expected nothing"),
        ({"schedule": ScheduleSettings()}, {"finetune": TrainSettings(epochs=0)}, "expected less than the 0 epochs"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    prune: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for start in (finetune, dry_run):
        with pytest.raises(UsageError, match=message):
            start(job(tmp_path, PruneSettings(**prune), **changes), log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_pruning_without_training_has_no_schedule(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run `prunekit finetune`, or set prune\.schedule=null"):
        prune_job(job(tmp_path, PruneSettings(schedule=ScheduleSettings())), log=lambda _: None)
    assert list(tmp_path.iterdir()) == []

"""The whole job on real digits: small in epochs, whole in everything else."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import safetensors.torch
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard_server import served

import prunekit
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.errors import ModelError, NonFiniteError, PlanError, UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.jobs.analyses.explain import explain_job
from prunekit.jobs.dry_run import dry_run
from prunekit.jobs.finetune import finetune, stages_of
from prunekit.jobs.run.baseline_cache import Baseline, train_baseline
from prunekit.jobs.run.job_subject import prepare
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.jobs.stages.calibration_stage import calibrate
from prunekit.jobs.stages.training_stage import Trainings
from prunekit.masks.thresholds import ActivationThresholds
from prunekit.measure.accuracy import evaluate
from prunekit.measure.model_size import count_macs
from prunekit.report.pages.run_page import write_report
from prunekit.settings.calibration import CalibrationSettings
from prunekit.settings.deployment import DeploySettings, LatencySettings
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import ActivationSettings, ClampSettings, TrainSettings
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.training.callbacks.callback import EpochRow

CPU = torch.device("cpu")


def job(output: Path, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="small",
        model=ModelSettings("resnet8", zoo="cifar"),
        data=DataSettings(image_size=8, batch=128),
        baseline=TrainSettings(epochs=2, lr=0.05),
        calibration=CalibrationSettings(images=128),
        prune=PruneSettings(budget=BudgetSettings(macs=0.45), criterion="activation", scope="global", round_to=4),
        finetune=TrainSettings(epochs=1, lr=0.02),
        latency=LatencySettings(batches=(1,), threads=(1,), repeats=5, explain=False),
        device="cpu",
        threads=1,
        output=output,
    )
    return replace(settings, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """One real run, shared by the tests below: output folder, metrics, log."""
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("runs")
    log: list[str] = []
    settings = job(output)
    result = finetune(replace(settings, latency=replace(settings.latency, explain=True)), log=log.append)
    assert result.folder.parent == output / "small"
    return result.folder, result.metrics, log


@pytest.mark.slow
def test_metrics_hold_what_was_measured(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, metrics, _ = finished
    assert json.loads((folder / "metrics.json").read_text()) == json.loads(json.dumps(metrics))
    for name in ("dense", "control", "pruned"):
        assert set(metrics[name]) >= {"top1", "n_test", "params", "macs", "size_bytes"}
        assert metrics[name]["n_test"] >= 500
        assert not metrics[name].keys() & {"plain_bytes", "bitmask_bytes", "compressor"}
    assert metrics["pruned"]["macs"] <= 0.45 * metrics["dense"]["macs"]
    assert metrics["pruned"]["params"] < metrics["dense"]["params"]
    assert metrics["pruned"]["size_bytes"] < metrics["dense"]["size_bytes"]
    assert 0 < metrics["sparsity"]["channels"] < 1
    assert 0 < metrics["sparsity"]["weights"] < 1
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    rows = {(row["model"], row["device"], row["batch"]) for row in metrics["latency"]}
    assert {("dense", "cpu", 1), ("pruned", "cpu", 1)} <= rows
    row = metrics["latency"][0]
    assert set(row) >= {"device", "runtime", "batch", "threads", "dtype", "median_ms", "p10_ms", "p90_ms", "p99_ms"}
    if not torch.cuda.is_available():
        assert metrics["latency_notes"] == ["no CUDA device"]
        assert {row["device"] for row in metrics["latency"]} == {"cpu"}
    assert metrics["seconds"] == pytest.approx(sum(metrics["stages"].values()))
    assert metrics["environment"]["torch"] == torch.__version__


@pytest.mark.slow
def test_folder_holds_the_evidence(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, metrics, log = finished
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    layers = pd.read_csv(folder / "layers.csv")
    assert layers["macs_before"].sum() == metrics["dense"]["macs"]
    assert layers["macs_after"].sum() == metrics["pruned"]["macs"]
    history = pd.read_csv(folder / "history.csv")
    assert history.groupby("run")["epoch"].count().to_dict() == {"baseline": 2, "control": 1, "pruned": 1}
    scores = pd.read_csv(folder / "scores.csv")
    assert set(scores["kept"]) == {0, 1}
    kept, gone = (scores[scores["kept"] == value]["score"] for value in (1, 0))
    assert kept.median() > gone.median()
    assert len(pd.read_csv(folder / "locks.csv"))
    coupling = pd.read_csv(folder / "coupling.csv")
    assert set(coupling["group"]) == set(scores["group"])
    assert coupling.groupby("group")["kept"].first().sum() == scores["kept"].sum()
    for run, rows in history.groupby("run"):
        curve = EventAccumulator(str(folder / "tensorboard" / str(run))).Reload().Scalars("loss/validation")
        assert [event.step for event in curve] == list(rows["epoch"])
        assert [event.value for event in curve] == pytest.approx(list(rows["validation_loss"]))
        scalars = pd.read_csv(folder / "scalars" / f"{run}.csv").query("tag == 'loss/validation'")
        assert list(scalars["value"]) == list(rows["validation_loss"])
    sparse = pd.read_csv(folder / "scalars" / "pruned.csv").query("tag == 'sparsity/all'")
    assert list(sparse["value"]) == pytest.approx([metrics["sparsity"]["weights"]])
    assert (folder / "log.txt").read_text().count("\n") == len(log)
    assert prunekit.load_plan(folder).provenance["prune"]["budget"]["macs"] == 0.45


@pytest.mark.slow
def test_tensorboard_itself_shows_a_run(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    """By what it answers to its own page."""
    folder, *_ = finished
    with served(folder / "tensorboard") as board:
        scalars = board.json("scalars/tags")
        curve = board.json("scalars/scalars", run="pruned", tag="loss/validation")
        layout = board.json("custom_scalars/layout")
    history = pd.read_csv(folder / "history.csv").query("run == 'pruned'")
    assert [(step, value) for _, step, value in curve] == [
        (row.epoch, pytest.approx(row.validation_loss)) for row in history.itertuples()
    ]
    assert {"baseline", "control", "pruned"} <= set(scalars)
    charts = {chart["title"]: chart["multiline"]["tag"] for part in layout["category"] for chart in part["chart"]}
    assert charts["loss"] == ["loss/.*"]


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_the_report_says_why_the_pruned_model_is_not_faster(
    finished: tuple[Path, dict[str, Any], list[str]], tmp_path: Path
) -> None:
    folder, metrics, log = finished
    found = metrics["explanation"]
    assert (found["device"], found["batch"], found["threads"]) == ("cpu", 1, 1)
    assert found["macs_ratio"] == metrics["dense"]["macs"] / metrics["pruned"]["macs"]
    assert {row["module"] for row in found["rows"]} >= {"conv1", "layer3.0.conv2", "linear"}
    (row,) = [row for row in metrics["speedup"] if row["batch"] == 1]
    stable = row["stable"] and not found["doubts"]  # the machine that tests run on may be busy
    said = [line for line in log if line.startswith("explain: ")]
    shown = f"{row['median']:.2f}×" if stable else "unstable, so that nothing is said"
    assert said[0].startswith(f"explain: {shown}")
    assert (f"the ideal {found['macs_ratio']:.2f}×" in said[0]) is stable
    assert not any("x the dense" in line or re.search(r"1[0-9]{2} % of the ideal", line) for line in log)
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    page = html.unescape(write_report(copy).read_text())
    assert "Why is it not faster?" in page
    for cause in found["causes"] if stable else ():
        assert cause["name"] in page
        assert any(cause["name"] in line and cause["fix"] in line for line in log)
    assert ("Causes" in page) is stable
    (copy / "metrics.json").write_text(json.dumps({**metrics, "explanation": None}))
    assert "Why is it not faster?" not in write_report(copy).read_text()


def test_an_explanation_that_fails_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*models: object, **options: object) -> None:
        raise RuntimeError("view size is not compatible")

    monkeypatch.setattr("prunekit.jobs.analyses.explain.explain", fail)
    said: list[str] = []
    net = torch.nn.Linear(2, 2)
    assert explain_job(net, net, (2,), LatencySettings(), (), said.append) is None
    assert said == ["explain: not done: RuntimeError: view size is not compatible"]
    for settings in (LatencySettings(explain=False), LatencySettings(runtimes=("onnxruntime",))):
        assert explain_job(net, net, (2,), settings, (), said.append) is None
    assert len(said) == 1


@pytest.mark.slow
def test_saved_model_is_the_measured_one(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, metrics, _ = finished
    model = prunekit.load(folder / "model")
    assert count_macs(model, (torch.zeros(1, 3, 8, 8),)) == metrics["pruned"]["macs"]
    splits = load_splits(DataSettings(image_size=8))
    again = evaluate(model, batches(splits.test, 64, shuffle_seed=None), "image_classification", CPU)
    assert again.values["top1"] == metrics["pruned"]["top1"]
    assert count_hooks(model) == 0


@pytest.mark.slow
def test_every_stage_is_announced_with_its_true_place(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    said = [line.removeprefix("stage ") for line in finished[2] if line.startswith("stage ")]
    stages = ("dense model", "calibrate", "plan", "repair", "fine-tune", "compact", "control", "measure")
    assert said == [f"{index} of {len(stages)}: {name}" for index, name in enumerate(stages, 1)]


@pytest.mark.parametrize(
    ("changes", "training", "expected"),
    [
        ({}, False, "dense model, calibrate, plan, repair, compact, measure"),
        ({"control": False}, True, "dense model, calibrate, plan, repair, fine-tune, compact, measure"),
        (
            {"prune": PruneSettings(schedule=ScheduleSettings()), "deploy": DeploySettings(fold_batchnorm=True)},
            True,
            "dense model, calibrate, plan, fine-tune, compact, control, deploy, measure",
        ),
    ],
)
def test_stages_are_those_that_the_recipe_asks_for(
    changes: dict[str, Any], training: bool, expected: str, tmp_path: Path
) -> None:
    stages = stages_of(job(tmp_path, **changes), training=training)
    assert ", ".join(stage.name for stage in stages if stage.counted) == expected


@pytest.mark.slow
def test_second_run_reuses_baseline_and_statistics(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, metrics, _ = finished
    output = folder.parent.parent
    log: list[str] = []
    again = finetune(job(output), log=log.append)
    assert any(line.startswith("dense: reused") for line in log)
    assert any(line.startswith("calibration: reused") for line in log)
    for name in ("dense", "control", "pruned"):
        assert again.metrics[name] == metrics[name]
    left, right = (prunekit.load(path / "model").state_dict() for path in (folder, again.folder))
    assert all(torch.equal(left[name], right[name]) for name in left)

    changed = job(output, calibration=CalibrationSettings(images=64))
    first = calibrate(changed, log=log.append)
    assert not first.reused
    assert calibrate(changed, log=log.append).reused
    assert first.path.is_file()
    assert first.csv.is_file()
    provenance = ChannelStats.load(first.path).provenance
    assert set(provenance) == {"model", "weights", "data", "calibration"}


@pytest.mark.slow
def test_dry_run_changes_nothing(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    folder, _, _ = finished
    output = folder.parent.parent
    before = sorted(output.rglob("*"))
    plan = dry_run(job(output, prune=PruneSettings(budget=BudgetSettings(channels=0.5))), log=lambda _: None)
    assert plan["macs_after"] < 0.34 * plan["macs_before"]
    assert plan["trained"]
    assert sorted(output.rglob("*")) == before


@pytest.fixture(scope="module")
def hooked(finished: tuple[Path, dict[str, Any], list[str]]) -> tuple[Path, dict[str, Any], list[str]]:
    """A run with activation masks, both clamps, bf16, accumulation and compiling, made compact early; same model."""
    settings = job(
        finished[0].parent.parent,
        prune=replace(job(finished[0]).prune, compact_early=True),
        finetune=TrainSettings(
            epochs=1,
            lr=0.02,
            precision="bf16",
            accumulate=2,
            compile=True,
            clamp_activation_grad=ClampSettings(1e-4, modules=("layer*.conv*",)),
            clamp_weight_grad=ClampSettings(0.1, by="norm"),
        ),
        activations=ActivationSettings(("layer*relu*",), target=0.7),
    )
    log: list[str] = []
    result = finetune(settings, log=log.append)
    return result.folder, result.metrics, log


@pytest.mark.slow
def test_a_run_that_is_made_compact_early_is_proven_then_and_at_the_end(
    hooked: tuple[Path, dict[str, Any], list[str]],
) -> None:
    folder, metrics, log = hooked
    assert metrics["compacted_early"]["epoch"] == 0
    assert metrics["compacted_early"]["max_relative_difference"] <= 1e-9
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    assert sum(line.startswith("compact early: epoch 0.00: masked == compact to ") for line in log) == 1
    trained = safetensors.torch.load_file(folder / "checkpoints" / "pruned.safetensors")
    saved = prunekit.load(folder / "model").state_dict()
    assert {name: value.shape for name, value in trained.items()} == {name: v.shape for name, v in saved.items()}
    assert all(torch.equal(trained[name], value) for name, value in saved.items() if "running" not in name)
    page = write_report(folder).read_text()
    assert "The plan was final after 0 epochs; there masked and compact model agreed to" in page


@pytest.mark.slow
def test_activation_masks_meet_their_target_on_the_test_images(
    hooked: tuple[Path, dict[str, Any], list[str]],
) -> None:
    folder, metrics, log = hooked
    found = metrics["activations"]
    assert len(found["layers"]) == 6
    assert found["sparsity"] == pytest.approx(0.7, abs=0.01)
    assert found["n_test"] == metrics["pruned"]["n_test"]
    assert metrics["parity"]["max_relative_difference"] <= 1e-9
    assert sum(line.startswith("activations: thresholds of 6 layers for 70.0 % zeros") for line in log) == 2
    thresholds = ActivationThresholds.load(folder / "activation_thresholds.json")
    model = prunekit.load(folder / "model")
    test = batches(load_splits(DataSettings(image_size=8)).test, 64, shuffle_seed=None)
    with prunekit.ActivationMasks(model, thresholds) as masks:
        again = evaluate(model, test, "image_classification", CPU)
    assert again.values["top1"] == found["top1"]
    assert masks.sparsity().layers == {row["module"]: row["sparsity"] for row in found["layers"]}
    assert count_hooks(model) == 0


@pytest.mark.slow
def test_clamped_shares_are_kept_for_each_run_and_layer(
    hooked: tuple[Path, dict[str, Any], list[str]],
) -> None:
    folder, metrics, _ = hooked
    table = pd.read_csv(folder / "clamps.csv")
    assert table.groupby(["run", "clamp"])["module"].count().to_dict() == {
        ("pruned", "clamp_activation_grad"): 6,
        ("pruned", "clamp_weight_grad"): 15,
        ("control", "clamp_activation_grad"): 6,
        ("control", "clamp_weight_grad"): 15,
    }
    assert table["share"].between(0, 1).all()
    assert (table.groupby("clamp")["share"].max() > 0).all()
    assert [(row["run"], row["clamp"]) for row in metrics["clamps"]] == list(
        table.groupby(["run", "clamp"], sort=False).groups
    )
    for row in metrics["clamps"]:
        same = table[(table["run"] == row["run"]) & (table["clamp"] == row["clamp"])]
        assert row["share"] == same["share"].max()


@pytest.mark.slow
def test_why_steps_were_not_compiled_is_said_in_log_metrics_and_report(
    hooked: tuple[Path, dict[str, Any], list[str]],
) -> None:
    folder, metrics, log = hooked
    reason = "ActivationGradientClamp: gradients go through Python while the backward pass runs"
    page = write_report(folder).read_text(encoding="utf-8")
    for name in ("pruned", "control"):
        found = metrics["compiled"][name]
        assert (found["graphs"], found["fallback"]) == (0, reason)
        assert f"{name}: trained in eager, because steps could not be compiled: {reason}" in log
        assert f"{name}: in eager, because {reason}" in page


@pytest.mark.slow
def test_the_baselines_clamps_are_kept_also_where_it_comes_from_the_cache(tmp_path: Path) -> None:
    clamped = TrainSettings(epochs=1, lr=0.02, clamp_weight_grad=ClampSettings(1e-4, modules=("conv1", "linear")))
    once = job(tmp_path, baseline=clamped, finetune=TrainSettings(epochs=0), data=DataSettings(image_size=8))
    trained = train_baseline(prepare(once), log=lambda _: None, progress=False)
    assert [row.module for row in trained.clamps] == ["conv1", "linear"]
    assert all(row.share > 0 for row in trained.clamps)
    log: list[str] = []
    result = finetune(once, log=log.append)
    assert any(line.startswith("dense: reused") for line in log)
    rows = [{"run": "baseline", **asdict(row)} for row in trained.clamps]
    assert pd.read_csv(result.folder / "clamps.csv").to_dict("records") == rows
    assert result.metrics["clamps"] == [max(rows, key=lambda row: row["share"])]


def test_skipped_steps_are_logged_and_kept(tmp_path: Path) -> None:
    log: list[str] = []
    run = RunFolder(tmp_path, "", log.append)
    rows = (EpochRow(1, 0.1, 1.0, 50.0, 1.0, 50.0, 10.0, 1.0, skipped=3),)
    baseline = Baseline(torch.nn.Identity(), rows, (), reused=False)
    Trainings(
        SimpleNamespace(job=None, splits=SimpleNamespace(task=IMAGE_CLASSIFICATION)), run, baseline, progress=False
    )  # type: ignore[arg-type]
    assert log == ["dense: steps skipped: 3 (overflowing float16 gradients, or batches without images)"]
    assert list(pd.read_csv(tmp_path / "history.csv")["skipped"]) == [3]


@pytest.mark.slow
def test_a_fixed_threshold_is_used_as_it_is(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    fixed = ActivationSettings(("layer1.*.conv1", "linear"), side="input", threshold=0.05)
    short = job(finished[0].parent.parent, finetune=TrainSettings(epochs=0), activations=fixed)
    metrics = finetune(short, log=lambda _: None).metrics
    assert [row["threshold"] for row in metrics["activations"]["layers"]] == [0.05] * 2
    assert metrics["activations"]["target"] is None
    assert metrics["clamps"] == []


@pytest.mark.slow
def test_an_overall_budget_is_spread_and_shown(finished: tuple[Path, dict[str, Any], list[str]]) -> None:
    spread = ActivationSettings(("layer1.*.conv?", "layer2.*.conv?"), side="input", overall=0.75)
    short = job(finished[0].parent.parent, name="spread", finetune=TrainSettings(epochs=0), activations=spread)
    log: list[str] = []
    result = finetune(short, log=log.append)
    found = result.metrics["activations"]
    assert found["overall"] == 0.75
    assert found["by"] == "macs"
    assert found["target"] is None
    assert found["sparsity"] == pytest.approx(0.75, abs=0.02)
    assert found["sparsity"] == pytest.approx(sum(row["weight"] * row["sparsity"] for row in found["layers"]))
    assert found["errors"][found["way"]] == min(found["errors"].values())
    assert any("thresholds of 4 layers for 75.0 % zeros overall, passes:" in line for line in log)
    assert any("output error" in line and "one share for all" in line for line in log)
    kept = ActivationThresholds.load(result.folder / "activation_thresholds.json")
    assert kept.budget is not None
    assert kept.budget.errors == found["errors"]
    assert "The budget:" in write_report(result.folder).read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": ActivationSettings(("layr1",), target=0.5)}, r"activations\.modules: 'layr1' .*'layer1'"),
        ({"activations": ActivationSettings(("layer1",))}, "exactly one of 'threshold', 'target' and 'overall'"),
        ({"finetune": TrainSettings(clamp_weight_grad=ClampSettings(1.0, modules=("cnv1",)))}, "'cnv1' .*'conv1'"),
        ({"baseline": TrainSettings(clamp_activation_grad=ClampSettings(1.0, modules=("f",)))}, "'f' matches no"),
    ],
)
def test_globs_of_masks_and_clamps_are_checked_before_anything_is_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        finetune(job(tmp_path, **changes), log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_budget_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    impossible = PruneSettings(budget=BudgetSettings(macs=0.01), min_channels=32, depth=False)
    with pytest.raises(PlanError, match=r"leave no less than 0\.\d+ of the dense model"):
        finetune(job(tmp_path, prune=impossible), log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_no_weights_and_no_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add `baseline"):
        finetune(job(tmp_path, baseline=None), log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelSettings("alexnet"), "set data.image_size to what it was made for"),
        (ModelSettings("resnet18", arguments={"num_classes": 5}), "set model.arguments.num_classes"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(model: ModelSettings, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        finetune(job(tmp_path, model=model), log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failed_run_is_marked_failed_and_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NonFiniteError):
        finetune(job(tmp_path, baseline=TrainSettings(epochs=1, lr=1e9, warmup=0.0)), log=lambda _: None)
    folder = next((tmp_path / "small").iterdir())
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["error"].startswith("NonFiniteError: ")
    assert not (folder / "model").exists()
    assert not (folder / "metrics.json").exists()
    assert not (tmp_path / "cache").exists()


def test_an_interrupted_run_is_marked_interrupted(tmp_path: Path) -> None:
    def interrupt(message: str) -> None:
        if message.startswith("dense: "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(job(tmp_path), log=interrupt)
    folder = next((tmp_path / "small").iterdir())
    assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"


@pytest.mark.slow
def test_a_damaged_cache_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path / "cache"))
    tiny = job(tmp_path, model=ModelSettings("squeezenet1_1"), data=DataSettings(image_size=32),
               baseline=TrainSettings(epochs=0))  # fmt: skip
    calibrate(tiny, log=lambda _: None)
    cached = next((tmp_path / "cache" / "baselines").glob("*/*.safetensors"))
    cached.write_bytes(cached.read_bytes()[:-100])
    log: list[str] = []
    calibrate(tiny, log=log.append)
    assert any(line.startswith("dense: training") for line in log)

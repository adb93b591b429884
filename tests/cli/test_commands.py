"""Each command, with stand-ins for the long work: what reaches them, and what is printed of what they return."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from torch import nn

from prunekit.cli import cli
from prunekit.cli.models import recipe_of_data
from prunekit.data.sources import load_splits
from prunekit.jobs import dry_run as dry_run_module
from prunekit.jobs import finetune as finetune_module
from prunekit.jobs import finetune as jobs_finetune
from prunekit.jobs.finetune import RunResult
from prunekit.jobs.run import baseline_cache
from prunekit.jobs.run.command_subject import Own, Subject
from prunekit.jobs.run.run_folder import Finish, write_report
from prunekit.jobs.stages import calibration_stage
from prunekit.jobs.stages.calibration_stage import CalibrationResult
from prunekit.measure.latency import timing_job
from prunekit.recipe.loading import load
from prunekit.settings.job import JobSettings, dump
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_stats import LayerStats, StatsKey

Log = Callable[[str], None]
RECIPE = "name: small\nmodel: {name: squeezenet1_1}\nbaseline: {epochs: 1}\nseed: 4\n"
OWN_MODEL = """
from torch import nn

def build():
    print("building")
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))

def classifier():
    return nn.Sequential(nn.Conv2d(3, 10, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def initialized():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
"""
METRICS = {
    "dense": {"top1": 98.7, "n_test": 540, "params": 1000, "macs": 2000, "size_bytes": 4000},
    "pruned": {"top1": 98.5, "n_test": 540, "params": 400, "macs": 900, "size_bytes": 1600},
    "speedup": [
        {"model": "pruned", "device": "cpu", "runtime": "eager", "batch": 1, "threads": 1, "dtype": "float32"}
        | {"median": 2.0, "low": 1.9, "high": 2.1, "stable": False, "doubts": ["too few repeats"]}
    ],
    "shortfalls": [],
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def own_model(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN_MODEL)
    return f"{path}:initialized"


@pytest.fixture
def jobs() -> list[JobSettings]:
    """Jobs that reached the workflow."""
    return []


@pytest.fixture
def finetune(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jobs: list[JobSettings]) -> Callable[..., None]:
    def install(command: str = "finetune", **changes: Any) -> None:
        def stand_in(
            job: JobSettings,
            *,
            log: Log,
            progress: bool,
            own: Own,
            resume: str | None,
            finish: Finish = write_report,
        ) -> RunResult:
            jobs.append(job)
            log("epoch 1" if resume is None else f"resume {resume}")
            print("chatter of a library")
            folder = tmp_path / "runs" / job.name / "now"
            folder.mkdir(parents=True)
            metrics = {**METRICS, **changes}
            (folder / "metrics.json").write_text(json.dumps(metrics))
            (folder / "status.json").write_text(json.dumps({"state": "running"}))
            (folder / "recipe.yaml").write_text(dump(job))
            finish(folder)
            return RunResult(folder, metrics)

        monkeypatch.setattr(jobs_finetune, command, stand_in)

    return install


@pytest.mark.slow
def test_finetune_prints_the_result_and_writes_the_report(
    finetune: Callable[..., None], recipe: str, tmp_path: Path
) -> None:
    finetune()
    result = run("finetune", recipe)
    assert result.exit_code == 0
    assert "98.50 %" in result.stdout
    assert "−55.0 %" in result.stdout
    assert "Speedup of pruned (eager, cpu, batch 1, 1 thread, float32): unstable [1.90, 2.10]" in result.stdout
    assert result.stderr == "epoch 1\nchatter of a library\n"
    report = tmp_path / "runs" / "small" / "now" / "report.html"
    assert f"Report: {report}" in result.stdout
    assert '<span class="state finished">finished</span>' in report.read_text()
    assert "unstable (eager, cpu, batch 1, 1 thread, float32): speedup of pruned: too few repeats" in report.read_text()
    assert load(report.parent / "recipe.yaml") == load(recipe)


def test_prune_runs_the_job_without_fine_tuning(
    finetune: Callable[..., None], recipe: str, jobs: list[JobSettings]
) -> None:
    repair = {"before": 0.25, "after": 0.01, "kept": True, "layers": 21, "refitted": 20}
    finetune("prune_job", fine_tuned=False, repair=repair)
    result = run("prune", recipe, "repair={fit: channel}", "prune.scope=per_mac")
    assert result.exit_code == 0, result.stderr
    assert (jobs[0].repair.fit, jobs[0].prune.scope) == ("channel", "per_mac")  # type: ignore[union-attr]
    line = "Repair: output error on held-out images 25.00 % → 1.00 % of its variance; 20 of 21 layers refitted"
    assert line in result.stdout.splitlines()
    assert "control" not in result.stdout


def test_finetune_json_is_one_object_on_stdout(finetune: Callable[..., None], recipe: str) -> None:
    finetune()
    result = run("finetune", recipe, "--json")
    assert json.loads(result.stdout)["pruned"] == METRICS["pruned"]
    assert len(result.stdout.splitlines()) == 1
    assert "chatter of a library" in result.stderr


def test_options_and_overrides_reach_the_job(
    finetune: Callable[..., None],
    recipe: str,
    jobs: list[JobSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prunekit.cli.options.has_device", lambda kind: True)
    finetune()
    output = tmp_path / "a folder: mine"
    arguments = ["--device", "cuda:1", "--seed", "7", "--output", str(output), "--json"]
    result = run("finetune", recipe, "prune.budget.macs=0.4", "seed=5", *arguments)
    assert result.exit_code == 0, result.stderr
    job = jobs[0]
    assert (job.device, job.seed, job.output, job.prune.budget.macs) == ("cuda:1", 7, output, 0.4)


@pytest.mark.parametrize("command", ["finetune", "prune"])
@pytest.mark.parametrize("resume", ["auto", "runs/small/20261122-074155"])
def test_what_is_to_be_resumed_reaches_the_job(
    finetune: Callable[..., None],
    recipe: str,
    command: str,
    resume: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / resume).mkdir(parents=True)
    (tmp_path / resume / "status.json").write_text("{}")
    finetune("prune_job" if command == "prune" else command)
    result = run(command, recipe, "--resume", resume)
    assert (result.exit_code, result.stderr.splitlines()[0]) == (0, f"resume {resume}")


def test_nothing_is_resumed_by_a_dry_run(recipe: str) -> None:
    result = run("finetune", recipe, "--resume", "auto", "--dry-run")
    assert result.exit_code == 2
    assert "expected one of --dry-run and --resume" in result.stderr


def test_a_run_that_is_not_there_cannot_be_resumed(recipe: str, tmp_path: Path) -> None:
    result = run("finetune", recipe, "--resume", str(tmp_path / "none"), "--output", str(tmp_path / "runs"))
    assert result.exit_code == 2
    assert f"{tmp_path / 'none'}: expected the folder of a run, with a status.json, or 'auto'" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_shortfall_is_reported_and_exits_with_1(finetune: Callable[..., None], recipe: str) -> None:
    finetune(shortfalls=["kept 52 % of the MACs, asked 45 %"])
    result = run("finetune", recipe)
    assert result.exit_code == 1
    assert "Shortfall: kept 52 % of the MACs, asked 45 %" in result.stdout
    assert "Report: " in result.stdout


def test_a_broken_recipe_never_reaches_the_workflow(
    finetune: Callable[..., None], recipe: str, jobs: list[JobSettings]
) -> None:
    finetune()
    result = run("finetune", recipe, "prune.criterion=l3", "--seed", "1", "sed=2")
    assert result.exit_code == 2
    assert "got 'l3'; did you mean 'l2'" in result.stderr
    assert "override 'sed=2': sed: unknown key; did you mean 'seed'?" in result.stderr
    assert jobs == []


def test_dry_run_prints_the_resolved_recipe_and_the_plan(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    row = {"module": "features.0", "kind": "Conv2d", "in_before": 3, "in_after": 3, "out_before": 64, "out_after": 31}
    row |= {"macs_before": 2000, "macs_after": 990, "params_before": 1792, "params_after": 868}
    norm = {**row, "module": "features.1", "macs_before": 0}
    plan = {"macs_before": 2000, "macs_after": 990, "channels_removed": 33, "groups": 3, "locks": 2}
    plan |= {"widths": [row, norm], "binding": "size_mb", "round_to": "by width"}
    plan |= {
        "budgets": {
            "macs": {"asked": 0.5, "left": 0.495, "dense": 1.0},
            "size_mb": {"asked": 1.5, "left": 1.49, "dense": 3.0},
        }
    }
    stages = [{"step": 16, "epoch": 0.5, "macs": 0.75}, {"step": 32, "epoch": 1.0, "macs": 0.5}]
    plan |= {"schedule": {"kind": "linear", "steps_per_epoch": 32, "stages": stages}}
    monkeypatch.setattr(dry_run_module, "dry_run", lambda job, *, log, own: plan)
    text = run("finetune", recipe, "--dry-run").stdout
    assert "name: small\n" in text
    assert "momentum" not in text
    assert "# All other keys have their defaults: --full\n" in text
    assert "Schedule linear, 32 steps an epoch" in text
    assert re.search(r"16 +0\.50 +75\.0 %\n +32 +1\.00 +50\.0 %", text)
    plan |= {"schedule": None, "blocks": ["layer1.0", "layer2.1"]}
    again = run("finetune", recipe, "--dry-run").stdout
    assert "Schedule" not in again
    assert "Blocks gone: layer1.0, layer2.1\n" in again
    assert "Blocks" not in text
    assert "momentum: 0.9" in run("finetune", recipe, "--dry-run", "--full").stdout
    assert "MACs 2.00 k -> 990 (−50.5 %)" in text
    assert "3 channel groups, 2 locks, round_to by width\n" in text
    assert "Budget MACs 49.5 % left, at most 50.0 % asked for\n" in text
    assert "Budget size 1.49 MB left, at most 1.50 MB asked for, of 3.00 MB, the one that binds\n" in text
    assert "features.0  Conv2d  3 -> 3  64 -> 31  2.00 k -> 990  1.79 k -> 868" in text
    assert "features.1" not in text
    monkeypatch.setattr(dry_run_module, "dry_run", lambda job, *, log, own, measure: plan | {"time": "by a guess"})
    assert "Time, predicted: by a guess\n" in run("prune", recipe, "--dry-run", "--no-measure").stdout
    refused = run("finetune", recipe, "--no-measure")
    assert (refused.exit_code, "--no-measure goes with --dry-run" in refused.stderr) == (2, True)
    monkeypatch.setattr(dry_run_module, "dry_run", lambda job, *, log, own: plan)
    payload = json.loads(run("finetune", recipe, "--dry-run", "--json").stdout)
    assert payload["plan"] == plan
    assert payload["recipe"]["model"]["name"] == "squeezenet1_1"


def test_calibrate_prints_a_row_for_each_layer_and_marks_dead_channels(
    monkeypatch: pytest.MonkeyPatch, recipe: str, tmp_path: Path
) -> None:
    low, high = np.array([0.0, -1.0, 0.0]), np.array([0.0, 4.0, 2.0])
    count, whole = np.full(3, 10), np.zeros(3, np.int64)
    layer = LayerStats(count, (low + high) / 2, count * 1.0, count * 0.5, low, high, np.array([10, 0, 5]), whole, whole)
    stats = ChannelStats({StatsKey("features.1", "output", 0): layer, StatsKey("features.1", "output", 1): layer})
    done = CalibrationResult(stats, tmp_path / "stats.safetensors", tmp_path / "stats.csv", reused=True)
    monkeypatch.setattr(calibration_stage, "calibrate", lambda job, *, log, progress, own: done)
    result = run("calibrate", recipe)
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("  features.1")]
    assert [line.rstrip().endswith("DEAD 1: 0") for line in lines] == [True, True]
    assert "50.0 %" in lines[0]
    assert "(call 1)" in lines[1]
    assert f"Statistics (from an earlier run): {done.path}" in result.stdout
    payload = json.loads(run("calibrate", recipe, "--json").stdout)
    assert payload["reused"] is True
    assert [layer["dead"] for layer in payload["layers"]] == [[0], [0]]
    assert payload["layers"][0]["max"] == 4.0


@pytest.mark.slow
def test_bench_times_the_users_own_model_first_and_gates_the_last(own_model: str, tmp_path: Path) -> None:
    arguments = ["bench", "squeezenet1_1", "--model", own_model, "--input-shape", "1x3x64x64", "--device", "cpu"]
    limits = ["--batch", "1,2", "--repeats", "5", "--output", str(tmp_path / "out"), "--json"]
    slow = run(*arguments, *limits, "--max-latency-ms", "1e-6")
    assert slow.exit_code == 1
    assert slow.stderr.count("too slow: squeezenet1_1 (eager, cpu") == 2
    payload = json.loads(slow.stdout)
    assert payload["passed"] is False
    assert list(payload["models"]) == ["initialized", "squeezenet1_1"]
    assert (payload["failures"], payload["machine"]["cores"] > 0) == ([], True)
    assert all({"stable", "doubts", "low_ms", "high_ms", "peak_memory_bytes"} <= set(row) for row in payload["latency"])
    assert [row["batch"] for row in payload["latency"] if row["model"] == "initialized"] == [1, 2]
    assert {row["model"] for row in payload["speedup"]} == {"squeezenet1_1"}
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == payload


@pytest.mark.slow
def test_bench_passes_a_model_that_is_fast_enough(own_model: str) -> None:
    arguments = ["--input-shape", "1x3x8x8", "--device", "cpu", "--repeats", "5", "--threads", "1"]
    result = run("bench", "--model", own_model, *arguments, "--max-latency-ms", "1e6")
    assert result.exit_code == 0, result.stderr
    assert "initialized  cpu     eager" in result.stdout
    # The gate is for batch 1 where no batch is named, and says so.
    gates = [line for line in result.stderr.splitlines() if "the limit is 1e+06 ms" in line]
    assert len(gates) == 1
    assert gates[0].startswith("prunekit: fast enough: initialized (eager, cpu, batch 1, 1 thread, float32): ")


def test_a_runtime_that_computes_something_else_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, own_model: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(timing_job, "TOLERANCES", dict.fromkeys(timing_job.TOLERANCES, -1.0))
    arguments = ["--input-shape", "1x3x8x8", "--device", "cpu", "--batch", "1", "--repeats", "5"]
    result = run("bench", "--model", own_model, *arguments, "--max-latency-ms", "1e6")
    assert result.exit_code == 1
    assert "not measured: eager, cpu, batch 1, 1 thread, float32: initialized computes something else" in result.stderr
    assert "in the output, values differ by 0 of the largest value" in result.stderr
    assert "median ms" not in result.stdout


def test_inspect_shows_groups_locks_and_macs(own_model: str) -> None:
    arguments = ["inspect", "--model", own_model, "--input-shape", "1x3x8x8"]
    text = run(*arguments).stdout
    payload = json.loads(run(*arguments, "--json").stdout)
    assert payload["macs"] == 8 * 3 * 9 * 36 + 4 * 8 * 9 * 16
    assert sum(layer["macs"] for layer in payload["layers"]) == payload["macs"]
    assert [(group["name"], group["channels"]) for group in payload["groups"]] == [("0", 8)]
    assert payload["locks"]
    assert payload["free_share"] == pytest.approx(1 - 4 / payload["params"])
    assert "1 channel group (" in text
    assert payload["locks"][-1]["reason"] in text


def test_inspect_shows_blocks() -> None:
    arguments = ["inspect", "resnet8", "--input-shape", "1x3x8x8"]
    payload = json.loads(run(*arguments, "--json").stdout)
    assert [(row["block"], len(row["layers"])) for row in payload["blocks"]] == [
        ("layer1.0", 2), ("layer2.0", 2), ("layer3.0", 2)
    ]  # fmt: skip
    text = " ".join(run(*arguments).stdout.split())
    assert "3 blocks (residual branches and parts of concatenations that may go as a whole) block layers" in text
    assert "layer1.0 2 16" in text
    assert ("stay" in text) == bool(payload["block_locks"])


def test_what_a_users_file_prints_stays_out_of_the_json(own_model: str) -> None:
    chatty = own_model.replace(":initialized", ":build")
    result = run("inspect", "--model", chatty, "--input-shape", "1x3x8x8", "--json")
    assert "building" not in result.stdout
    assert "building" in result.stderr


SMALL_IMAGES = ["data.image_size=8", "data.batch=200"]


def test_evaluate_the_users_own_model_on_a_recipes_images(own_model: str, recipe: str, tmp_path: Path) -> None:
    own = own_model.replace(":initialized", ":classifier")
    arguments = ["--model", own, "--input-shape", "1x3x8x8", "--recipe", recipe, "--device", "cpu"]
    result = run("evaluate", *arguments, *SMALL_IMAGES, "--json", "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    payload = json.loads(result.stdout)
    assert (payload["model"], payload["params"], payload["macs"]) == ("classifier", 30, 30 * 64)
    assert payload["top1"] == pytest.approx(100 * payload["correct"] / payload["n_test"])
    assert json.loads((tmp_path / "out" / "evaluate.json").read_text()) == payload
    text = run("evaluate", *arguments, *SMALL_IMAGES).stdout
    assert f"({payload['correct']:,} of {payload['n_test']:,} test images)" in text


def test_evaluate_a_recipe_takes_its_trained_dense_model(
    monkeypatch: pytest.MonkeyPatch, recipe: str, jobs: list[JobSettings]
) -> None:
    def stand_in(job: JobSettings, *, log: Log, progress: bool, own: Own) -> Subject:
        jobs.append(job)
        model = nn.Sequential(nn.Conv2d(3, 10, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return Subject(model, job.name, (3, 8, 8), load_splits(job.data))

    monkeypatch.setattr(baseline_cache, "trained_subject", stand_in)
    result = run("evaluate", recipe, *SMALL_IMAGES, "--seed", "9", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["model"] == "small"
    assert (jobs[0].seed, jobs[0].device, jobs[0].data.image_size) == (9, "cpu", 8)


def test_a_model_folder_in_a_run_is_tested_on_the_data_of_that_run(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert recipe_of_data([str(tmp_path / "run" / "model")], None) is None
    (tmp_path / "run" / "recipe.yaml").write_text(RECIPE)
    assert recipe_of_data([str(tmp_path / "run" / "model")], None) == str(tmp_path / "run" / "recipe.yaml")
    assert recipe_of_data([str(tmp_path / "run" / "model")], recipe) == recipe
    assert recipe_of_data([], None) is None


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to itself")
def test_ctrl_c_in_a_run_exits_with_130(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    def interrupted(job: JobSettings, **options: Any) -> RunResult:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal comes first")

    monkeypatch.setattr(finetune_module, "finetune", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        result = run("finetune", recipe)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.stderr) == (130, "prunekit: interrupted\n")


def test_inspect_looks_in_the_zoo_it_is_told() -> None:
    pytest.importorskip("timm", reason="the extra timm is not installed")
    done = run("inspect", "test_resnet", "--zoo", "timm", "--input-shape", "1x3x64x64", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["architecture"] == "ResNet"
    assert result["input_shape"] == [1, 3, 64, 64]
    assert result["free_share"] > 0.95


def test_a_factory_of_a_module_makes_the_model() -> None:
    done = run("inspect", "--model", "python:torchvision.models:squeezenet1_1", "--input-shape", "1x3x64x64", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["architecture"] == "SqueezeNet"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "--zoo", "cifar"], "--zoo cifar goes with the name of a model, got none"),
        (["inspect", "a.yaml", "--zoo", "timm"], "a.yaml is a recipe: set model.zoo=timm"),
        (["inspect", ".", "--zoo", "timm"], "--zoo timm goes with the name of a model, got ."),
        (["inspect", "resnet18", "--zoo", "cifar"], "no model 'resnet18' in cifar"),
        (["inspect", "--zoo", "tim"], "'torchvision', 'cifar', 'timm', 'hf'"),
        (
            ["inspect", "resnet18", "--model", "python:a:b"],
            "expected one model, got two: resnet18 and --model python:a:b",
        ),
    ],
)
def test_a_zoo_needs_a_name(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code != 0
    assert message in done.stderr

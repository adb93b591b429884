"""The benchmarks print what they say they print."""

from __future__ import annotations

import importlib.util
import io
import json
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from equivalence import randomized
from torch import nn

import prunekit
import prunekit.data.drawn_shapes
import prunekit.data.sources
from prunekit.models.cifar import CifarResNet

FOLDER = Path(__file__).parent.parent / "benchmarks"
STRATIFIED = {
    "torchvision": (
        "swin_v2_t", "lraspp_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "r3d_18",
    ),
    "timm": ("test_convnext", "test_efficientnet", "test_nfnet", "mobilevit_xxs"),
    "hf": ("swin", "t5", "llama", "whisper"),
    "ultralytics": ("yolov8n-seg",),
    "geometric": ("gin",),
    "diffusers": ("autoencoder_tiny",),
}  # fmt: skip
PACKAGES = {"hf": "transformers", "geometric": "torch_geometric"}
"""Packages of the zoos that are not called as they are."""
"""Kinds that no other test prunes; `benchmarks/coverage.py` runs the whole zoos."""


@dataclass(frozen=True)
class Done:
    """What became of a script."""

    returncode: int
    stdout: str
    stderr: str


def run(script: str, *arguments: str) -> Done:
    """Runs a script in this process: to import torch in another takes longer than most of them."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        patch.syspath_prepend(FOLDER)
        patch.setattr(sys, "argv", [str(FOLDER / script), *arguments])
        try:
            runpy.run_path(str(FOLDER / script), run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = 1 if isinstance(ended.code, str) else int(ended.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("reader", ["archives of images (.npz)", "runs to resume"])
def test_damaged_files_are_counted_by_what_became_of_them(reader: str, tmp_path: Path) -> None:
    done = run("fuzz.py", "--only", reader, "--inputs", "12", "--at", str(tmp_path / "at.json"))
    row = json.loads(done.stdout)
    assert row["reader"] == reader
    assert row["inputs"] == row["loaded"] + row["refused"] == 12
    assert row["loaded"] > 0
    assert row["refused"] > 0
    assert row["faults"] == []


@pytest.mark.slow
def test_one_object_a_line() -> None:
    done = run("hooks.py", "--json", "--only", "mask/inference", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["mask/inference/resnet34"]
    assert {"ratio", "low", "high", "median_ms", "baseline_ms", "threads", "batch", "dtype"} <= rows[0].keys()


@pytest.mark.slow
def test_training_steps_beside_plain_ones_and_what_memory_grows_by() -> None:
    done = run("training.py", "--json", "--only", "masked+ema", "--rounds", "2", "--batch", "2", "--size", "32")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["masked+ema/resnet34"]
    assert rows[0]["grown_bytes"] == 0


@pytest.mark.slow
def test_rounded_widths_are_timed_beside_any() -> None:
    done = run("rounding.py", "--json", "--models", "mobilenet_v3_small", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    rows = {row["round_to"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == [1, 4, None, 8, 16]
    assert rows[1]["multiples_of_8"] < rows[None]["multiples_of_8"] <= rows[8]["multiples_of_8"] == 1
    assert all(row["macs_left"] <= 0.5 for row in rows.values())


def test_zeros_are_timed_beside_the_dense_network() -> None:
    done = run("sparse_runtimes.py", "--json", "--quick", "--rounds", "5", "--only", "eager")
    assert done.returncode == 0, done.stderr
    rows = {row["name"].rpartition("/")[2]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["again", "50 %", "80 %", "90 %", "95 %", "2:4", "16x16, 90 %"]
    assert rows["again"]["zeros"] == 0
    assert rows["2:4"]["zeros"] == 0.5
    for name, share in (("50 %", 0.5), ("80 %", 0.8), ("90 %", 0.9), ("95 %", 0.95), ("16x16, 90 %", 0.9)):
        assert rows[name]["zeros"] == pytest.approx(share, abs=0.05)
    assert all(row["low"] <= row["speedup"] <= row["high"] for row in rows.values())


@pytest.mark.slow
def test_time_per_operator_is_measured_for_both_nets() -> None:
    done = run("scaling.py", "--json", "--sizes", "24", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["net"] for row in rows] == ["residual", "chain"]
    assert all(row["operators"] >= 24 and row["trace_seconds"] > 0 and row["prune_seconds"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_fine_tuned_reductions_are_run_once_and_read_after_that(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = {f"x_{part}": generator.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "cifar10.npz", **images, y_train=np.arange(60) % 10, y_test=np.arange(60) % 10)
    torch.save(randomized(CifarResNet(8)).state_dict(), tmp_path / "weights.th")
    places = ("--weights", str(tmp_path / "weights.th"), "--data", str(tmp_path / "cifar10.npz"))
    quick = ("model.name=resnet8", "data.batch=16", "finetune.epochs=1", "latency.repeats=5", "latency.explain=false",
             "calibration.images=16", "repair=null", "prune.criterion=l2", "threads=1", "device=cpu")  # fmt: skip
    arguments = (*places, "--runs", str(tmp_path / "runs"), "--reduction", "2", "--seeds", "3", "--json", *quick)
    done = run("finetune_cifar10.py", *arguments, "--control")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["reduction"], row["seed"], row["control_top1"] is None) for row in rows] == [(2.0, 3, False)]
    for row in rows:
        assert row["macs"] * row["reduction"] <= 12_239_488
        assert row["parity"] < 1e-9
        assert [point["epoch"] for point in row["curve"]] == [1]
    again = run("finetune_cifar10.py", *arguments, "--control")
    assert [json.loads(line) for line in again.stdout.splitlines()] == rows
    assert len(list((tmp_path / "runs").glob("*/*/*/metrics.json"))) == 1
    failed = run("finetune_cifar10.py", *arguments, "finetune.lr=-1")
    assert (failed.returncode, "finetune.lr: expected a number above 0" in failed.stderr) == (2, True)


@pytest.mark.slow
def test_time_and_memory_of_pruning_without_training() -> None:
    arguments = ("--model", "shufflenet_v2_x0_5", "--size", "32", "--images", "16", "--threads", "1", "--json")
    done = run("oneshot_speed.py", *arguments, "--memory-mib", "64")
    assert done.returncode == 0, done.stderr
    assert "repair: takes up to " in done.stderr  # on a busy machine after a line on what it is at
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["macs_left"] <= 0.5 * row["macs"]
    assert row["stated_mib"] <= 64
    assert row["error_after"] < row["error_before"]
    assert {"plan", "repair", "compact", "verify"} <= {name.removesuffix("_peak_mib") for name in row}


@pytest.mark.slow
def test_counted_memory_is_shown_beside_what_a_process_takes() -> None:
    arguments = ("--models", "shufflenet_v2_x0_5", "--size", "64", "--batch", "8", "--runtimes", "eager", "--json")
    done = run("memory.py", *arguments)
    assert done.returncode == 0, done.stderr
    dense, pruned = [json.loads(line) for line in done.stdout.splitlines()]
    assert (dense["model"], pruned["model"]) == ("dense", "pruned")
    assert pruned["counted_mb"] <= pruned["asked_mb"] == dense["counted_mb"] / 2
    assert {"process_mb", "more"} <= dense.keys()


@pytest.mark.slow
@pytest.mark.parametrize("zoo", STRATIFIED)
def test_models_of_every_zoo_pass(zoo: str) -> None:
    pytest.importorskip(PACKAGES.get(zoo, zoo), reason=f"the package of the zoo {zoo} is not installed")
    names = ",".join(STRATIFIED[zoo])
    done = run("coverage.py", "--zoo", zoo, "--models", names, "--size", "64", "--no-export", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["model"] for row in rows] == list(STRATIFIED[zoo])
    for row in rows:
        assert row["verdict"] == "passed", row
        assert row["passed"] is True
        assert row["max_relative_difference"] <= 1e-9
        assert 0.25 < row["least"] < 0.35
        assert row["beyond"] <= 0.05
        assert row["weights_left"] <= 1.05 * row["least"]
        assert row["pickles"] == "yes"
        assert row.get("generates", "yes") == row.get("fuses", "yes") == "yes"
        assert {"free_parameter_share", "macs_left", "seconds", "reason"} <= row.keys()


@pytest.mark.slow
def test_ordinary_networks_through_the_journey() -> None:
    # in a process of its own: it forks for each network, and a process that has computed gradients cannot
    command = [sys.executable, "-W", "ignore", str(FOLDER / "ordinary.py"), "--only", "TwoTower,NamesRNN", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    through, refused = (json.loads(line) for line in done.stdout.splitlines())
    steps = ("by example", "by data", "trained", "saved and loaded", "ONNX")
    assert through == {"network": "TwoTower", "kind": "graphs", **dict.fromkeys(steps, "ok"), "locked": 0, "reason": ""}
    assert refused["by example"].startswith("PlanError: no channel is free")
    assert (refused["saved and loaded"], refused["ONNX"]) == ("not reached", "not reached")
    assert done.stderr.endswith("1 of 2 go through all of it\n")


@pytest.mark.slow
def test_uses_of_compact_models_beside_their_dense_ones() -> None:
    pytest.importorskip("timm")
    columns = ["deepcopy", "state_dict", "fx", "jit.trace"]
    done = run("uses.py", "--zoo", "timm", "--models", "test_vit", "--uses", ",".join(columns), "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert [row.pop(key) for key in ("zoo", "model", "passed")] == ["timm", "test_vit", True]
    assert row.pop("fx").startswith("dense too: TraceError")
    assert row == dict.fromkeys(set(columns) - {"fx"}, "yes")


@pytest.mark.slow
def test_exports_of_a_zoo() -> None:
    pytest.importorskip("timm")
    done = run("export.py", "--zoo", "timm", "--models", "test_efficientnet", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"model": "test_efficientnet", "onnx": "yes", "passed": True}
    assert done.stderr == "1 of 1 (100.0%) export to ONNX where the dense model does; 0 dense ones do not\n"


def test_the_sentence_on_what_stays_names_the_first_lock_and_alike_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.erfinv(self.second(self.first(x).relu()).sigmoid()))

    monkeypatch.syspath_prepend(FOLDER)
    least, reasons = (importlib.import_module(name) for name in ("coverage_least", "coverage_reasons"))
    net, x = Stuck().eval(), torch.randn(2, 3)
    plan = prunekit.prune(net, x, channels=0.5).plan
    (found,) = reasons.Stops(plan.channel_map, plan.keep, least.least_left(net, x)).sentences()
    beyond = (8 * 4 - 4 * 4) + 4  # of the weight and the bias of `second`
    entries = 3 * 8 + 8 + 8 * 8 + 8
    assert found.startswith(
        f"{100 * beyond / entries:.1f} points in second.weight and 1 more: "
        "aten.erfinv operator aten.erfinv has no rule in the top-level forward"
    )


@pytest.mark.slow
def test_what_exports_to_onnx_and_what_does_not_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    export = importlib.import_module("coverage_export")
    x = torch.randn(2, 3)
    assert export.onnx(nn.Linear(3, 8), (x,), None) == "yes"
    assert export.differing([x.numpy()], x * 1.1) == "differs by 0.091"
    assert export.differing([x.numpy()], (x, x)) == "1 outputs for 2"


def test_a_model_that_does_not_get_through_is_a_row_with_a_reason() -> None:
    done = run("coverage.py", "--models", "vit_b_32", "--limit", "0.01", "--size", "64", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["passed"], row["verdict"]) == (False, "failed")
    assert row["reason"].startswith("not done after 0.")


def test_a_model_that_cannot_be_built_is_a_row_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zoo:
        def build(self, name: str, side: int | None) -> None:
            raise ValueError(f"no weights for {name}")

    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("coverage_of_zoos", FOLDER / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    coverage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(coverage)
    (row,) = coverage.check_one(Zoo(), "net", None)
    assert (row["passed"], row["verdict"]) == (False, "failed")
    assert row["reason"].startswith("not built: ValueError: no weights for net")


def test_a_name_that_the_zoo_does_not_know_is_refused_before_any_model_runs() -> None:
    done = run("coverage.py", "--models", "alexnet,resnet19", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "torchvision has no model 'resnet19'; did you mean resnet18" in done.stderr


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments that name random weights, as published ones are stored, and an archive of random images."""
    folder, random = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    weights = {f"module.{name}": tensor for name, tensor in randomized(CifarResNet(8)).state_dict().items()}
    torch.save({"state_dict": weights, "best_prec1": 0.0}, folder / "resnet8.th")
    arrays = {f"x_{part}": random.integers(0, 256, (64, 32, 32, 3), dtype=np.uint8) for part in ("train", "test")}
    np.savez(folder / "cifar10.npz", y_train=np.arange(64) % 10, y_test=np.arange(64) % 10, **arrays)
    files = ("--weights", str(folder / "resnet8.th"), "--data", str(folder / "cifar10.npz"))
    return ("oneshot_cifar10.py", "--depth", "8", *files, "--threads", "1", "--json")


@pytest.mark.slow
def test_activation_sparsity_is_measured_uniform_and_spread(cifar: tuple[str, ...]) -> None:
    done = run("activation_sparsity.py", *cifar[1:], "--images", "16", "--overall", "0.8")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["way"], row["overall"]) for row in rows] == [("dense", None), ("uniform", 0.8), ("spread", 0.8)]
    assert all(row["reached"] == pytest.approx(0.8, abs=0.05) for row in rows[1:])
    assert all(len(row["thresholds"]) == 7 for row in rows[1:])
    refused = run("activation_sparsity.py", *cifar[1:], "--overall", "1.5")
    assert refused.returncode == 2
    assert "expected numbers between 0 and 1, got 1.5" in refused.stderr


@pytest.mark.slow
def test_every_method_without_training_meets_its_reduction(cifar: tuple[str, ...]) -> None:
    methods = ["oneshot", "oneshot-stream", "oneshot-uniform", "l2-repaired", "l2-recalibrated"]
    done = run(*cifar, "--images", "16", "--reduction", "1.5", "--method", ",".join(methods))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["method"] for row in rows] == methods
    for row in rows:
        assert set(row) == {"method", "reduction", "macs", "top1", "seconds", "seed"}
        assert 0.9 * 12_239_488 / 1.5 < row["macs"] <= 12_239_488 / 1.5
        assert (row["reduction"], row["seed"]) == (1.5, 0)


def test_the_importances_of_torch_pruning_meet_the_reduction_too(cifar: tuple[str, ...]) -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed")
    done = run(*cifar, "--images", "16", "--seeds", "2", "--method", "tp-taylor,tp-hessian-recalibrated")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("tp-taylor", 0), ("tp-hessian-recalibrated", 0), ("tp-taylor", 1), ("tp-hessian-recalibrated", 1),
    ]  # fmt: skip
    assert all(0.8 * 6_119_744 < row["macs"] <= 6_119_744 for row in rows)


def test_a_budget_out_of_reach_is_a_row_with_a_reason(cifar: tuple[str, ...]) -> None:
    done = run(*cifar, "--images", "16", "--reduction", "1000", "--method", "l2")
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["macs"], row["top1"]) == (None, None)
    assert row["reason"].startswith("l2: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "x_train: expected at least 1024 images to calibrate on, got 64"),
        (("--reduction", "0.5"), "expected numbers above 1, got 0.5"),
        (("--reduction", "2.0,half"), "expected numbers above 1, got 2.0,half"),
        (("--method", "l3"), "no method 'l3'"),
    ],
)
def test_what_cannot_be_measured_is_said(cifar: tuple[str, ...], arguments: tuple[str, ...], message: str) -> None:
    done = run(*cifar, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


SMALL = ("--size", "32", "--networks", "10", "--json")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of profiles, so that networks are measured once."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_speedups_are_asked_for_delivered_or_refused_and_not_asked_for_again(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", cache)
    file = tmp_path / "rows.jsonl"
    arguments = ("--models", "resnet18", "--runtimes", "eager", *SMALL, "--out", str(file))
    done = run("latency_budget.py", *arguments, "--asked", "1.5,900")
    assert done.returncode == 0, done.stderr
    met, refused = (json.loads(line) for line in done.stdout.splitlines())
    assert {"model", "runtime", "device", "batch", "threads", "asked", "ci95", "stable", "within"} <= met.keys()
    assert met["excess"] == pytest.approx(1.5 / met["delivered"])
    assert met["macs_ratio"] > 1
    assert met["attempts"] == len(met["attempts_excess"]) <= 8
    assert met["profile_networks"] == 10
    assert met["versions"] == f"torch {version('torch')}"
    assert refused["refused"] is True
    assert "delivered" not in refused
    assert "no other is predicted to be faster" in refused["reason"]
    assert "2 requests: 1 delivered" in done.stderr
    before = file.read_text()
    again = run("latency_budget.py", *arguments, "--asked", "1.5,900")
    assert (again.returncode, again.stdout, file.read_text()) == (0, "", before)
    assert "2 requests: 1 delivered" in again.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_plans_by_time_keep_to_the_macs_of_the_uniform_cut(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", cache)
    few = ("--repeats", "5", "--steps", "2")
    arguments = ("--model", "resnet18", "--runtimes", "eager", "--device", "cpu", *few, *SMALL)
    done = run("latency.py", *arguments)
    assert done.returncode == 0, done.stderr
    rows = {row["plan"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["uniform", "macs", "macs+time", "capacity"]
    for row in rows.values():
        assert 0.97 * rows["uniform"]["macs"] <= row["macs"] <= rows["uniform"]["macs"]
        assert row["of_macs_ratio"] == pytest.approx(row["delivered"] / row["macs_ratio"])
    assert rows["macs+time"]["predicted"] >= rows["macs"]["predicted"]
    assert rows["capacity"]["predicted"] >= rows["uniform"]["predicted"]


@pytest.mark.usefixtures("little_effort")
def test_plans_of_another_tool_are_brought_to_a_latency(
    cifar: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch_pruning", reason="torch-pruning is not installed")
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))
    methods = ["tp-l2"]  # each takes as many measurements as any budget of time
    arguments = ("--runtimes", "eager", "--batch", "8", "--images", "16", "--networks", "10", "--asked", "1.1")
    done = run("latency_frontier.py", *cifar[1:], *arguments, "--method", ",".join(methods))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["method"] for row in rows] == methods
    for row in rows:
        assert row["excess"] == pytest.approx(1.1 / row["delivered"])
        assert 0 < row["kept_elimination"] <= 1
        assert 0 < row["kept_l2"] < 1
        assert "top1_repaired" in row


@pytest.mark.slow
def test_what_a_drop_delivers_is_seen_on_samples_that_nobody_chose_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    frontier, random = importlib.import_module("frontier"), torch.Generator().manual_seed(0)
    dense = randomized(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))).eval()
    x = torch.randn(900, 8, generator=random)
    chosen, test = ((part, dense(part).argmax(1)) for part in (x[100:500], x[500:]))
    drawn = frontier.Drawn(dense, x[:100], chosen, test)
    for way in ("max_drop", "by_hand"):
        row = frontier.delivered(way, drawn, 0.3)
        model = frontier.WAYS[way](drawn, 0.3)[0].model
        right = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        assert row["drop"] == pytest.approx(1 - right, abs=1e-6)
        assert row["low"] < row["drop"] < row["high"]
        assert (row["holds"], row["beyond"]) == (row["drop"] <= 0.3, row["low"] > 0.3)
        assert row["held_out"] <= 0.3
        assert row["macs"] == model[0].out_features / 32
        assert row["tried"] > 2
    refused = frontier.delivered("max_drop", drawn, 0.0001)
    assert refused["reason"].startswith("max_drop: 400 held-out samples cannot confirm")
    assert refused.keys() == row.keys() | {"reason"}
    kind = {"what": "drop", "model": "net", "way": "max_drop", "asked": 0.3}
    (summary,) = frontier.summaries([{**kind, "seed": seed, **found} for seed, found in enumerate((row, refused, row))])
    counts = {"draws": 3, "delivered": 2, "holds": 2 * row["holds"], "beyond": 0, "macs": row["macs"]}
    assert summary == summary | counts | kind


@pytest.mark.slow
def test_the_cost_of_a_frontier_beside_separate_calls(cifar: tuple[str, ...], tmp_path: Path) -> None:
    random, labels = np.random.default_rng(0), np.arange(200) % 10
    images = random.integers(0, 256, (264, 32, 32, 3), dtype=np.uint8)
    arrays = {"x_train": images[:64], "y_train": labels[:64], "x_test": images[64:], "y_test": labels}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    files = ("--weights", cifar[4], "--data", str(tmp_path / "cifar10.npz"), "--model", "resnet8", "--images", "16")
    done = run("frontier.py", *files, "--json", "--what", "cost", "--points", "2", "--calls", "0.5")
    assert done.returncode == 0, done.stderr
    row, summary = map(json.loads, done.stdout.splitlines())
    assert [row[name] for name in ("model", "seed", "points", "calls")] == ["resnet8", 0, 2, 1]
    assert row["ratio"] == pytest.approx(row["frontier_cpu_seconds"] / row["calls_cpu_seconds"])
    assert row["ratio_measured"] < row["ratio"] == summary["ratio"]
    refused = run("frontier.py", *files, "--what", "drop", "--drops", "2")
    assert (refused.returncode, "such as 0.01,0.02, got 2" in refused.stderr) == (2, True)


def test_drawn_shapes_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    detection = runpy.run_path(str(FOLDER / "detection.py"))
    shapes, data = prunekit.data.drawn_shapes, detection["draw"](tmp_path, 64, 6, 3)
    splits = prunekit.data.sources.load_splits(prunekit.DataSettings("yolo", root=data, image_size=64))
    assert splits.classes == shapes.CLASSES
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [6, detection["VALIDATION"], 3]
    for index in range(6):
        _, objects = shapes.DrawnShapes(100, 64).read(index)
        _, (target,) = splits.train.fetch(torch.tensor([index]))
        torch.testing.assert_close(target["boxes"], objects.boxes, atol=1e-3, rtol=0)
        assert torch.equal(target["labels"], objects.labels)

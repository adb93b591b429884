"""Budgets of time for quantized files: profiled, planned, delivered and measured last in int8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chains import Chain

import prunekit
from prunekit.backends.backend import RUNTIMES
from prunekit.backends.session import INT8, Setting, Source, inputs_of
from prunekit.errors import PlanError, UsageError
from prunekit.measure.latency.comparison import choose_settings, measure_latency
from prunekit.measure.latency.timing_job import TimingJob, file_source, run_job
from prunekit.measure.latency_profile.network_timing import conditions
from prunekit.settings.deployment import LatencySettings, Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings, prune_contradictions
from prunekit.utils.availability import int8_note
from prunekit.utils.files import json_values

pytest.importorskip("onnxruntime")
CPU = torch.device("cpu")
SHAPE = (3, 16, 16)


def chain() -> torch.nn.Module:
    torch.manual_seed(0)
    return Chain([16, 24, 16], [3, 3, 3], shortcut=True).eval()


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_a_time_of_the_quantized_file_is_delivered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRUNEKIT_CACHE", str(tmp_path))
    target = Target("onnxruntime", batch=2, dtype="int8")
    found = prunekit.prune(chain(), (torch.randn(1, *SHAPE),), latency_ms=1000.0, macs=0.6, target=target)
    assert found.delivered is not None
    profiled = found.delivered.target.profile
    assert profiled.table.setting["dtype"] == INT8
    assert {"layers.0", "layers.1"} <= {layer["module"] for layer in profiled.rows()}
    assert found.delivered.within
    assert 0 < found.delivered.final.ms < 1000
    assert found.delivered.summary()["target"]["dtype"] == "int8"
    assert found.model(torch.randn(1, *SHAPE)).shape == chain()(torch.randn(1, *SHAPE)).shape


def test_times_in_int8_are_cached_apart_from_those_in_float() -> None:
    int8 = Setting("onnxruntime", "cpu", 1, 1, INT8)
    known = [conditions(setting, inputs_of(SHAPE), 5) for setting in (int8, replace(int8, dtype="float32"))]
    assert known[0] != known[1]
    assert "nncf" in conditions(replace(int8, runtime="openvino"), inputs_of(SHAPE), 5)["versions"]
    runtime = RUNTIMES.get("onnxruntime")
    assert runtime.file_key(int8) != runtime.file_key(replace(int8, dtype="float32"))
    assert runtime.file_key(int8) != RUNTIMES.get("openvino").file_key(int8)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_int8_is_timed_beside_float_and_refused_where_nothing_is_quantized() -> None:
    runtimes = ("eager", "onnxruntime")
    settings = LatencySettings((2,), (1,), 5, runtimes, ("fp32", "int8"))
    report = measure_latency({"dense": chain(), "again": chain()}, SHAPE, settings, [CPU])
    assert not report.failures
    assert {(row["runtime"], row["dtype"]) for row in report.rows} == {
        ("eager", "float32"), ("onnxruntime", "float32"), ("onnxruntime", "int8"),
    }  # fmt: skip
    assert any("eager on cpu, int8, contiguous: not timed: it runs no quantized files" in one for one in report.notes)
    assert int8_note() in report.notes
    with pytest.raises(UsageError, match="runs no quantized files; onnxruntime and openvino do; nothing was measured"):
        choose_settings(replace(settings, runtimes=("eager",), dtypes=("int8",)), [CPU])


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["float32", INT8])
def test_a_file_that_computes_something_else_is_not_timed(wrong: str, tmp_path: Path) -> None:
    runtime, setting = RUNTIMES.get("onnxruntime"), Setting("onnxruntime", "cpu", 2, 1, INT8)
    key = runtime.file_key(setting)
    torch.manual_seed(1)
    other = Chain([16, 24, 16], [3, 3, 3], shortcut=True).eval()
    sources = [
        file_source(runtime, model, inputs_of(SHAPE), [key], tmp_path / str(index))
        for index, model in enumerate((chain(), other))
    ]
    mixed = {
        name: sources[(name[1] == wrong) or (wrong == INT8 and name == key)].files[name] for name in sources[0].files
    }
    with torch.inference_mode():
        expected = {("dense", 2): [chain()(*inputs_of(SHAPE).sample(2))]}
    job = TimingJob(runtime, (setting,), {"dense": Source(files=mixed)}, expected, inputs_of(SHAPE), 5)
    (outcome,) = run_job(job, own_process=False)
    said = "expected at most 0.0001" if wrong == "float32" else "something else in int8 than in eager float32"
    assert said in str(getattr(outcome, "reason", "it was timed"))


def test_memory_of_quantized_files_is_not_counted() -> None:
    target = Target("onnxruntime", dtype="int8")
    settings = PruneSettings(BudgetSettings(memory_mb=1.0), target=target)
    (problem,) = prune_contradictions(
        json_values(vars(settings) | {"budget": {"memory_mb": 1.0}, "target": vars(target)})
    )
    assert problem[0] == ("target", "dtype")
    assert "because memory_mb is given: the memory of quantized files is not counted, got 'int8'" in problem[1]
    with pytest.raises(
        PlanError, match=r"budget memory_mb: target.dtype: expected 'fp32', 'bf16' or 'fp16', got 'int8'"
    ):
        prunekit.prune(chain(), (torch.randn(1, *SHAPE),), memory_mb=1.0, target=target)

"""Which models are timed on what, and the gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.errors import ModelError, UsageError
from prunekit.jobs.analyses.bench import bench_targets, gated
from prunekit.jobs.run.command_subject import Subject
from prunekit.measure.latency.comparison import devices
from prunekit.settings.deployment import LatencySettings

QUICK = LatencySettings(batches=(1, 2), threads=(1,), repeats=5)


def target(name: str, width: int = 4) -> Subject:
    return Subject(nn.Linear(width, 2), name, (width,))


@pytest.mark.slow
def test_every_model_is_timed_at_every_batch_and_compared_with_the_first() -> None:
    lines: list[str] = []
    result = bench_targets([target("a"), target("b")], QUICK, "cpu", log=lines.append)
    assert lines == ["latency: eager: timing 2 models in 2 settings"]
    assert {(row["model"], row["batch"]) for row in result.latency} == {("a", 1), ("a", 2), ("b", 1), ("b", 2)}
    assert [(row["model"], row["batch"]) for row in result.speedup] == [("b", 1), ("b", 2)]
    assert result.models == {name: {"params": 10, "macs": 8} for name in "ab"}


@pytest.mark.slow
def test_a_model_against_itself_keeps_two_rows() -> None:
    result = bench_targets([target("a"), target("a")], LatencySettings((1,), (1,), 5), "cpu", log=print)
    assert [row["model"] for row in result.latency] == ["a (1)", "a (2)"]


def test_models_that_take_different_inputs_are_refused() -> None:
    with pytest.raises(UsageError, match="a takes 4, b takes 5; give --input-shape"):
        bench_targets([target("a"), target("b", 5)], QUICK, "cpu", log=print)
    one, two = (
        (torch.zeros(3, 4), pk.Keywords(scale=scale)) for scale in (torch.zeros(1, 2), torch.zeros(1, 1).long())
    )
    targets = [replace(target("a"), inputs=one), replace(target("b"), inputs=two)]
    with pytest.raises(UsageError, match="a takes 4 and scale 2, b takes 4 and scale int64 1; give --input-shape"):
        bench_targets(targets, QUICK, "cpu", log=print)


def test_a_model_that_does_not_run_is_named_before_anything_is_timed() -> None:
    with pytest.raises(ModelError, match="b: the model does not run on an input of 1x4"):
        bench_targets([target("a"), Subject(nn.Linear(3, 2), "b", (4,))], QUICK, "cpu", log=print)


def test_auto_is_the_cpu_and_cuda_where_there_is_one() -> None:
    assert [device.type for device in devices("auto", QUICK)] == ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    assert devices("auto", replace(QUICK, runtimes=("openvino",))) == [torch.device("cpu")]
    assert devices("cpu, cpu", QUICK) == [torch.device("cpu")]
    for names in ("gpu", "cpu,gpu", "cpu,"):
        with pytest.raises(UsageError, match="expected auto, cpu"):
            devices(names, QUICK)


def test_what_cannot_be_timed_is_refused_before_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    broken = [Subject(nn.Linear(3, 2), "broken", (4,))]
    with pytest.raises(UsageError, match="'cuda' was asked for, but this machine's CUDA devices number 0"):
        bench_targets(broken, QUICK, "cpu,cuda", log=print)
    with pytest.raises(UsageError, match=r"cudagraphs on cpu.*it runs on cuda here; nothing was measured"):
        bench_targets(broken, replace(QUICK, runtimes=("cudagraphs",)), log=print)


@pytest.mark.parametrize(("limit", "slow"), [(1.9, [1, 2]), (2.0, [2]), (3.5, [])])
def test_the_gate_looks_at_the_last_named_model_only(limit: float, slow: list[int]) -> None:
    rows = [
        {"model": model, "batch": batch, "median_ms": ms, "high_ms": 9 * ms, "stable": True}
        for model, batch, ms in (("dense", 1, 9.0), ("pruned", 1, 2.0), ("dense", 2, 9.9), ("pruned", 2, 3.5))
    ]
    assert [row["batch"] for row, fast in gated(rows, limit) if not fast] == slow


def test_an_unstable_row_passes_the_gate_with_its_whole_interval() -> None:
    row = {"model": "pruned", "median_ms": 2.0, "high_ms": 2.6, "stable": False}
    assert gated([row], 2.5) == [(row, False)]
    assert gated([row], 2.6) == [(row, True)]
    assert [fast for _, fast in gated([{**row, "stable": True}], 2.5)] == [True]
    assert gated([], 1.0) == []

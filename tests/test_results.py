"""Every result of resnet152 shows itself: a line at the prompt, a page when printed and in a notebook, rows as data."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet152

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import UsageError
from prunekit.jobs.analyses.bench import Benchmark, bench
from prunekit.jobs.analyses.explain import Explanation
from prunekit.jobs.analyses.sensitivity import Sensitivity
from prunekit.masks.thresholds import ActivationThresholds
from prunekit.measure.causes.breakdown import OperatorFigures, OperatorRow
from prunekit.measure.causes.width_causes import Cause
from prunekit.measure.latency.timing import Estimate
from prunekit.measure.verification import Verification
from prunekit.planning.budgets.latency_table import LayerLatency
from prunekit.planning.plan import Plan, load_plan
from prunekit.planning.sensitivity_curves import SensitivityCurve
from prunekit.pruning.latency.device_clock import Timing
from prunekit.pruning.latency.latency_target import LatencyResult, LatencyTarget
from prunekit.pruning.latency.profiling import NetworkPrediction, Profile
from prunekit.pruning.plan_search import PlanSearch
from prunekit.pruning.pruned import Pruned
from prunekit.repair.repair_report import LayerRepair, RepairMemory, RepairReport
from prunekit.report.pages.model_summary import summary
from prunekit.settings.pruning import BudgetSettings, PruneSettings
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.layer_stats import LayerStats, StatsKey
from prunekit.utils.display import Displayed

PLAIN = (str, int, float, bool, type(None))
PAGE = 6000
"""Characters that a result has on a terminal and in a notebook, at most."""


def plain(value: Any) -> bool:
    """Whether a value is of Python's own kinds, as deep as it goes."""
    if isinstance(value, list):
        return all(map(plain, value))
    return type(value) in PLAIN


def check(result: Displayed) -> None:
    """A result shows itself, in bounds."""
    line, text, page, rows = repr(result), str(result), result._repr_html_(), result.rows()
    assert re.fullmatch(rf"<{type(result).__name__}: .{{10,180}}>", line), line
    assert 20 < len(text) < PAGE
    assert 100 < len(page) < PAGE
    assert type(rows) is list
    assert all(type(row) is dict and all(map(plain, row.values())) for row in rows), rows
    assert len(result.frame()) == len(rows)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return resnet152().eval()


@pytest.fixture(scope="module")
def example() -> tuple[torch.Tensor]:
    return (torch.zeros(1, 3, 32, 32),)


@pytest.fixture(scope="module")
def chart(model: nn.Module, example: tuple[torch.Tensor]) -> ChannelMap:
    return trace(model, example)


@pytest.fixture(scope="module")
def plan(model: nn.Module, example: tuple[torch.Tensor], chart: ChannelMap) -> Plan:
    settings = PruneSettings(BudgetSettings(macs=0.5, size_mb=150), criterion="l2")
    return PlanSearch.trace(model, example, settings, channel_map=chart).find().plan


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(256, 10))


def small_plan() -> Plan:
    settings = PruneSettings(BudgetSettings(macs=0.5, params=0.6), criterion="l2")
    return PlanSearch.trace(small(), (torch.zeros(1, 3, 8, 8),), settings).find().plan


def test_a_channel_map_names_groups_and_locks(chart: ChannelMap) -> None:
    check(chart)
    text = str(chart)
    assert len(chart.rows()) == len(chart.groups)
    assert f"... {len(chart.groups) - 30} more rows; .rows() has all" in text
    assert re.search(r"layer1\.0\.conv3 +256  layer1\.0\.conv3, 3 more +layer1\.1\.conv1, 3 more", text)
    assert re.search(r"fc +1000 +output of the model", text)
    row = next(row for row in chart.rows() if row["group"] == "layer1.0.conv3")
    assert row["made_by"] == ["layer1.0.conv3", "layer1.0.downsample.0", "layer1.1.conv3", "layer1.2.conv3"]


def test_heads_are_inside_their_attention() -> None:
    chart = trace(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (torch.zeros(1, 5, 32),))
    inside = [row for row in chart.rows() if row["group"].startswith("self_attn")]
    assert [row["channels"] for row in inside][:1] == [4]
    assert all(row["made_by"] == row["read_by"] == ["self_attn"] for row in inside)


def test_a_plan_names_layers_and_budgets(plan: Plan, tmp_path: Path) -> None:
    check(plan)
    assert re.search(r"size +241 MB +150 MB +\d+ MB", str(plan))
    assert re.search(r"MACs +100\.0 % +50\.0 % +50\.0 %  binds", str(plan))
    plan.save(tmp_path)
    read = load_plan(tmp_path)
    assert str(read) == str(plan)
    assert read.rows() == plan.rows()


def test_a_small_plan_as_it_reads() -> None:
    found = small_plan()
    assert repr(found) == (
        "<Plan: MACs 28.8 k -> 13.7 k (47.5 %), parameters 3.96 k -> 2.21 k (55.8 %), channels 24 -> 15 (62.5 %); "
        "criterion l2, scope uniform, round_to by width>"
    )
    assert str(found).partition("\n\n")[2] == (
        "  budget        dense  asked for    left\n"
        "  MACs        100.0 %     50.0 %  47.5 %  binds\n"
        "  parameters  100.0 %     60.0 %  55.8 %\n\n"
        "  layer      inputs   outputs    MACs    left   share\n"
        "  0               –   8 ->  5  7.78 k  4.86 k  62.5 %\n"
        "  2        8 ->   5  16 -> 10  18.4 k  7.20 k  39.1 %\n"
        "  4      256 -> 160        10  2.56 k  1.60 k  62.5 %"
    )
    assert found.rows()[1] == {
        "layer": "2", "in_dense": 8, "in_kept": 5, "out_dense": 16, "out_kept": 10,
        "macs_dense": 18432, "macs_kept": 7200,
    }  # fmt: skip
    check(found.channel_map)


def test_paths_of_modules_are_escaped() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(4, 8))
            self.add_module("<b>", nn.Linear(8, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self.children():
                x = module(x)
            return x

    planned = PlanSearch.trace(
        Odd(), (torch.zeros(1, 4),), PruneSettings(BudgetSettings(macs=0.6), criterion="l2")
    ).find()
    for result in (planned.plan, planned.plan.channel_map):
        assert "<script>" in str(result)
        assert "<script>" not in result._repr_html_()
        assert "&lt;script&gt;alert(1)" in result._repr_html_()


def channels(count: int = 157) -> list[str]:
    """As many layers as resnet152 has, with its longest names."""
    return [f"layer3.{index}.downsample.0" for index in range(count)]


def test_what_prune_returns(plan: Plan) -> None:
    timing = Timing(2.0, 1.9, 2.1, 1.9, 1.8, 2.0, True, ())
    unused: Any = None
    target = LatencyTarget(nn.Identity(), unused, unused, PruneSettings(BudgetSettings(speedup=2.0)), unused)
    notes = tuple(f"repair: layer3.{index}.conv1 not refitted: it is read twice" for index in range(40))
    report = RepairReport((LayerRepair("conv1.weight"),), 0.5, 0.1, True, RepairMemory(1, 1, 1, 1, (1, 1)))
    found = Pruned(
        nn.Identity(),
        plan,
        np.zeros(plan.keep.size),
        1e-15,
        None,
        report,
        notes,
        LatencyResult(target, (), True, timing),
    )
    check(found)
    assert "... 30 more notes; .notes has all" in str(found)
    assert re.search(r"MACs +\d+ M +\d+ M +50\.0 %", str(found))
    assert re.search(r"latency_ms +3\.80 +2 +52\.6 %", str(found))
    assert [row["figure"] for row in found.rows()] == ["MACs", "parameters", "channels", "latency_ms"]


def test_what_verify_returns() -> None:
    found = Verification(3.1e-15, 8)
    check(found)
    assert str(found).replace("\n  ", " ") == (
        "Verified: masked and compact model agree: outputs differ by at most 3.1e-15 of their largest value, on 8 "
        "samples in float64"
    )


@pytest.mark.slow
def test_a_summary_of_modules(model: nn.Module, example: tuple[torch.Tensor]) -> None:
    found = summary(model, example)
    check(found)
    assert "more rows; .rows() has all" in str(found)
    assert "60.2 M parameters" in repr(found)


def test_a_repair_lists_its_layers() -> None:
    layers = tuple(LayerRepair(f"{name}.weight", "patch", 0.2, 0.1, 64, 64, 0.01) for name in channels())
    found = RepairReport(layers, 0.4, 0.1, True, RepairMemory(1, 1, 1, 1, (1, 1)), 0.1)
    check(found)
    assert "error of the output on held-out samples 40.00 % -> 10.00 % of its variance; 157 layers" in (
        " ".join(str(found).split()).replace("157 of 157 layers", "157 layers")
    )


def test_statistics_have_a_row_for_each_activation() -> None:
    layers = {StatsKey(name, "output", 0): LayerStats.empty(64) for name in channels()}
    found = ChannelStats(layers, {"model": "resnet152"})
    check(found)
    assert "157 activations, 10,048 channels" in str(found)
    check(ChannelStats({}))


@pytest.mark.slow
def test_a_sensitivity_has_the_most_sensitive_group_first(chart: ChannelMap) -> None:
    curves = {
        group.name: SensitivityCurve(group.labels, np.linspace(0, index + 1, group.labels.size + 1), group.labels.size)
        for index, group in enumerate(chart.groups)
    }
    found = Sensitivity(chart, chart.groups, curves, {})
    check(found)
    assert found.rows()[0]["group"] == chart.groups[-1].name


def test_a_profile_has_the_slowest_module_first(chart: ChannelMap) -> None:
    times = {name: float(index + 1) for index, name in enumerate(channels())}
    layers = tuple(LayerLatency(name, ms, (), 0.1) for name, ms in times.items())
    setting = {
        "runtime": "eager", "device": "cpu", "batch": 1, "threads": 1, "dtype": "float32", "memory_format": "contiguous"
    }  # fmt: skip
    table = SimpleNamespace(layers=layers, dense_ms=20.0, setting=setting)
    checks = (NetworkPrediction(20.0, 20.0, 1.0, False), NetworkPrediction(10.0, 11.0, 0.5, True))
    sample = SimpleNamespace(times=SimpleNamespace(modules_ms=times, dense_ms=20.0))
    found = Profile(chart, table, checks, (sample,) * 2, ("a note",), 12.0)  # type: ignore[arg-type]
    check(found)
    assert found.rows()[0]["module"] == channels()[-1]


def test_an_explanation_has_causes_and_operators() -> None:
    side = OperatorFigures(1.0, 1, 2e9, 10**6, 2000.0)
    operators = tuple(OperatorRow(name, "convolution", side, side, 1.0, 2.0, 0.006, 0.5) for name in channels())
    cause = Cause("slower kernels at these widths", 3.0, "measured " * 20, "round widths to 8")
    found = Explanation(
        "cpu", 1, 1, 150.0, 140.0, Estimate(1.07, 1.0, 1.1), 2.0, 65.0, 1.0, 1.0, 150.0, 140.0, operators, (cause,) * 5,
        ("noisy: the interval is wide",),
    )  # fmt: skip
    check(found)
    assert found.figures()["rows"][0]["module"] == channels()[0]
    assert "operators" not in found.figures()
    assert found.rows()[0]["dense_ms"] == 1.0


def test_a_benchmark_of_many_settings() -> None:
    names = ("dense", "pruned")
    places = [
        {
            "model": name, "device": "cpu", "runtime": "onnxruntime", "batch": batch, "threads": threads,
            "dtype": "float32", "memory_format": "contiguous", "stable": True, "doubts": [],
        }
        for batch in (1, 4, 16, 64)
        for threads in (1, 2, 4)
        for name in names
    ]  # fmt: skip
    times = dict.fromkeys(("median_ms", "low_ms", "high_ms", "p10_ms", "p90_ms", "p99_ms", "samples_per_s"), 1.25)
    latency = tuple({**place, **times, "peak_memory_bytes": 10**8} for place in places)
    speedup = tuple({**place, "median": 2.0, "low": 1.9, "high": 2.1} for place in places if place["model"] == "pruned")
    sizes = {name: {"params": 1, "macs": 1} for name in names}
    found = Benchmark(sizes, latency, speedup, ("a note",), (), {})
    check(found)
    assert found.rows()[1]["speedup"] == 2.0
    assert found.rows()[0]["speedup"] is None


@pytest.mark.slow
def test_bench_times_models_by_name() -> None:
    found = bench({"wide": nn.Linear(8, 8), "narrow": nn.Linear(8, 2)}, {"input": torch.zeros(2, 8)}, repeats=5)
    check(found)
    assert found.models == {"wide": {"params": 72, "macs": 64}, "narrow": {"params": 18, "macs": 16}}
    assert [row["model"] for row in found.rows()] == ["wide", "narrow"]
    assert {row["device"] for row in found.latency} == {"cpu"}  # where the first model is, also beside a GPU
    assert list(found.figures()) == ["models", "latency", "speedup", "notes", "failures", "machine"]
    with pytest.raises(UsageError, match=r"models: expected models by name, such as .*, got Linear"):
        bench(nn.Linear(8, 8), torch.zeros(2, 8))  # type: ignore[arg-type]


def test_thresholds() -> None:
    found = ActivationThresholds(dict.fromkeys(channels(), 0.1), dict.fromkeys(channels(), 0.5), 0.5, "output", 3)
    check(found)

"""The memory that pruning takes is said before it begins, and too little of it is an error."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

import prunekit as pk
from prunekit.criteria import elimination
from prunekit.errors import UsageError
from prunekit.pruning.sample_statistics import MemoryNeed, require_memory
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics import gram_matrices
from prunekit.utils import context
from prunekit.utils.tensors import FileMemory

GIGABYTE = 10**9


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 8)).eval()


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any model counts as large."""
    monkeypatch.setattr(context, "LARGE", 0)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))


def test_the_need_is_said_for_large_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    chart = pk.trace(model, torch.randn(2, 16))
    assert require_memory(model, chart, RepairSettings()) is None
    monkeypatch.setattr(context, "LARGE", 0)
    free(monkeypatch, 8 * GIGABYTE)
    said = require_memory(model, chart, RepairSettings())
    assert said is not None
    assert "beside the model" in said
    assert "8.00 GB are free" in said


def test_too_little_memory_names_the_setting_that_fits(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    chart = pk.trace(model, torch.randn(2, 16))
    need = MemoryNeed.of(model, chart, RepairSettings())
    assert need.most == need.repair
    free(monkeypatch, need.most - 2**20)
    assert "may be too little" in str(require_memory(model, chart, RepairSettings()))
    free(monkeypatch, need.most // 2)
    with pytest.raises(
        UsageError,
        match=r"are free: repair=prunekit.RepairSettings\(memory_bytes=(\d+)\), repair.memory_bytes in a recipe, fits",
    ):
        pk.prune(model, calibration=torch.randn(64, 16), macs=0.5)
    smaller = RepairSettings(memory_bytes=2**30)
    assert pk.prune(model, calibration=torch.randn(64, 16), macs=0.5, repair=smaller).repair is not None


def test_less_than_any_setting_takes_says_the_least(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**20)
    with pytest.raises(UsageError, match=r"are free: .*criterion='l2'"):
        pk.collect(network(), torch.randn(64, 16))


def test_matrices_in_a_file_give_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.randn(64, 16)
    expected = pk.prune(network(), calibration=samples, macs=0.5)
    monkeypatch.setattr(gram_matrices, "IN_MEMORY", 0)
    found = pk.prune(network(), calibration=samples, macs=0.5)
    assert found.plan.widths() == expected.plan.widths()
    for (name, one), (_, other) in zip(expected.model.named_parameters(), found.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_wide_groups_are_ordered_in_float32_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.randn(256, 16)
    expected = pk.plan(network(), calibration=samples, macs=0.5)
    monkeypatch.setattr(elimination, "WIDE", 0)
    found = pk.plan(network(), calibration=samples, macs=0.5)
    assert (found.keep == expected.keep).mean() > 0.95


def test_a_file_has_what_was_written() -> None:
    memory = FileMemory(limit=100)
    small, large = (memory.keep(torch.zeros(size, dtype=torch.float64)) for size in ((3,), (50, 50)))
    large.fill_diagonal_(2)
    view = large[10:20]
    memory.release()
    assert float(large.sum()) == 100
    assert float(view.sum()) == 20
    assert float(small.sum()) == 0
    del memory, large
    assert float(view.sum()) == 20

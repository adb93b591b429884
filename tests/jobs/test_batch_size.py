"""The largest batch that fits: the search, what is measured, and what is said where none was asked for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prunekit.data.sources import load_splits
from prunekit.errors import MemoryShortageError, RunError, UsageError, is_shortage
from prunekit.jobs import batch_size
from prunekit.jobs.batch_size import CLOSE, ROUNDS, BatchSizeSearch, Rehearsal, find_batch_size
from prunekit.jobs.run.command_subject import Own
from prunekit.jobs.run.job_subject import prepare
from prunekit.measure.latency.machine import PeakMemory
from prunekit.settings.inputs import DataSettings, ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import (
    ActivationSettings,
    AverageSettings,
    DistillSettings,
    RegularizerSettings,
    TrainSettings,
)
from prunekit.training.loop import fit

CPU = torch.device("cpu")
MB = 10**6


def said(message: str) -> None:
    """A log that nobody reads."""


@pytest.mark.parametrize("most", [1, 2, 3, 64, 1000])
@pytest.mark.parametrize("limit", [0, 2, 3, 31, 32, 33, 700, 5000])
def test_what_is_refused_is_bisected_to_the_last_image(most: int, limit: int) -> None:
    search = BatchSizeSearch(most, 1, lambda batch: 100 * batch if batch <= limit else None, said, exact=True)
    assert search.run() == (0 if limit < min(2, most) else min(limit, most))
    batches = [each.batch for each in search.tried]
    assert len(set(batches)) == len(batches) <= 2 * math.log2(max(2, most)) + 2
    assert max(batches) <= max(2 * limit, 2)


@pytest.mark.parametrize(
    "growth",
    [
        lambda batch: 300 * MB + 2 * MB * batch,
        lambda batch: 20 * MB + int(0.4 * MB * batch**1.1),
        lambda batch: 20 * MB + 3 * MB * 32 * math.ceil(batch / 32),
        lambda batch: max(400 * MB, 5 * MB * batch),
    ],
    ids=["line", "curve", "steps", "floor"],
)
@pytest.mark.parametrize("available", [600 * MB, 5000 * MB])
def test_what_is_measured_is_met_closely_in_few_rounds(growth: Any, available: int) -> None:
    search = BatchSizeSearch(100_000, available, growth, said)
    batch = search.run()
    assert growth(batch) <= available
    assert batch in [each.batch for each in search.tried]
    more = math.ceil((1 + CLOSE) * batch) + 1
    assert growth(more) > available or growth(batch) >= (1 - CLOSE) * available
    assert len(search.tried) < ROUNDS
    assert max(growth(each.batch) for each in search.tried) < 2 * available


def test_a_process_that_was_killed_is_a_batch_that_does_not_fit() -> None:
    search = BatchSizeSearch(10_000, 10**12, lambda batch: 100 * MB * batch if batch < 50 else None, said)
    assert 47 <= search.run() < 50


def job(output: Path, **changes: Any) -> JobSettings:
    settings = JobSettings(
        name="batches",
        model=ModelSettings("resnet8", "cifar"),
        data=DataSettings(image_size=16),
        baseline=TrainSettings(epochs=1),
        prune=PruneSettings(budget=BudgetSettings(macs=0.5)),
        finetune=TrainSettings(epochs=3, accumulate=4, average=AverageSettings(), distill=DistillSettings()),
        device="cpu",
        threads=1,
        output=output,
    )
    return replace(settings, **changes)


WIDE = """
from torch import nn

def net():
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 24, 1), nn.ReLU(), nn.Conv2d(24, 4, 1), nn.ReLU(), pool, nn.Linear(4, 10))
"""


@pytest.mark.slow
def test_the_batch_is_found_by_real_steps_and_takes_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "free_memory", lambda: 200 * MB)
    own = Own(model=f"{tmp_path / 'own.py'}:net")
    (tmp_path / "own.py").write_text(WIDE)
    settings = TrainSettings(epochs=1, average=AverageSettings())
    mine = job(tmp_path, model=ModelSettings("own.py:net", "own"), baseline=None, finetune=settings)
    found = find_batch_size(replace(mine, data=DataSettings(image_size=64)), log=said, own=own)
    assert (found.by, found.device, found.available) == ("memory", "cpu", 180 * MB)
    assert found.bytes <= found.available
    tried = {each.batch: each.bytes for each in found.tried}
    assert tried[found.batch] == found.bytes
    assert found.bytes > 0.6 * found.available  # kernels of a larger batch may take much more
    assert not any(
        taken is not None and taken <= found.available for batch, taken in tried.items() if batch > found.batch
    )
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["own.py"]


def test_every_training_of_the_job_is_rehearsed_with_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int, list[str]]] = []

    def note(model: nn.Module, splits: Any, settings: TrainSettings, **more: Any) -> Any:
        kinds = [type(part).__name__ for part in more["callbacks"]]
        seen.append((more["label"], more["batch"], len(splits.train), kinds))
        return fit(model, splits, settings, **more)

    monkeypatch.setattr("prunekit.jobs.batch_size.fit", note)
    everything = job(
        tmp_path,
        sparsify=TrainSettings(epochs=1, regularize=RegularizerSettings("growing")),
        prune=PruneSettings(schedule=ScheduleSettings()),
        activations=ActivationSettings(("layer1.*relu*",), target=0.5),
    )
    Rehearsal(prepare(everything)).train(3)
    assert seen == [
        ("baseline", 3, 6, []),
        ("sparsify", 3, 6, ["SparsityRegularizer"]),
        ("finetune", 3, 12, ["ContextCallback", "Distillation", "Average"]),
    ]
    with pytest.raises(UsageError, match="expected a job that trains"):
        Rehearsal(prepare(job(tmp_path, baseline=TrainSettings(epochs=0), finetune=TrainSettings(epochs=0))))


class Greedy(nn.Module):
    """Takes more memory than any machine has, from some batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 5:
            torch.empty(2**50)
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


def test_without_the_flag_the_error_names_the_batch_and_the_flag() -> None:
    splits = load_splits(DataSettings(image_size=8))
    with pytest.raises(MemoryShortageError) as caught:
        fit(Greedy(), splits, TrainSettings(epochs=1), device=CPU, seed=0, batch=6)
    message = str(caught.value)
    assert message.startswith(
        "out of memory on cpu in epoch 1, step 1: a batch of 6 images of 3x8x8 does not fit (Runtime"
    )
    assert "--find-batch-size" in message
    assert is_shortage(caught.value)
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not is_shortage(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_on_cuda_what_runs_out_of_memory_does_not_fit_and_other_errors_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def train(self, batch: int) -> None:
            if batch > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            if batch == 1:
                raise ValueError("something else")

    monkeypatch.setattr(PeakMemory, "settle", lambda self: 0)
    monkeypatch.setattr(PeakMemory, "peak", lambda self: 7 * MB)
    device = torch.device("cuda")
    refusing: Any = Refusing()
    search = BatchSizeSearch(100, 0, lambda batch: batch_size._on_cuda(refusing, device, batch), said, exact=True)
    assert search.run() == 3
    with pytest.raises(ValueError, match="something else"):
        batch_size._on_cuda(refusing, device, 1)


def test_what_cannot_be_had_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "MeasuringProcess", lambda *_: _Nothing())
    with pytest.raises(RunError, match="not even 2 images fit into the"):
        find_batch_size(job(tmp_path), log=said)


class _Nothing:
    def __enter__(self) -> Any:
        return lambda batch: None

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_on_a_device_one_more_image_runs_out_of_memory(tmp_path: Path) -> None:
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        on_cuda = job(tmp_path, device="cuda", data=DataSettings(image_size=64))
        found = find_batch_size(on_cuda, log=said)
        assert found.by == "memory"
        refused = min(each.batch for each in found.tried if each.bytes is None)
        assert refused == found.batch + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(batch_size, "CGROUPS", ((str(limit), str(used)),))
    free = batch_size.free_memory()
    assert free > 100 * MB
    limit.write_text("max\n")
    used.write_text(f"{30 * MB}\n")
    assert batch_size.free_memory() > 100 * MB
    limit.write_text(f"{50 * MB}\n")
    assert batch_size.free_memory() == 20 * MB

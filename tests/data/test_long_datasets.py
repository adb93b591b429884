"""Data sets of any length, of which some samples are wanted: what is not wanted costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import prunekit as pk
from prunekit.data.loader import batches
from prunekit.data.sources import source_of_parts
from prunekit.data.user_data import sample_splits
from prunekit.errors import DataError
from prunekit.jobs.diagnose import diagnose_target
from prunekit.jobs.export.export_inputs import file_batches
from prunekit.jobs.run.model_sources import InputModel
from prunekit.models.interface import ModelInterface
from prunekit.settings.inputs import DataSettings, Workers
from prunekit.training.compatibility import two_samples
from prunekit.utils.sample_lists import PERMUTED, drawn_at_random, evenly_spread

LONG = 10**12


class Long(Dataset[Any]):
    """Pairs of an image and its mask, of which any number is made when it is asked for."""

    def __init__(self, length: int = LONG, *, masks: bool = True) -> None:
        self.length, self.masks = length, masks

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index % 997))
        return image, (image[0] > 0.5).long() if self.masks else index % 2


def splits() -> Any:
    return sample_splits({"train": Long(), "test": Long(), "validation": Long()}, "segmentation", classes=("no", "yes"))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))


@pytest.mark.parametrize("total", [1, 2, 7, 1000, PERMUTED + 1, PERMUTED + 3, LONG, 2**62])
@pytest.mark.parametrize("count", [1, 2, 16, 1000])
def test_numbers_of_some_samples(total: int, count: int) -> None:
    spread, drawn = evenly_spread(total, count), drawn_at_random(total, count, seed=3)
    for found in (spread, drawn):
        assert len(found) == min(count, total) == len(found.unique())
        assert found.dtype == torch.int64
        assert int(found.min()) >= 0
        assert int(found.max()) < total
    assert torch.equal(spread, spread.sort().values)
    assert int(spread[0]) == 0
    assert count == 1 or int(spread[-1]) == total - 1
    assert torch.equal(drawn, drawn_at_random(total, count, seed=3))


@pytest.mark.slow
def test_some_samples_of_a_long_data_set_prune_a_model() -> None:
    small = pk.prune(net(), calibration=Long(), macs=0.5)
    assert small.model(torch.rand(1, 3, 8, 8)).shape == (1, 2, 8, 8)
    assert pk.collect(net(), Long()) is not None


@pytest.mark.slow
def test_sensitivity_and_diagnosis_take_some_samples_of_a_long_data_set() -> None:
    assert pk.sensitivity(net(), Long()).rows()
    assert pk.diagnose(net(), Long(), task="segmentation").images == 1024


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_first_batches_of_a_long_data_set(workers: int) -> None:
    read = batches(splits().train, 4, shuffle_seed=None, workers=Workers(workers, persistent=False))
    assert len(read) == LONG // 4
    first, second = (batch for (_, batch), _ in zip(read.numbered(), range(2), strict=False))
    assert torch.equal(first[0], torch.stack([Long()[index][0] for index in range(4)]))
    assert torch.equal(second[0], torch.stack([Long()[index][0] for index in range(4, 8)]))
    dealt = next(iter(read.dealt(1, 3)))
    assert torch.equal(dealt[0], second[0])


def test_parts_of_jobs_that_take_some_samples() -> None:
    made = splits()
    assert len(two_samples(made.train)[0]) == 2
    target = InputModel(net(), "net", (3, 8, 8), splits=made)
    assert diagnose_target(target, None, None, device=torch.device("cpu"), count=1).images == DataSettings().batch
    assert len(next(iter(file_batches(made.test, ModelInterface((), ()))))[0])


def test_an_order_of_more_samples_than_can_be_shuffled_is_refused() -> None:
    with pytest.raises(DataError, match=r"expected at most .* in a random order, got 1,000,000,000,000"):
        next(iter(batches(splits().train, 4, shuffle_seed=0)))


def test_a_part_that_would_be_drawn_from_too_many_is_asked_for() -> None:
    with pytest.raises(DataError, match=r"a validation part of its own, .* beside 1,000,000,000,000 training samples"):
        sample_splits({"train": Long(), "test": Long(4)}, "segmentation", classes=("no", "yes"))


def test_labels_that_would_take_years_to_read_are_asked_for() -> None:
    parts = {"train": Long(masks=False), "test": Long(8, masks=False)}
    with pytest.raises(DataError, match=r"train: expected labels of all images as the data set's `targets`"):
        source_of_parts(parts, DataSettings("own"), "data")


def test_a_part_of_a_long_data_set_is_a_data_set(tmp_path: Path) -> None:
    part = Subset(Long(masks=False), [0, 10**6 + 1, 10**11, LONG - 1, 5, 8])
    source = source_of_parts({"train": part, "test": part}, DataSettings("own"), "data")
    assert source.rest.labels.tolist() == [0, 1, 0, 1, 1, 0]

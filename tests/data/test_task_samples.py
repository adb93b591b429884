"""Data of any task: map-style data sets that are split, collated and taken apart."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prunekit.data.loader import batches
from prunekit.data.splits import Splits
from prunekit.data.user_data import load_own, sample_splits
from prunekit.errors import DataError, ModelError, UsageError
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.classification import TEXT_CLASSIFICATION
from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.tasks.task import Task
from prunekit.training.compatibility import check_fits

CODE = """
import pickle
import random

import torch

from prunekit.data.user_data import sample_splits
from prunekit.tasks.segmentation import SEGMENTATION


class Scenes:
    classes = ["ground", "thing"]

    def __init__(self, count, side=8):
        self.count, self.side = count, side

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == 13:
            raise OSError("torn")
        mask = torch.zeros(self.side, self.side, dtype=torch.uint8)
        mask[: index % self.side] = 1
        return torch.full((1, self.side, self.side), float(index)) + random.random() / 2, mask


class Growing(Scenes):
    def __getitem__(self, index):
        return torch.ones(1, 8, 8 + index), torch.zeros(8, 8 + index, dtype=torch.uint8)


def scenes():
    return Scenes(12), Scenes(4)


def torn():
    return Scenes(20), Scenes(4)


def growing():
    return {"train": Growing(4), "test": Growing(2), "validation": Growing(2)}


def one():
    return Scenes(1), Scenes(4)


def rows():
    return iter([]), Scenes(4)


def split():
    return sample_splits({"train": Scenes(12), "test": Scenes(4)}, SEGMENTATION)
"""
OWN = DataSettings("own")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "scenes.py").write_text(CODE, encoding="utf-8")
    return tmp_path / "scenes.py"


def loaded(file: Path, name: str, task: Task = SEGMENTATION, settings: DataSettings = OWN) -> Splits:
    return load_own(f"{file}:{name}", settings, task)


def numbers(splits: Splits, part: str) -> list[int]:
    images, _ = getattr(splits, part).fetch(torch.arange(len(getattr(splits, part))))
    return [int(image[0, 0, 0]) for image in images]


def test_samples_are_split_collated_and_taken_apart(file: Path) -> None:
    splits = loaded(file, "scenes", settings=DataSettings("own", validation_share=0.25))
    assert (splits.task, splits.classes, splits.sample_shape) == (SEGMENTATION, ("ground", "thing"), (1, 8, 8))
    assert sorted(numbers(splits, "train") + numbers(splits, "validation")) == list(range(12))
    assert (len(splits.validation), numbers(splits, "test")) == (3, [0, 1, 2, 3])
    images, masks = splits.test.fetch(torch.tensor([2, 0]))
    assert (images.shape, masks.shape, masks.dtype) == ((2, 1, 8, 8), (2, 8, 8), torch.int64)
    assert masks.flatten(1).sum(1).tolist() == [16, 0]

    again = loaded(file, "scenes", settings=DataSettings("own", validation_share=0.25))
    assert numbers(again, "validation") == numbers(splits, "validation")
    other = loaded(file, "scenes", settings=DataSettings("own", validation_share=0.25, split_seed=1))
    assert numbers(other, "validation") != numbers(splits, "validation")
    assert other.fingerprint != splits.fingerprint
    assert loaded(file, "split").task is SEGMENTATION


def test_workers_that_are_spawned_are_given_what_unpacks_and_no_more_of_the_task(file: Path) -> None:
    task = replace(SEGMENTATION, loss=lambda output, masks: output.mean())  # as factories make them: not to be pickled
    part = loaded(file, "scenes", task).test
    there = pickle.loads(pickle.dumps(part))
    assert all(map(torch.equal, there.fetch(torch.arange(4))[1:], part.fetch(torch.arange(4))[1:]))


def test_what_is_drawn_for_a_sample_depends_on_seed_epoch_and_index_alone(file: Path) -> None:
    splits = loaded(file, "scenes")

    def drawn(epoch: int) -> dict[int, float]:
        random.seed()
        reading = batches(splits.train, 4, shuffle_seed=3, augment=True).at_epoch(epoch)
        images = torch.cat([images for images, _ in reading])[:, 0, 0, 0].tolist()
        return {int(value): value for value in images}

    first = drawn(1)
    assert drawn(1) == first
    assert all(value != first[index] for index, value in drawn(2).items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torn", r"scenes\.py:torn train: sample 13: OSError: torn"),
        ("growing", r"growing train: samples .*expected samples of the same shapes .* RuntimeError"),
        ("one", r"one train: expected samples, two at least to train on, got 1"),
        ("rows", r"rows train: expected a map-style data set, with __len__ and __getitem__, got list_iterator"),
    ],
)
def test_data_that_cannot_be_used(file: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        loaded(file, name, settings=DataSettings("own", validation_share=0.01)).train.fetch(torch.arange(19))


def test_another_task_than_that_of_the_data_is_refused(file: Path) -> None:
    with pytest.raises(DataError, match=r"task 'text_classification' cannot unpack \[float32 \(11, 1, 8, 8\), uint8"):
        loaded(file, "scenes", TEXT_CLASSIFICATION)
    with pytest.raises(UsageError, match=r"expected Splits of the task 'text_classification', .* got 'segmentation'"):
        loaded(file, "split", TEXT_CLASSIFICATION)
    with pytest.raises(UsageError, match=r"data\.image_size, data\.augment would change nothing"):
        loaded(file, "scenes", settings=DataSettings("own", image_size=64, augment="flip"))


class Net(nn.Module):
    def __init__(self, classes: int = 2, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, classes, 3, stride, 1)

    def forward(self, images: Tensor) -> Any:
        return {"out": self.conv(images)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Net(3), "Net: expected 2 scores, one for each class of the data, got 3"),
        (Net(stride=2), r"task 'segmentation': Net returned \{out: float32 \(2, 2, 4, 4\)\}, the targets are int64"),
        (nn.Conv2d(3, 2, 1), r"Conv2d does not take float32 \(2, 1, 8, 8\): RuntimeError: Given groups=1"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), r"expected class scores \(B, classes, H, W\) .* got shape"),
    ],
)
def test_a_model_that_does_not_fit_its_task(file: Path, model: nn.Module, message: str) -> None:
    splits = loaded(file, "scenes")
    check_fits(Net(), splits, torch.device("cpu"))
    with pytest.raises(ModelError, match=message):
        check_fits(model, splits, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": lambda output, masks: torch.ones(())}, r"expected a loss of one number and counts \(K,\), got"),
        ({"loss": lambda output, masks: output["out"]}, r"got float32 \(2, 2, 8, 8\) and int64 \(6,\)"),
        ({"loss": lambda output, masks: output["in"]}, "KeyError: 'in'"),
        ({"scores": 150.0}, "expected scores in percent, 0 to 100, got mean_iou 150"),
    ],
)
def test_a_task_of_the_users_own_is_tried_before_training(file: Path, changes: dict[str, Any], message: str) -> None:
    if "scores" in changes:
        changes = {"scores": (replace(SEGMENTATION.main, of=lambda counts: 150.0),)}
    splits = replace(loaded(file, "scenes"), task=replace(SEGMENTATION, **changes))
    with pytest.raises(ModelError, match=message):
        check_fits(Net(), splits, torch.device("cpu"))


def test_classes_may_be_named_or_left_out() -> None:
    sets = {"train": [(torch.ones(1, 2, 2), torch.zeros(2, 2).long())] * 4, "test": [(torch.ones(1, 2, 2),) * 2]}
    with pytest.raises(DataError, match="data test: task 'segmentation' cannot unpack"):
        sample_splits(sets, SEGMENTATION)
    sets["test"] = sets["train"]
    assert sample_splits(sets, SEGMENTATION).classes == ()
    assert sample_splits(sets, SEGMENTATION, classes=["a", "b"]).classes == ("a", "b")
    with pytest.raises(DataError, match=r"expected data sets named train and test, .* got \['train'\]"):
        sample_splits({"train": sets["train"]}, SEGMENTATION)

"""The user's own data, from a factory in a Python file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.data.user_data import load_own
from prunekit.errors import DataError, UsageError
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION

CODE = """
import io

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION


def opened(pixels, torn):
    # A file that is opened and not decoded yet.
    file = io.BytesIO()
    Image.fromarray(np.kron(pixels, np.ones((5, 5, 1), np.uint8))).save(file, "BMP")
    return Image.open(io.BytesIO(file.getvalue()[:200] if torn else file.getvalue()))


class Grid(Dataset):
    # Images in any form that is allowed; every access is counted.
    def __init__(self, count, form, classes=3, broken=()):
        self.count, self.form, self.number, self.broken = count, form, classes, broken
        self.seen = 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.seen += 1
        if index in self.broken:
            raise OSError("a broken file")
        pixels = np.full((10, 10, 3), index, np.uint8)
        image = {
            "array": lambda: pixels,
            "gray": lambda: pixels[:, :, 0],
            "one": lambda: pixels[:, :, :1],
            "pil": lambda: Image.fromarray(pixels),
            "bytes": lambda: torch.from_numpy(pixels).permute(2, 0, 1),
            "float": lambda: torch.full((4, 10, 12), float(index)),
            "lazy": lambda: opened(pixels, index in (3, 8)),
            "odd": lambda: torch.full((4, 10, 12 + index // 9), float(index)),
            "text": lambda: "an image",
        }[self.form]()
        return image, index % self.number


class Known(Grid):
    def __init__(self, count, form, **options):
        super().__init__(count, form, **options)
        self.targets = [index % self.number for index in range(count)]


class Named(Known):
    classes = ["a", "b", "c"]


class Lying(Known):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label + 1


class Bare:
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return index


class Scored(Grid):
    def __getitem__(self, index):
        return super().__getitem__(index)[0], 0.5


kept = Known(30, "array")
two = lambda: (Grid(30, "array"), Grid(9, "array"))
three = lambda: (Grid(30, "pil"), Grid(9, "bytes"), Grid(6, "gray"))
named = lambda: {"train": Named(30, "one"), "test": Named(9, "one")}
known = lambda: (kept, Known(9, "array"))
subsets = lambda: (Subset(kept, range(0, 30, 2)), Known(9, "array"))
tensors = lambda: tuple(TensorDataset(torch.rand(n, 4, 10, 12), torch.arange(n) % 3) for n in (30, 9))
floats = lambda: (Grid(30, "float"), Grid(9, "float"))
odd = lambda: (Grid(30, "odd"), Grid(9, "odd"))
mixed = lambda: (Grid(30, "float"), Grid(9, "array"))
splits = lambda: load_splits(DataSettings(image_size=8))
broken = lambda: (Grid(30, "array", broken=(0, 7)), Grid(9, "array"))
lazy = lambda: (Grid(30, "lazy"), Grid(9, "array"))
own_splits = lambda: Splits(kept, kept, kept, ("a", "b"), (3, 10, 10), "")
lying = lambda: (Lying(30, "array"), Known(9, "array"))
text = lambda: (Grid(30, "text"), Grid(9, "text"))
bare = lambda: (Bare(), Bare())
scored = lambda: (Scored(30, "array"), Scored(9, "array"))
empty = lambda: (Grid(0, "array"), Grid(9, "array"))
no_classes = lambda: (Grid(30, "array", classes=1), Grid(9, "array"))
iterable = lambda: (iter(kept), iter(kept))
one = lambda: Grid(30, "array")
alone = lambda: (Grid(30, "array"),)
wrong_names = lambda: {"train": kept, "val": kept}
raising = lambda: 1 / 0
"""
SETTINGS = DataSettings(source="own", image_size=10, validation_share=0.2, batch=8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "images.py").write_text(CODE, encoding="utf-8")
    return tmp_path / "images.py"


def loaded(file: Path, name: str, **changes: Any) -> Splits:
    return load_own(f"{file}:{name}", replace(SETTINGS, **changes))


@pytest.mark.parametrize(
    ("name", "sizes", "classes"),
    [
        ("two", (24, 6, 9), ("0", "1", "2")),
        ("three", (30, 6, 9), ("0", "1", "2")),
        ("named", (24, 6, 9), ("a", "b", "c")),
        ("known", (24, 6, 9), ("0", "1", "2")),
        ("subsets", (12, 3, 9), ("0", "1", "2")),
    ],
)
def test_pixels_in_every_form(file: Path, name: str, sizes: tuple[int, ...], classes: tuple[str, ...]) -> None:
    splits = loaded(file, name, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == sizes
    assert (splits.classes, splits.sample_shape) == (classes, (3, 10, 10))
    image, label = splits.test[5]
    assert torch.equal(image, torch.full((3, 10, 10), 5) / 255)
    assert label == 2


@pytest.mark.parametrize("name", ["floats", "tensors"])
def test_float_tensors_are_fed_as_they_are(file: Path, name: str) -> None:
    splits = loaded(file, name)
    assert splits.sample_shape == (4, 10, 12)
    images, labels = next(iter(batches(splits.test, 9, shuffle_seed=None)))
    assert images.shape == (9, 4, 10, 12)
    assert labels.tolist() == [0, 1, 2] * 3
    for change in ({"augment": "flip"}, {"mean": (0.0, 0.0, 0.0)}):
        with pytest.raises(UsageError, match="change pixels, but the images are float tensors"):
            loaded(file, name, **change)


def test_splits_are_taken_as_they_are(file: Path) -> None:
    settings = DataSettings(source="own", batch=8, workers=1)
    splits = load_own(f"{file}:splits", settings)
    assert isinstance(splits, Splits)
    assert splits.sample_shape == (3, 8, 8)
    file.write_text(CODE + "\n# changed\n", encoding="utf-8")
    assert load_own(f"{file}:splits", settings).fingerprint != splits.fingerprint


def test_a_module_is_told_from_another_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_of_images").mkdir()
    (tmp_path / "package_of_images" / "own.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    splits = load_own("python:package_of_images.own:two", SETTINGS)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (24, 6, 9)
    (tmp_path / "package_of_images" / "own.py").write_text(CODE + "\n# changed\n", encoding="utf-8")
    assert load_own("python:package_of_images.own:two", SETTINGS).fingerprint != splits.fingerprint
    with pytest.raises(DataError, match="No module named 'package_of_pictures'"):
        load_own("python:package_of_pictures:two", SETTINGS)


@pytest.mark.parametrize(
    "change",
    [{"image_size": 8}, {"mean": (0.0,) * 3}, {"std": (1.0,) * 3}, {"augment": "flip"}, {"max_corrupt": 1},
     {"test_share": 0.2}, {"validation_share": 0.2}, {"split_seed": 1}],
)  # fmt: skip
def test_settings_that_splits_would_ignore_are_refused(file: Path, change: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=rf"returned Splits, .*: data\.{next(iter(change))} would change nothing; leave"
    ):
        load_own(f"{file}:splits", replace(DataSettings(source="own"), **change))


@pytest.mark.slow
def test_workers_that_are_spawned_find_the_users_classes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prunekit.data.loader.DataLoader", partial(DataLoader, multiprocessing_context="spawn"))
    splits = loaded(file, "two")
    (_, labels), _ = batches(splits.test, 8, shuffle_seed=None, workers=1)
    assert labels.tolist() == splits.test.labels[:8].tolist()


def test_known_labels_need_no_images(file: Path) -> None:
    splits = loaded(file, "known")
    seen = splits.train.dataset.dataset.seen  # type: ignore[attr-defined]
    assert seen == 1 + 16  # the first, and those that the fingerprint is taken from
    assert loaded(file, "two").train.dataset.dataset.seen == 30 + 16  # type: ignore[attr-defined]


def test_images_are_augmented_for_training_alone(file: Path) -> None:
    train = loaded(file, "two", augment="crop_flip").train
    plain, changed = (
        next(iter(batches(train, 24, shuffle_seed=None, augment=augment)))[0] for augment in (False, True)
    )
    assert not torch.equal(plain, changed)
    assert torch.equal(plain, next(iter(batches(loaded(file, "two").train, 24, shuffle_seed=None)))[0])


def test_corrupt_images_are_skipped(file: Path) -> None:
    splits = loaded(file, "broken", max_corrupt=2)
    assert len(splits.train) + len(splits.validation) == 30
    seen = sum(
        len(labels) for part in (splits.train, splits.validation) for _, labels in batches(part, 4, shuffle_seed=1)
    )
    assert seen == 28
    assert sorted(splits.corrupt) == [f"{file}:broken train: image {index}" for index in (0, 7)]
    with pytest.raises(DataError, match=r"broken train: image 0: expected an image, but OSError: a broken file"):
        loaded(file, "broken")


def test_a_file_that_turns_out_torn_when_it_is_decoded(file: Path) -> None:
    splits = loaded(file, "lazy", max_corrupt=2)
    assert sorted(splits.corrupt) == [f"{file}:lazy train: image {index}" for index in (3, 8)]
    with pytest.raises(DataError, match="lazy train: image 3: expected an image, but OSError: "):
        loaded(file, "lazy")


def test_the_fingerprint_follows_the_code(file: Path) -> None:
    before = loaded(file, "two").fingerprint
    assert loaded(file, "two").fingerprint == before
    file.write_text(CODE + "\n# changed\n", encoding="utf-8")
    assert loaded(file, "two").fingerprint != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lying", "train: image 0: expected label 0, as its targets say, got 1"),
        ("text", "train: image 0: expected a Pillow image, uint8 pixels .* got str"),
        ("bare", r"train: image 0: expected a pair \(image, label\), got int"),
        ("scored", "train: image 0: expected a whole number as its label, got 0.5"),
        ("empty", "train: expected images, but the data set is empty"),
        ("no_classes", "expected labels 0..classes-1 of two or more classes"),
        ("iterable", "expected a map-style data set, with __len__ and __getitem__, got .*iterator"),
        ("mixed", r"expected images of one form in all parts, got train: \(4, 10, 12\), test: pixels"),
        (
            "own_splits",
            r"expected Splits of prunekit\.data\.datasets\.ImageDataset, got Known; return other data sets as a tuple",
        ),
        ("one", r"expected the factory to return prunekit\.data\.splits\.Splits, or data sets .* got Grid"),
        ("alone", "got a tuple of 1"),
        ("wrong_names", "got a mapping with train, val"),
        ("raising", "the factory raised ZeroDivisionError"),
        ("kep", "there is no function or class 'kep' here"),
    ],
)
def test_what_is_wrong_is_said(file: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(batches(loaded(file, name).train, 8, shuffle_seed=None))


def test_tensors_of_different_sizes(file: Path) -> None:
    with pytest.raises(DataError, match=r"image \d+: expected a float tensor \(4, 10, 12\), as the first image, got"):
        loaded(file, "odd")


def test_code_is_never_named_by_settings() -> None:
    with pytest.raises(UsageError, match=r"give them as --data file\.py:factory"):
        load_splits(SETTINGS)


def test_a_task_with_a_loss_of_its_own_takes_labeled_images_like_the_task_it_is_made_from(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def data():\n"
        "    pixels = torch.zeros(12, 3, 20, 20, dtype=torch.uint8)\n"
        "    part = TensorDataset(pixels, torch.arange(12) % 2)\n"
        "    return part, part\n"
    )
    task = replace(IMAGE_CLASSIFICATION, name="weighted")
    splits = load_own(f"{tmp_path / 'own.py'}:data", DataSettings("own", image_size=8), task)
    assert (splits.task, splits.sample_shape) == (task, (3, 8, 8))
    assert splits.train.fetch(torch.arange(2))[0].shape == (2, 3, 8, 8)

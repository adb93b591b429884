"""Labeled images of a folder or an archive, fed by a model's preprocessing, with the model's labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from prunekit.data.roots import is_labeled_images
from prunekit.data.sources import labeled_images
from prunekit.errors import DataError
from prunekit.models.preprocessing import Preprocessing

FEED = Preprocessing(8, 12, mean=(0.2, 0.3, 0.4))
CLASSES = ("ox", "cat", "dog")


def folders(root: Path, names: Sequence[str], count: int = 2) -> Path:
    for at, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (20 + index, 16), (60 * at, 10, 200 - index)).save(root / name / f"{index}.png")
    return root


def test_labels_are_those_of_the_model(tmp_path: Path) -> None:
    splits = labeled_images(folders(tmp_path / "data", ["cat", "dog", "ox"]), FEED, CLASSES)
    images, labels = splits.test.fetch(torch.arange(6))
    assert labels.tolist() == [1, 1, 2, 2, 0, 0]
    assert torch.equal(images, FEED(sorted((tmp_path / "data").rglob("*.png"))))
    assert (splits.classes, splits.sample_shape, splits.preprocessing) == (CLASSES, (3, 8, 12), FEED)


def test_some_of_the_classes_are_enough(tmp_path: Path) -> None:
    splits = labeled_images(folders(tmp_path / "data", ["dog", "ox"]), FEED, CLASSES)
    assert splits.test.fetch(torch.arange(4))[1].tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("part", ["test", "val"])
def test_the_test_part_is_used_where_there_is_one(part: str, tmp_path: Path) -> None:
    folders(tmp_path / "data" / "train", ["cat", "dog"], 3)
    folders(tmp_path / "data" / part, ["cat", "dog"], 1)
    assert len(labeled_images(tmp_path / "data", FEED, CLASSES).test) == 2


def test_without_classes_of_the_model_those_of_the_data_are_in_order(tmp_path: Path) -> None:
    splits = labeled_images(folders(tmp_path / "data", ["b", "a"]), FEED, ())
    assert splits.classes == ("a", "b")


@pytest.mark.parametrize("shape", [(20, 16), (20, 16, 1), (20, 16, 3)])
def test_arrays_with_and_without_names(shape: tuple[int, ...], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8)
    labels = np.array([0, 1, 1, 0])
    np.savez(tmp_path / "named.npz", images=pixels, labels=labels, classes=np.array(["dog", "ox"]))
    np.savez(tmp_path / "numbered.npz", x_train=pixels, y_train=labels, x_test=pixels[:2], y_test=labels[:2])
    named = labeled_images(tmp_path / "named.npz", FEED, CLASSES).test
    images, found = named.fetch(torch.arange(4))
    assert found.tolist() == [2, 0, 0, 2]
    assert torch.equal(images, FEED([image.squeeze() for image in pixels]))
    assert labeled_images(tmp_path / "numbered.npz", FEED, CLASSES).test.fetch(torch.arange(2))[1].tolist() == [0, 1]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folders(tmp_path / "wrong", ["cat", "dogs", "bear"])
    np.savez(tmp_path / "more.npz", images=np.zeros((4, 8, 8), np.uint8), labels=np.arange(4))
    folders(tmp_path / "twice", ["crane", "cat"])
    for where, classes, told in (
        ("wrong", CLASSES, r"class 'bear' is none of the model's 3 classes, nor are 1 more; .*rename the folders"),
        ("more.npz", CLASSES, r"class '0' is none of the model's 3 classes"),
        ("twice", ("crane", "cat", "crane"), r"'crane' is the name of 2 of the model's classes"),
        ("gone", CLASSES, r"gone: expected a folder of images or a NumPy archive \(\.npz\), and there is none"),
    ):
        with pytest.raises(DataError, match=told):
            labeled_images(tmp_path / where, FEED, classes)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folders(tmp_path / "data", ["cat", "dog"])
    (tmp_path / "data" / "dog" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"dog/0\.png: expected an image"):
        labeled_images(tmp_path / "data", FEED, CLASSES).test.fetch(torch.arange(4))


def test_paths_are_told_from_code(tmp_path: Path) -> None:
    assert is_labeled_images(str(tmp_path))
    assert is_labeled_images("gone.npz")
    assert not is_labeled_images("mine.py:images")
    assert not is_labeled_images("python:mine:images")

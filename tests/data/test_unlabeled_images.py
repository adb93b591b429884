"""Images whose labels are not read: from every source, split, and answered by the dense model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from prunekit.data.augmentation import Mixing
from prunekit.data.datasets import AnsweredImages
from prunekit.data.loader import batches
from prunekit.data.local_files import scan_unlabeled
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.data.user_data import load_own
from prunekit.errors import DataError, ModelError, UsageError
from prunekit.jobs.run.command_subject import bound_splits
from prunekit.settings.inputs import DataSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION


def write(folder: Path, count: int, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    """Noise on one of three colors."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 100, (count, 12, 12, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        image[..., generator.integers(3)] += 100
        Image.fromarray(image).save(folder / f"{index}.png")


def settings(root: Path | None, source: Any = "imagefolder", **changed: Any) -> DataSettings:
    return DataSettings(source, root=root, image_size=12, labels=False, **changed)


class Brightest(nn.Module):
    """The answer to an image is the channel that is brightest; it counts what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return (images * self.scale[:, None, None]).mean((2, 3))


def answer(images: Tensor) -> list[int]:
    return images.mean((2, 3)).argmax(1).tolist()


def sizes(splits: Splits) -> tuple[int, int, int]:
    return len(splits.train), len(splits.validation), len(splits.test)


def test_every_image_below_a_folder_is_taken_and_split_at_random(tmp_path: Path) -> None:
    write(tmp_path, 8)
    write(tmp_path / "trip" / "day 1", 8)
    write(tmp_path / "val", 4)  # without train/, a folder like any other
    splits = load_splits(settings(tmp_path))
    assert sizes(splits) == (12, 2, 6)
    assert splits.classes == ()
    assert splits.task.main.name == "agreement"
    assert splits.task.name == IMAGE_CLASSIFICATION.name
    assert any(note.startswith("no labels are read") for note in splits.notes)
    numbers = torch.cat([part.labels for part in (splits.train, splits.validation, splits.test)])  # type: ignore[attr-defined]
    assert sorted(numbers.tolist()) == list(range(20))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"train": 10, "val": 4}, (9, 1, 4)),
        ({"train": 10, "test": 3}, (9, 1, 3)),
        ({"train": 10, "test": 3, "val": 4}, (10, 4, 3)),
    ],
)
def test_parts_that_are_there_are_kept(tmp_path: Path, parts: dict[str, int], expected: tuple[int, ...]) -> None:
    for name, count in parts.items():
        write(tmp_path / name / "cat", count)
    assert sizes(load_splits(settings(tmp_path))) == expected


def test_labels_are_part_of_what_data_is_known_by(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / name, 10)
    with_labels = load_splits(DataSettings("imagefolder", root=tmp_path, image_size=12))
    assert with_labels.fingerprint != load_splits(settings(tmp_path)).fingerprint


def test_without_folders_of_classes_the_error_says_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "photos", 3)
    expected = r"one folder of images for each of two or more classes, .* found .* at the top; .* data\.labels=false"
    with pytest.raises(DataError, match=expected):
        load_splits(DataSettings("imagefolder", root=tmp_path / "photos"))
    with pytest.raises(DataError, match=r"found \['photos'\]; if the images have no labels: data.labels=false"):
        load_splits(DataSettings("imagefolder", root=tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images here"):
        load_splits(settings(tmp_path / "empty"))
    write(tmp_path / "one", 1)
    with pytest.raises(DataError, match="one: 1 image left, and a split needs at least 2"):
        load_splits(settings(tmp_path / "one"))


def test_links_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path / "a", 3)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a", target_is_directory=True)
    assert len(scan_unlabeled(tmp_path).rest) == 3


def test_an_archive_needs_no_labels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 12, 12, 3), dtype=np.uint8)
    np.savez(tmp_path / "two.npz", x_train=pixels, x_test=pixels[:6])
    np.savez(tmp_path / "one.npz", images=pixels, labels="not read", classes=3)
    assert sizes(load_splits(settings(tmp_path / "two.npz", "npz"))) == (18, 2, 6)
    assert sizes(load_splits(settings(tmp_path / "one.npz", "npz"))) == (12, 2, 6)
    with pytest.raises(
        DataError, match=r"expected arrays x_train, y_train.*found x_test, x_train; .*data.labels=false"
    ):
        load_splits(DataSettings("npz", root=tmp_path / "two.npz"))
    np.savez(tmp_path / "none.npz", pictures=pixels)
    with pytest.raises(DataError, match=r"expected arrays x_train, x_test, or images; found pictures$"):
        load_splits(settings(tmp_path / "none.npz", "npz"))


OWN = """
import numpy as np
from torch.utils.data import TensorDataset
from prunekit.data.sources import load_splits
from prunekit.settings.inputs import DataSettings
import torch

class Images(list):
    pass

pixels = [np.full((12, 12, 3), i, np.uint8) for i in range(20)]

def alone():
    return Images(pixels), Images(pixels[:5])

def pairs():
    return Images((p, "unreadable label") for p in pixels), Images((p, None) for p in pixels[:5])

def tensors():
    return TensorDataset(torch.rand(20, 3, 12, 12)), TensorDataset(torch.rand(5, 3, 12, 12))

def splits():
    return load_splits(DataSettings(image_size=12))
"""


@pytest.mark.parametrize("factory", ["alone", "pairs", "tensors"])
def test_own_data_sets_may_have_images_alone(tmp_path: Path, factory: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    splits = load_own(f"{tmp_path / 'own.py'}:{factory}", DataSettings("own", image_size=12, labels=False))
    assert sizes(splits) == (18, 2, 5)
    assert splits.task.main.name == "agreement"
    images, numbers = next(iter(batches(splits.test, 5, shuffle_seed=None)))
    assert images.shape == (5, 3, 12, 12)
    assert numbers.tolist() == [0, 1, 2, 3, 4]


def test_what_cannot_be_without_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UsageError, match=r"data\.labels would change nothing"):
        load_own(f"{tmp_path / 'own.py'}:splits", DataSettings("own", labels=False))
    with pytest.raises(UsageError, match=r"data\.labels: expected true, .* got false with source 'shapes'"):
        load_splits(DataSettings("shapes", labels=False))
    with pytest.raises(UsageError, match=r"data\.labels: expected true, .* task 'segmentation'"):
        load_splits(DataSettings(labels=False), "segmentation")


def bound(root: Path, **changed: Any) -> tuple[Splits, Splits, Brightest]:
    """Splits of images before and after they were bound to a dense model, and that one's copy that answers."""
    splits = load_splits(settings(root, batch=5, **changed))
    found = bound_splits(splits, Brightest())
    assert isinstance(found.train, AnsweredImages)
    model: Any = found.train.answer
    model._dense.seen = 0
    return splits, found, model._dense


@pytest.mark.slow
def test_labels_are_the_answers_to_the_plain_images_and_each_is_found_once(tmp_path: Path) -> None:
    write(tmp_path, 40)
    plain, splits, dense = bound(tmp_path, augment="crop_flip")
    assert splits.classes == ("0", "1", "2")
    wanted = answer(plain.train.fetch(torch.arange(len(plain.train)))[0])
    assert len(set(wanted)) == 3
    seen: list[list[list[int]]] = []
    for epoch in (1, 2):
        order = batches(splits.train, 5, shuffle_seed=0, augment=True).at_epoch(epoch)
        numbers = order.order().tolist()
        given = [label for _, labels in order for label in labels.tolist()]
        assert given == [wanted[number] for number in numbers]
        assert dense.seen == len(plain.train)
        seen.append([labels.tolist() for _, labels in order])
    _, again, _ = bound(tmp_path, augment="crop_flip")
    for epoch, expected in zip((1, 2), seen, strict=True):
        order = batches(again.train, 5, shuffle_seed=0, augment=True, workers=1).at_epoch(epoch)
        assert [labels.tolist() for _, labels in order] == expected


@pytest.mark.slow
def test_mixed_images_have_shares_of_the_answers_in_workers_and_without(tmp_path: Path) -> None:
    write(tmp_path, 40)

    def mixed(workers: int, *share: int) -> list[Tensor]:
        _, splits, _ = bound(tmp_path, augment="flip")
        mixing = Mixing(len(splits.classes), mixup=0.4)
        order = batches(splits.train, 6, shuffle_seed=0, augment=True, mixing=mixing, workers=workers, drop_last=True)
        mine = order.split(*share) if share else order
        return [torch.cat([images.flatten(1), shares], 1) for images, shares in mine]

    alone = mixed(0)
    assert len({round(float(shares), 4) for batch in alone for shares in batch[:, -3:].max(1).values}) > 2
    for workers in (0, 1):
        halves = zip(mixed(workers, 0, 2), mixed(workers, 1, 2), strict=True)
        for whole, in_workers, pair in zip(alone, mixed(workers), halves, strict=True):
            assert torch.equal(whole, in_workers)
            assert torch.equal(whole, torch.cat(pair))


@pytest.mark.slow
def test_images_that_cannot_be_read_have_no_answer(tmp_path: Path) -> None:
    write(tmp_path, 40)
    (tmp_path / "7.png").write_bytes(b"torn")
    for workers in (0, 1):
        plain, splits, _ = bound(tmp_path, max_corrupt=1)
        parts = [(getattr(plain, name), getattr(splits, name)) for name in ("train", "validation", "test")]
        for part, answered in parts:
            for _ in range(2):
                pairs = list(batches(answered, 5, shuffle_seed=None, workers=workers, augment=True))
                images, labels = (torch.cat(column) for column in zip(*pairs, strict=True))
                assert labels.tolist() == answer(images)
                assert len(images) == len(part) - len(part.corrupt.found) * (7 in part.labels)
        assert len(splits.corrupt) == 1


def test_a_pickled_data_set_leaves_its_model_behind(tmp_path: Path) -> None:
    write(tmp_path, 20)
    _, splits, _ = bound(tmp_path)
    list(batches(splits.test, 5, shuffle_seed=None))
    again = pickle.loads(pickle.dumps(splits.test))
    assert again.answer is None
    assert torch.equal(again.labels, splits.test.labels)  # type: ignore[attr-defined]


def test_a_size_that_the_dense_model_does_not_take_is_said(tmp_path: Path) -> None:
    write(tmp_path, 20)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    with pytest.raises(ModelError, match=r"does not run on .*data\.image_size says how large images are"):
        bound_splits(load_splits(settings(tmp_path)), net)


def test_before_the_dense_model_is_known_there_is_nothing_to_measure(tmp_path: Path) -> None:
    write(tmp_path, 20)
    splits = load_splits(settings(tmp_path))
    assert splits.unmeasured
    for of in (splits.task.loss, splits.task.counts):
        assert of is not None
        with pytest.raises(UsageError, match="the dense model, which is not known here"):
            of(torch.zeros(2, 3), torch.zeros(2))
    assert not bound_splits(splits, Brightest()).unmeasured

"""Images that cannot be read: skipped, each counted once, and an error above the limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from prunekit.data.datasets import CorruptImages, FolderImages, ImageTransform, describe_corrupt
from prunekit.data.loader import batches
from prunekit.data.sources import load_splits
from prunekit.data.splits import Splits
from prunekit.errors import DataError
from prunekit.measure.accuracy import evaluate
from prunekit.settings.inputs import DataSettings


def files(folder: Path, count: int, broken: set[int], limit: int) -> FolderImages:
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"{index:02}.png" for index in range(count))
    for index, path in enumerate(paths):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(path)
        if index in broken:
            path.write_bytes(path.read_bytes()[:40])
    return FolderImages(paths, torch.arange(count), ImageTransform(8), CorruptImages(limit))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_others_come_in_their_batches_and_each_is_counted_once(tmp_path: Path, workers: int) -> None:
    dataset = files(tmp_path, 12, {1, 4, 5, 6, 7}, limit=5)
    loaded = batches(dataset, 4, shuffle_seed=None, workers=workers)
    for epoch in range(3):  # of the second batch nothing is left
        assert [labels.tolist() for _, labels in loaded.at_epoch(epoch)] == [[0, 2, 3], [8, 9, 10, 11]]
    assert [Path(name).name for name in sorted(dataset.corrupt.found)] == [
        "01.png",
        "04.png",
        "05.png",
        "06.png",
        "07.png",
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_more_than_the_limit_is_an_error_with_the_count(tmp_path: Path, workers: int) -> None:
    dataset = files(tmp_path, 12, {1, 4, 9}, limit=2)
    message = r"^3 images cannot be read, and data\.max_corrupt allows 2; .*01\.png: expected an image, but .*04\.png.*"
    with pytest.raises(DataError, match=message):
        list(batches(dataset, 4, shuffle_seed=None, workers=workers))


def test_a_limit_of_none_names_the_file_and_the_setting(tmp_path: Path) -> None:
    dataset = files(tmp_path, 3, {1}, limit=0)
    with pytest.raises(DataError, match=r"01\.png: expected an image, but .*; remove .* with data\.max_corrupt=N$"):
        list(batches(dataset, 2, shuffle_seed=None))


def test_when_nothing_can_be_read_that_is_an_error(tmp_path: Path) -> None:
    dataset = files(tmp_path, 3, {0, 1, 2}, limit=9)
    with pytest.raises(DataError, match="at least 1 images that can be read, got none"):
        list(batches(dataset, 2, shuffle_seed=None))
    with pytest.raises(DataError, match="image 1 cannot be read"):
        dataset[1]


def test_a_training_batch_of_one_is_left_out(tmp_path: Path) -> None:
    dataset = files(tmp_path, 6, {0, 1, 2}, limit=3)
    assert [len(labels) for _, labels in batches(dataset, 2, shuffle_seed=None, drop_last=True)] == [2]
    assert [len(labels) for _, labels in batches(dataset, 2, shuffle_seed=None)] == [1, 2]


def test_accuracy_counts_what_was_seen(tmp_path: Path) -> None:
    dataset = files(tmp_path, 10, {3, 5}, limit=2)
    always_two = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 10))
    torch.nn.init.zeros_(always_two[1].weight)
    always_two[1].bias.data = torch.nn.functional.one_hot(torch.tensor(2), 10).float()
    found = evaluate(always_two, batches(dataset, 4, shuffle_seed=None), "image_classification", torch.device("cpu"))
    assert (found.counts[0], found.n_test) == (1, 8)


def folder(root: Path, limit: int) -> Splits:
    for name in ("cat", "dog"):
        files(root / name, 10, {2} if name == "cat" else set(), limit)
    (root / "dog" / "05.png").write_bytes(b"")
    return load_splits(DataSettings(source="imagefolder", root=root, image_size=8, max_corrupt=limit))


def test_one_record_for_all_parts_of_a_folder(tmp_path: Path) -> None:
    splits = folder(tmp_path, 2)
    assert describe_corrupt(splits.corrupt) == f"1 corrupt image skipped: {tmp_path / 'dog' / '05.png'}"
    for part in (splits.train, splits.validation, splits.test):
        list(batches(part, 1 if len(part) < 3 else 3, shuffle_seed=None))
    assert {Path(name).name for name in splits.corrupt} == {"02.png", "05.png"}
    assert splits.corrupt[str(tmp_path / "dog" / "05.png")] == "the file is empty"
    with pytest.raises(DataError, match=r"05\.png: expected an image, but the file is empty"):
        folder(tmp_path, 0)


def test_a_share_is_of_all_images(tmp_path: Path) -> None:
    folder(tmp_path, 2)
    for share, allowed in ((0.1, 2), (0.149, 2), (0.05, 1)):
        settings = DataSettings(source="imagefolder", root=tmp_path, image_size=8, max_corrupt=share)
        splits = load_splits(settings)  # of 20 images, two of them corrupt
        assert splits.train.corrupt.limit == allowed
    everything = FolderImages(
        (tmp_path / "cat" / "02.png", tmp_path / "dog" / "05.png"),
        torch.tensor([0, 1]),
        ImageTransform(8),
        CorruptImages.allowing(0.05, 20),
    )
    with pytest.raises(DataError, match=r"^2 images cannot be read, and data\.max_corrupt allows 1; .*02\.png"):
        list(batches(everything, 1, shuffle_seed=None))

"""Batches: every image once, in an order of the seed and the epoch alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from prunekit.data.augmentation import Draw
from prunekit.data.datasets import CorruptImages, FolderImages, ImageTransform, TensorImages
from prunekit.data.loader import Batches, BatchRequest, _RequestReader, batches
from prunekit.errors import DataError, UsageError


def numbered(count: int) -> TensorImages:
    """Images whose every pixel, and whose label, is their index."""
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 4, 4)
    zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return TensorImages(pixels, torch.arange(count), ImageTransform(4, zero, one), scale=1.0)


def order(loaded: Batches) -> list[int]:
    return torch.cat([labels for _, labels in loaded]).tolist()


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_sizes(drop_last: bool, sizes: list[int]) -> None:
    loaded = batches(numbered(10), 4, shuffle_seed=None, drop_last=drop_last)
    assert [len(labels) for _, labels in loaded] == sizes
    assert len(loaded) == len(sizes)
    assert loaded.images == sum(sizes)


def test_images_go_with_their_labels() -> None:
    for images, labels in batches(numbered(10), 3, shuffle_seed=5):
        assert torch.equal(images, labels.float()[:, None, None, None].expand(-1, 3, 4, 4))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    loaded = batches(numbered(50), 8, shuffle_seed=3)
    assert order(loaded) == order(loaded) == order(batches(numbered(50), 16, shuffle_seed=3))
    orders = [order(batches(numbered(50), 8, shuffle_seed=seed).at_epoch(epoch)) for seed in (3, 4) for epoch in (0, 1)]
    assert all(sorted(one) == list(range(50)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4
    assert order(batches(numbered(50), 8, shuffle_seed=None)) == list(range(50))


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    order(batches(numbered(9), 2, shuffle_seed=1, workers=1))
    order(batches(numbered(9), 2, shuffle_seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_only_the_chosen_indices_come() -> None:
    assert order(batches(numbered(10), 2, shuffle_seed=None, indices=[7, 1, 4])) == [7, 1, 4]


def test_workers_give_the_same_batches() -> None:
    one, other = (list(batches(numbered(10), 4, shuffle_seed=2, workers=workers)) for workers in (0, 2))
    for (a, b), (c, d) in zip(one, other, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


@dataclass(frozen=True, eq=False)
class Noisy(TensorImages):
    """Draws from torch's and NumPy's global generators, as many people's transforms do."""

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        return torch.rand(len(indices)) + float(np.random.rand()), indices


@pytest.mark.slow
def test_random_transforms_in_workers_differ_between_epochs_and_can_be_repeated() -> None:
    plain = numbered(8)
    dataset = Noisy(plain.pixels, plain.labels, plain.transform)

    def drawn(seed: int, epoch: int) -> list[float]:
        return torch.cat(
            [images for images, _ in batches(dataset, 4, shuffle_seed=seed, workers=2).at_epoch(epoch)]
        ).tolist()

    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(*draw)) for draw in ((1, 0), (1, 1), (2, 0))}) == 3


def test_what_a_worker_reports_does_not_change_afterwards(tmp_path: Path) -> None:
    paths = tuple(tmp_path / name for name in ("a.png", "b.png"))
    dataset = FolderImages(paths, torch.tensor([0, 1]), ImageTransform(8), CorruptImages(2))
    worker = _RequestReader(dataset)
    _, first = worker[BatchRequest(torch.tensor([0]), (0, 0, 0), False, None)]
    _, both = worker[BatchRequest(torch.tensor([1]), (0, 0, 1), False, None)]
    assert (list(first), list(both)) == ([str(paths[0])], [str(path) for path in paths])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named(tmp_path: Path, workers: int) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (8, 8)).save(good)
    bad.write_bytes(good.read_bytes()[:40])
    dataset = FolderImages((good, bad), torch.tensor([0, 1]), ImageTransform(8))
    with pytest.raises(DataError, match=r"^\S*bad\.png: expected an image") as caught:
        list(batches(dataset, 1, shuffle_seed=None, workers=workers))
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("count", "size", "error"), [(0, 4, DataError), (3, 4, DataError), (3, 0, UsageError), (3, -1, UsageError)]
)
def test_no_batch_is_an_error(count: int, size: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        batches(numbered(count), size, shuffle_seed=None, drop_last=True)


def test_shrinking_averages_instead_of_skipping() -> None:
    checkers: Tensor = ((torch.arange(16)[:, None] + torch.arange(16)) % 2 * 255).to(torch.uint8)
    zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    dataset = TensorImages(checkers[None, None], torch.tensor([0]), ImageTransform(4, zero, one))
    image, _ = dataset[0]
    assert image.shape == (3, 4, 4)
    assert (image - 0.5).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_can_begin_later_without_reading_what_is_left_out(workers: int) -> None:
    read: list[int] = []

    class Noting(TensorImages):
        def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
            read.extend(indices.tolist())
            return super().fetch(indices, draw)

    pixels = torch.randint(0, 255, (50, 3, 8, 8), dtype=torch.uint8)
    dataset = Noting(pixels, torch.arange(50) % 5, ImageTransform(8, augment="crop_flip"))
    loaded = batches(dataset, 8, shuffle_seed=3, workers=workers, drop_last=True, augment=True)
    whole = list(loaded.at_epoch(2).numbered())
    assert [number for number, _ in whole] == list(range(6))
    read.clear()
    rest = list(loaded.at_epoch(2, 4).numbered())
    assert [number for number, _ in rest] == [4, 5]
    for (_, one), (_, other) in zip(whole[4:], rest, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    if not workers:
        assert read == loaded.at_epoch(2).order()[32:48].tolist()
    assert list(loaded.at_epoch(2, 6)) == []

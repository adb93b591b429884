"""Augmentation: of training batches alone, and the same for the same seed, epoch and image."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms._presets import ImageClassification

from prunekit.data.datasets import CorruptImages, FolderImages, ImageDataset, ImageTransform, TensorImages
from prunekit.data.library_datasets import mapped
from prunekit.data.loader import Batches, batches
from prunekit.data.sources import load_splits
from prunekit.settings.inputs import (
    Augment,
    AugmentSettings,
    ColorJitterSettings,
    DataSettings,
    NamedAugment,
    RandAugmentSettings,
)

NAMES: tuple[NamedAugment, ...] = get_args(NamedAugment)
CHANGING: tuple[Augment, ...] = (
    *(name for name in NAMES if name != "none"),
    AugmentSettings(color_jitter=ColorJitterSettings(hue=0.1)),
    AugmentSettings(rand_augment=RandAugmentSettings()),
    AugmentSettings(trivial_augment=True),
    AugmentSettings(erase=0.9),
    AugmentSettings("resized", (0.3, 0.9), 0.5, ColorJitterSettings(), RandAugmentSettings(3, 12), erase=0.5),
)
KINDS: tuple[Augment, ...] = ("none", *CHANGING)
ZERO, ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def in_memory(augment: Augment, count: int = 40, size: int = 12) -> TensorImages:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (count, 3, size, size), dtype=np.uint8))
    return TensorImages(pixels, torch.arange(count), ImageTransform(size, ZERO, ONE, augment))


def in_files(folder: Path, augment: Augment, count: int = 8) -> FolderImages:
    paths = []
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        paths.append(folder / f"{index}.png")
    return FolderImages(tuple(paths), torch.arange(count), ImageTransform(16, augment=augment))


def name_of(kind: Augment) -> str:
    return kind if isinstance(kind, str) else "_".join(key for key, value in asdict(kind).items() if value)


def by_label(loaded: Batches) -> dict[int, Tensor]:
    return {int(label): image for images, labels in loaded for image, label in zip(images, labels, strict=True)}


def datasets(folder: Path, augment: Augment) -> tuple[ImageDataset, ...]:
    return in_memory(augment), in_files(folder, augment)


@pytest.mark.parametrize("augment", CHANGING, ids=name_of)
def test_an_image_depends_on_seed_epoch_and_index_alone(augment: Augment, tmp_path: Path) -> None:
    for dataset in datasets(tmp_path, augment):
        loaded = batches(dataset, 4, shuffle_seed=3, augment=True).at_epoch(2)
        found = by_label(loaded)
        alike = (
            loaded,
            batches(dataset, 7, shuffle_seed=3, augment=True).at_epoch(2),
            batches(dataset, 4, shuffle_seed=3, augment=True, indices=[5, 2]).at_epoch(2),
        )
        for other in alike:
            assert all(torch.equal(image, found[label]) for label, image in by_label(other).items())
        for other in (loaded.at_epoch(3), batches(dataset, 4, shuffle_seed=4, augment=True).at_epoch(2)):
            assert any(not torch.equal(image, found[label]) for label, image in by_label(other).items())


@pytest.mark.slow
@pytest.mark.parametrize("augment", ["crop_flip", CHANGING[-1]], ids=name_of)
def test_workers_augment_as_this_process_does(augment: Augment, tmp_path: Path) -> None:
    for dataset in datasets(tmp_path, augment):
        here, there = (
            by_label(batches(dataset, 4, shuffle_seed=3, augment=True, workers=workers).at_epoch(2))
            for workers in (0, 2)
        )
        assert here.keys() == there.keys()
        assert all(torch.equal(image, here[label]) for label, image in there.items())


@pytest.mark.parametrize("augment", KINDS, ids=name_of)
def test_without_being_asked_nothing_is_augmented(augment: Augment, tmp_path: Path) -> None:
    plain = [by_label(batches(dataset, 4, shuffle_seed=1)) for dataset in datasets(tmp_path, "none")]
    for expected, dataset in zip(plain, datasets(tmp_path, augment), strict=True):
        found = by_label(batches(dataset, 4, shuffle_seed=1))
        assert all(torch.equal(image, found[label]) for label, image in expected.items())
        assert torch.equal(dataset[3][0], expected[3])


@pytest.mark.parametrize("augment", CHANGING, ids=name_of)
def test_the_random_state_is_left_alone(augment: Augment, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    for dataset in datasets(tmp_path, augment):
        by_label(batches(dataset, 4, shuffle_seed=1, augment=True))
    assert torch.equal(torch.get_rng_state(), before)


def windows(image: Tensor, pad: int, mode: str, flips: bool) -> list[Tensor]:
    size = image.shape[-1]
    padded = F.pad(image[None], (pad, pad, pad, pad), mode=mode)[0]
    crops = [padded[:, y : y + size, x : x + size] for y in range(2 * pad + 1) for x in range(2 * pad + 1)]
    return crops + [crop.flip(-1) for crop in crops] * flips


@pytest.mark.parametrize(
    ("augment", "pad", "mode", "flips"),
    [("shift", 1, "replicate", False), ("crop_flip", 4, "constant", True), ("flip", 0, "constant", True)],
)
def test_each_is_one_of_the_images_that_it_promises(augment: Augment, pad: int, mode: str, flips: bool) -> None:
    plain, changed = in_memory("none"), in_memory(augment)
    drawn = set()
    for label, image in by_label(batches(changed, 40, shuffle_seed=0, augment=True)).items():
        found = [
            index for index, one in enumerate(windows(plain[label][0], pad, mode, flips)) if torch.equal(one, image)
        ]
        assert len(found) == 1
        drawn.add(found[0])
    assert len(drawn) > min(5, (1 + flips) * (2 * pad + 1) ** 2 - 1)


def test_a_resized_crop_is_cut_from_the_whole_file(tmp_path: Path) -> None:
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, :40] = 255  # the left third, which the center never shows
    Image.fromarray(pixels).save(tmp_path / "a.png")
    dataset = FolderImages(
        (tmp_path / "a.png",) * 60, torch.arange(60), ImageTransform(16, ZERO, ONE, "resized_crop_flip")
    )
    means = [float(image.mean()) for image in by_label(batches(dataset, 60, shuffle_seed=0, augment=True)).values()]
    assert max(means) > 0.9
    assert min(means) == 0.0
    assert float(dataset[0][0].max()) == 0.0


def changed(settings: AugmentSettings, count: int = 40, size: int = 12) -> list[tuple[Tensor, Tensor]]:
    """Images as they are and as they come, both before normalization."""
    plain, dataset = in_memory("none", count, size), in_memory(settings, count, size)
    found = by_label(batches(dataset, 8, shuffle_seed=0, augment=True))
    return [(plain[label][0], image) for label, image in found.items()]


def test_erasing_sets_one_rectangle_to_the_mean_of_some_images() -> None:
    erased = 0
    for before, after in changed(AugmentSettings(erase=0.5)):
        gone = (after != before).any(0)
        if gone.any():
            rows, columns = gone.any(1).nonzero().flatten(), gone.any(0).nonzero().flatten()
            box = after[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert float(box.abs().max()) == 0.0  # normalized: 0 is the mean
            assert box[0].numel() == int(gone.sum()) < 0.4 * gone.numel()
            erased += 1
    assert 10 < erased < 30


def test_erasing_and_what_comes_before_it_are_drawn_apart() -> None:
    flipping = AugmentSettings(crop="padded", flip=0.5)
    plain, both = changed(flipping), changed(replace(flipping, erase=1.0))
    for (_, one), (_, other) in zip(plain, both, strict=True):
        assert torch.equal(one[other != 0], other[other != 0])


def test_color_jitter_changes_brightness_by_at_most_what_is_asked() -> None:
    jitter = AugmentSettings(color_jitter=ColorJitterSettings(0.2, 0.0, 0.0, 0.0))
    factors = [float(after.sum() / before.sum()) for before, after in changed(jitter)]
    assert 0.79 < min(factors) < 0.9  # values above 1 are cut off, so that the mean rises less than it falls
    assert 1.0 < max(factors) < 1.21


def test_a_resized_crop_keeps_to_its_scale(tmp_path: Path) -> None:
    """Of an image whose columns count up, the span of columns seen says how much of the image a crop showed."""
    pixels = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (200, 200, 3))
    Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / "a.png")

    def spans(scale: tuple[float, float]) -> list[float]:
        feed = ImageTransform(32, ZERO, ONE, AugmentSettings("resized", scale))
        dataset = FolderImages((tmp_path / "a.png",) * 40, torch.arange(40), feed)
        return [
            float(image.max() - image.min()) * 255 / 200
            for image in by_label(batches(dataset, 40, shuffle_seed=0, augment=True)).values()
        ]

    assert min(spans((0.8, 1.0))) > 0.7  # sqrt(0.8 * 3/4) of the width, less what interpolation takes at the rims
    assert max(spans((0.05, 0.1))) < 0.4  # sqrt(0.1 * 4/3)


def test_a_stronger_rand_augment_changes_more() -> None:
    def difference(ops: int, magnitude: int) -> float:
        pairs = changed(AugmentSettings(rand_augment=RandAugmentSettings(ops, magnitude)), size=32)
        return float(torch.stack([(after - before).abs().mean() for before, after in pairs]).mean())

    assert 0 < difference(1, 3) < difference(2, 9) < difference(4, 25)


def test_values_stay_within_those_of_pixels() -> None:
    for settings in (AugmentSettings(rand_augment=RandAugmentSettings(4, 30)), AugmentSettings(trivial_augment=True)):
        images = torch.stack([after for _, after in changed(settings)])
        assert 0.0 <= float(images.min()) < float(images.max()) <= 1.0


@pytest.mark.parametrize("shape", [(300, 200), (224, 224), (200, 1000), (90, 91)])
def test_files_are_fed_as_torchvisions_preset_does(shape: tuple[int, int], tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    found = FolderImages((tmp_path / "a.png",), torch.tensor([0]), ImageTransform(224))[0][0]
    resize = 224 if shape == (224, 224) else 256  # an image of exactly this size is taken as it is
    torch.testing.assert_close(found, ImageClassification(crop_size=224, resize_size=resize)(image))


def test_settings_reach_the_training_images_of_every_split() -> None:
    settings = DataSettings(image_size=16, augment="shift", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    splits = load_splits(settings)
    plain = load_splits(DataSettings(image_size=16, mean=ZERO, std=ONE))
    mean, std = torch.tensor([0.1, 0.2, 0.3])[:, None, None], torch.tensor([0.5, 0.6, 0.7])[:, None, None]
    torch.testing.assert_close(splits.train[5][0] * std + mean, plain.train[5][0].expand(3, -1, -1))
    assert splits.fingerprint != plain.fingerprint
    images, _ = next(iter(batches(splits.train, 8, shuffle_seed=None, augment=True)))
    assert not torch.equal(images, next(iter(batches(splits.train, 8, shuffle_seed=None)))[0])


class Drawing:
    """A user's data set with transforms that draw from every generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.rand(3, 4, 4) + float(np.random.rand()) + random.random()
        return image, index


def test_what_a_users_data_set_draws_depends_on_seed_epoch_and_index_alone() -> None:
    dataset = mapped(Drawing(), DataSettings(source="own"), ImageTransform(4), "own", CorruptImages())
    loaded = batches(dataset, 4, shuffle_seed=3, augment=True).at_epoch(2)
    found = by_label(loaded)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    alike = (
        loaded,
        batches(dataset, 7, shuffle_seed=3, augment=True).at_epoch(2),
        batches(dataset, 4, shuffle_seed=3, augment=True, workers=1).at_epoch(2),
        loaded.at_epoch(2, 3),
    )
    for other in alike:
        assert all(torch.equal(image, found[label]) for label, image in by_label(other).items())
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))  # theirs are left alone
    for other in (loaded.at_epoch(3), batches(dataset, 4, shuffle_seed=4, augment=True).at_epoch(2)):
        assert all(not torch.equal(image, found[label]) for label, image in by_label(other).items())

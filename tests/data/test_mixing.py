"""Mixup and CutMix: images and labels in the same shares, drawn from seed, epoch and batch alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prunekit.data.augmentation import Mixing
from prunekit.data.datasets import ImageTransform, TensorImages
from prunekit.data.loader import batches

CLASSES = 5
MIXUP, CUTMIX, BOTH = Mixing(CLASSES, mixup=0.8), Mixing(CLASSES, cutmix=1.0), Mixing(CLASSES, 0.8, 1.0)


def numbered(count: int = 45) -> TensorImages:
    """Images of one value each, so that what is mixed can be read off the pixels; label i % CLASSES."""
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 8, 8)
    zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return TensorImages(pixels, torch.arange(count) % CLASSES, ImageTransform(8, zero, one), scale=1.0)


def mixed(mixing: Mixing | None, seed: int = 3, epoch: int = 0, workers: int = 0) -> list[tuple[Tensor, Tensor]]:
    loaded = batches(numbered(), 10, shuffle_seed=seed, mixing=mixing, workers=workers)
    return list(loaded.at_epoch(epoch))


def pairs(mixing: Mixing, epoch: int = 0) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of every image: as it came, the two it is made of, and its label."""
    found = []
    for (plain, _), (images, shares) in zip(mixed(None, epoch=epoch), mixed(mixing, epoch=epoch), strict=True):
        found += list(zip(images, plain, plain.roll(1, 0), shares, strict=True))
    return found


def one_hot(image: Tensor) -> Tensor:
    """The label of an image that is not mixed."""
    return torch.eye(CLASSES)[int(image[0, 0, 0]) % CLASSES]


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, BOTH])
def test_labels_have_the_shares_of_the_images(mixing: Mixing) -> None:
    for image, one, other, label in pairs(mixing):
        share = float((image.mean() - other.mean()) / (one.mean() - other.mean()))
        torch.testing.assert_close(label, share * one_hot(one) + (1 - share) * one_hot(other), atol=1e-4, rtol=0)
        assert abs(float(label.sum()) - 1) < 1e-6


def test_mixup_blends_and_cutmix_pastes_a_rectangle() -> None:
    for image, *_ in pairs(MIXUP):
        assert float(image.std()) < 1e-5
    seen = set()
    for image, one, other, _ in pairs(CUTMIX):
        pasted = (image != one).all(0)
        assert torch.equal(image[:, pasted], other[:, pasted])
        box = pasted[pasted.any(1)][:, pasted.any(0)]
        assert bool(box.all())
        seen.add(int(pasted.sum()))
    assert len(seen) > 2


def test_with_both_each_image_draws_one_of_them() -> None:
    for images, _ in mixed(BOTH):
        blended = images.flatten(1).std(1) < 1e-5  # or its neighbor's rectangle is nothing, or all of it
        assert 0 < int(blended.sum()) < len(images)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_depends_on_seed_epoch_and_its_number_alone(workers: int) -> None:
    def equal(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
        return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, other, strict=True))

    first = mixed(BOTH, epoch=2)
    torch.manual_seed(workers)
    before = torch.get_rng_state()
    assert equal(first, mixed(BOTH, epoch=2, workers=workers))
    assert torch.equal(torch.get_rng_state(), before)
    assert not equal(first, mixed(BOTH, epoch=3))
    assert not equal(first, mixed(BOTH, seed=4, epoch=2))


def test_images_draw_apart() -> None:
    _, shares = MIXUP(torch.rand(40, 1, 4, 4), torch.arange(40) % CLASSES, (0, 0, 0))
    assert len(shares.amax(1).unique()) == 40


def test_the_share_is_drawn_from_the_beta_distribution() -> None:
    """Of Beta(a, a) the variance is 1 / (4 (2 a + 1))."""
    images, labels = torch.rand(2, 1, 1, 1), torch.tensor([0, 1])
    for alpha in (0.2, 2.0):
        mixing = Mixing(2, mixup=alpha)
        drawn = torch.stack([mixing(images, labels, (0, 0, number))[1][0, 0] for number in range(600)])
        variance = float((drawn - 0.5).square().mean())
        expected = 1 / (4 * (2 * alpha + 1))
        assert abs(variance - expected) < 0.15 * expected


def test_one_image_alone_stays_as_it_is() -> None:
    images, labels = MIXUP(torch.rand(1, 3, 4, 4), torch.tensor([2]), (0, 0, 0))
    assert images.shape == (1, 3, 4, 4)
    torch.testing.assert_close(labels, torch.eye(CLASSES)[2:3])

"""Augmentation of images, the same for the same seed, epoch and image; mixup and CutMix of batches."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import one_hot
from torchvision.transforms import InterpolationMode, v2

from prunekit.settings.inputs import Augment, AugmentSettings
from prunekit.utils.context import same_random_state

Draw = tuple[int, int]
"""Seed and epoch, which augmentation depends on besides the image's index."""

Pixels = TypeVar("Pixels", Tensor, Image.Image)
NAMED: dict[str, AugmentSettings] = {
    "none": AugmentSettings(),
    "shift": AugmentSettings(crop="shift"),
    "flip": AugmentSettings(flip=0.5),
    "crop_flip": AugmentSettings(crop="padded", flip=0.5),
    "resized_crop_flip": AugmentSettings(crop="resized", flip=0.5),
}
SCALE = (0.08, 1.0)


@dataclass(frozen=True)
class Augmentation:
    """The transforms that settings ask for."""

    resizes: bool  # whether `pixels` takes images of any size; else they must have the final size
    pixels: v2.Transform | None  # transform of a Pillow image or of values in 0..1; None: no transform
    normalized: v2.Transform | None  # transform of a normalized image, in which 0 is the mean; None: no transform


@cache
def augmentation(augment: Augment, size: int) -> Augmentation:
    """Return the transforms of a named augmentation or of settings, whose results are `size` pixels high and wide."""
    chosen = augment if isinstance(augment, AugmentSettings) else NAMED[augment]
    pixels = list(_pixels(chosen, size))
    return Augmentation(
        chosen.crop == "resized",
        v2.Compose(pixels) if pixels else None,
        v2.RandomErasing(p=chosen.erase) if chosen.erase else None,
    )


def _pixels(settings: AugmentSettings, size: int) -> Iterator[v2.Transform]:
    """Yield the transforms of pixels, in the order of torchvision's own recipes."""
    if settings.crop == "shift":
        yield v2.RandomCrop(size, padding=size // 10, padding_mode="edge")
    elif settings.crop == "padded":
        yield v2.RandomCrop(size, padding=4)
    elif settings.crop == "resized":
        yield v2.RandomResizedCrop(size, scale=settings.scale or SCALE, antialias=True)
    if settings.flip:
        yield v2.RandomHorizontalFlip(settings.flip)
    if (jitter := settings.color_jitter) is not None:
        yield v2.ColorJitter(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    bilinear = InterpolationMode.BILINEAR
    if (policy := settings.rand_augment) is not None:
        yield v2.RandAugment(policy.num_ops, policy.magnitude, interpolation=bilinear)
    if settings.trivial_augment:
        yield v2.TrivialAugmentWide(interpolation=bilinear)


def augmented(image: Pixels, transform: v2.Transform | None, draw: Draw | None, *which: int) -> Pixels:
    """Return one image, (C, H, W) or Pillow's, after a random transform; torch's random state is restored."""
    if transform is None or draw is None:
        return image
    with drawn_from(*draw, *which):
        return transform(image)  # type: ignore[no-any-return]


@contextmanager
def drawn_from(*draw: int) -> Iterator[None]:
    """Seed what torch draws on the CPU by these numbers; its random state is restored afterwards."""
    seed = _seed(*draw)
    with torch.random.fork_rng(devices=[]):  # the transforms draw from the CPU's generator alone
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA as well
        yield


@contextmanager
def drawing(draw: Draw | None) -> Iterator[Callable[[int], None]]:
    """Make what a user's data set draws at random for an image depend on seed, epoch and index alone.

    It is then the same for any number of workers, and in a run that is resumed in the middle of an epoch. Yields a
    function to call with an image's index before reading it; the generators' states are restored afterwards.
    """
    if draw is None:
        yield lambda index: None
        return

    def begin(index: int) -> None:
        seed = _seed(*draw, index)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)

    with same_random_state():
        yield begin


def _seed(*draw: int) -> int:
    return int(np.random.SeedSequence(draw).generate_state(1, np.uint64)[0])


MIXING = 2
"""Number that separates draws for a batch from draws for the image of the same number."""


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019) of each image with another one of its batch.

    Each image draws its own share, and one of the two if both are on: batches, and the statistics by which BatchNorm
    normalizes them, differ less than with one share for a whole batch.
    """

    classes: int  # number of classes, at least two
    mixup: float = 0.0  # the share of an image is drawn from Beta(mixup, mixup); 0 is off. One of the two must be on.
    cutmix: float = 0.0  # the share of the area that stays is drawn from Beta(cutmix, cutmix); 0 is off

    def __call__(self, images: Tensor, labels: Tensor, draw: tuple[int, ...], first: int = 0) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W) float mixed with themselves rolled by one, and the share of each class in them.

        Labels are (B,) int64, shares (B, classes) float32; their rows sum to 1. `first` is the place of the first image
        in its batch, where images are a part of that; -1 for one of which the result is not used.
        """
        places, end = np.arange(first, first + len(labels)), first + len(labels)
        blends, areas, choices, middles = (np.random.default_rng((*draw, MIXING, number)) for number in range(4))
        # a part of a batch draws what the whole does: each number comes from those before it alone
        blend = blends.beta(self.mixup, self.mixup, end)[places] if self.mixup else np.zeros(len(places))
        area = areas.beta(self.cutmix, self.cutmix, end)[places] if self.cutmix else np.ones(len(places))
        middle = middles.random((end, 2))[places]
        often = bool(self.mixup) / (bool(self.mixup) + bool(self.cutmix))
        blended = choices.random(end)[places] < often
        # the rectangle that is replaced: (B, H) and (B, W)
        rows, columns = (_side(size, middle[:, axis], area) for axis, size in enumerate(images.shape[-2:]))
        share = np.where(blended, blend, 1 - rows.mean(1) * columns.mean(1))
        kept = torch.from_numpy(~(rows[:, :, None] & columns[:, None, :])).to(images.dtype)
        own = torch.from_numpy(blend).to(images.dtype)[:, None, None]
        weights = torch.where(torch.from_numpy(blended)[:, None, None], own, kept)[:, None]  # (B, 1, H, W)
        classes, shares = one_hot(labels, self.classes).float(), torch.from_numpy(share).float()[:, None]
        return torch.lerp(images.roll(1, 0), images, weights), torch.lerp(classes.roll(1, 0), classes, shares)


def _side(size: int, middle: npt.NDArray[np.float64], area: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return where along a side of images a rectangle lies that leaves shares of their areas, (B, size)."""
    center, half = np.floor(size * middle)[:, None], np.floor(size * np.sqrt(1 - area) / 2)[:, None]
    places = np.arange(size)
    return (places >= center - half) & (places < center + half)

"""From pixels to a model's input: size, augmentation, normalization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

from prunekit.data.augment import Augmentation, Draw, augmentation, augmented
from prunekit.settings.data import Augment

ERASING = 1
"""Tells what is drawn for it from what is drawn before for the same image."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Feed:
    """How an image becomes an input of (3, size, size).

    Args:
        size: height and width.
        mean: of a pixel in 0..1, per channel; subtracted.
        std: standard deviation of a pixel in 0..1, per channel; divided by.
        augment: what is drawn at random where a seed and an epoch are given.
    """

    size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    augment: Augment = "none"

    def image(self, image: Image.Image, draw: Draw | None, index: int) -> Tensor:
        """One Pillow image in RGB as (3, size, size) float32.

        An image of exactly `size` squared is taken as it is; any other has its shorter side resized to 8/7 of that and
        its center cut out, as torchvision's classification presets do (256 and 224).
        """
        change = self._augmentation(draw)
        if not change.resizes and image.size != (self.size, self.size):
            image = center_crop(resize(image, [round(self.size * 8 / 7)]), [self.size, self.size])
        image = augmented(image, change.pixels, draw, index)
        normalized = self.normalized(pil_to_tensor(image).float() / 255)
        return augmented(normalized, change.normalized, draw, index, ERASING)

    def batch(self, images: Tensor, draw: Draw | None, indices: Tensor) -> Tensor:
        """Images (B, C, H, W) with values in 0..1 as (B, 3, size, size); bilinear, antialiased when they shrink."""
        change = self._augmentation(draw)
        if not change.resizes and images.shape[-2:] != (self.size, self.size):
            shrinks = min(images.shape[-2:]) > self.size
            images = F.interpolate(
                images, (self.size, self.size), mode="bilinear", align_corners=False, antialias=shrinks
            )
        images = _each(images, change.pixels, draw, indices)
        return _each(self.normalized(images), change.normalized, draw, indices, ERASING)

    def _augmentation(self, draw: Draw | None) -> Augmentation:
        return augmentation("none" if draw is None else self.augment, self.size)

    def normalized(self, images: Tensor) -> Tensor:
        """(..., C, H, W) in 0..1 with C 1 or 3 -> (..., 3, H, W)."""
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (images - mean[:, None, None]) / std[:, None, None]


def _each(images: Tensor, transform: v2.Transform | None, draw: Draw | None, indices: Tensor, *which: int) -> Tensor:
    """Images (B, C, H, W) changed one by one."""
    if transform is None:
        return images
    pairs = zip(images, indices.tolist(), strict=True)
    return torch.stack([augmented(image, transform, draw, index, *which) for image, index in pairs])

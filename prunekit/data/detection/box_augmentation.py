"""Augmentation of images with boxes by torchvision's transforms, the same for the same seed, epoch and image."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from prunekit.data.augmentation import NAMED, Draw, drawn_from
from prunekit.errors import UsageError
from prunekit.settings.inputs import Augment, AugmentSettings

SIDES = (0.3, 1.0)
"""Shortest and longest side of a random crop as shares of the image's, as in SSD (Liu et al. 2016)."""
Parts = dict[str, Tensor]
"""Objects of an image, see `prunekit.data.detection.annotated_images.Objects.parts`."""


@dataclass(frozen=True)
class BoxAugmentation:
    """Random changes of images with boxes.

    A `resized` crop is that of SSD (Liu et al. 2016): half of the images are made part of a larger, gray one, and then
    a part that overlaps some box is cut out.

    Attributes:
        settings: of the changes.
        gray: value of padding, 0..1.
    """

    settings: AugmentSettings
    gray: float

    @classmethod
    def of(cls, augment: Augment, gray: float) -> BoxAugmentation:
        """Return the changes of a named augmentation or of settings."""
        settings = augment if isinstance(augment, AugmentSettings) else NAMED[augment]
        for name in ("rand_augment", "trivial_augment"):
            if getattr(settings, name):
                raise UsageError(
                    f"data.augment.{name}: expected none for images with boxes, because its operations would move "
                    "objects and leave their boxes; set crop, flip, color_jitter or erase"
                )
        return cls(settings, gray)

    @contextmanager
    def drawing(self, draw: Draw, index: int) -> Iterator[None]:
        """Seed what is drawn for an image; torch's random state is restored afterwards."""
        with drawn_from(*draw, index):
            yield

    def of_image(
        self, image: Image.Image, objects: Parts, flipped_points: tuple[int, ...]
    ) -> tuple[Image.Image, Parts]:  # fmt: skip
        """Return an image of any size and its objects after random colors, crop and flip.

        Args:
            objects: by name, at least `boxes` (n, 4); those without area are outside of the image now.
        """
        if (jitter := self.settings.color_jitter) is not None:
            image = v2.ColorJitter(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)(image)
        if self.settings.crop == "resized":
            image, objects = _moved(self._crop(), image, objects)
        if self.settings.flip and float(torch.rand(())) < self.settings.flip:
            image, objects = _moved(F.horizontal_flip, image, objects)
            if "keypoints" in objects and flipped_points:
                objects = {**objects, "keypoints": objects["keypoints"][:, list(flipped_points)]}
        return image, objects

    def _crop(self) -> v2.Transform:
        shares = self.settings.scale
        least, most = SIDES if shares is None else (math.sqrt(shares[0]), math.sqrt(shares[1]))
        fill = {Image.Image: [round(255 * self.gray)] * 3, tv_tensors.Mask: 0}
        return v2.Compose([v2.RandomZoomOut(fill, p=0.5), v2.RandomIoUCrop(least, most)])

    def of_input(self, pixels: Tensor, objects: Parts) -> tuple[Tensor, Parts]:
        """Return an input (3, H, W) of its final size and its objects after a random shift and erasing."""
        size, crop = tuple(pixels.shape[-2:]), self.settings.crop
        if crop in ("shift", "padded"):
            by = size[0] // 10 if crop == "shift" else 4
            fill = {tv_tensors.Image: self.gray, tv_tensors.Mask: 0}
            moved, objects = _moved(v2.RandomCrop(size, padding=by, fill=fill), tv_tensors.Image(pixels), objects)
            pixels = moved.as_subclass(Tensor)
        if self.settings.erase:
            pixels = v2.RandomErasing(p=self.settings.erase, value=self.gray)(pixels)
        return pixels, objects


def _moved(transform: Any, image: Any, objects: Parts) -> tuple[Any, Parts]:
    """Return an image and its objects after a transform of both."""
    size = (image.height, image.width) if isinstance(image, Image.Image) else tuple(image.shape[-2:])
    known: dict[str, Any] = {"boxes": tv_tensors.BoundingBoxes(objects["boxes"], format="XYXY", canvas_size=size)}
    if "masks" in objects:
        known["masks"] = tv_tensors.Mask(objects["masks"])
    if "keypoints" in objects:
        known["keypoints"] = tv_tensors.KeyPoints(objects["keypoints"][..., :2], canvas_size=size)
    if isinstance(transform, v2.Transform):
        image, known = transform(image, known)
    else:
        image, known = transform(image), {name: transform(value) for name, value in known.items()}
    plain = {name: value.as_subclass(Tensor) for name, value in known.items()}
    if "keypoints" in plain:
        plain["keypoints"] = torch.cat([plain["keypoints"], objects["keypoints"][..., 2:]], -1)
    return image, objects | plain

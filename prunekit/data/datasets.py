"""Labelled images that give whole batches at once: `fetch(indices)` beside the usual `dataset[i]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from prunekit.errors import DataError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Statistic = tuple[float, float, float]


class ImageDataset(Protocol):
    """A data set of labelled images."""

    @property
    def labels(self) -> Tensor:
        """Every label: (N,) int64."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image, (C, H, W) float32 normalised, and its label."""

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A batch: images (B, C, H, W) float32 normalised, labels (B,) int64."""


class _Indexable:
    """`dataset[i]` for everything that can fetch a batch."""

    def __len__(self) -> int:
        raise NotImplementedError

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):  # IndexError is also what ends Python's `for` over a data set
            raise IndexError(f"image {index} of a data set of {len(self)}")
        images, labels = self.fetch(torch.tensor([index % len(self)]))
        return images[0], int(labels[0])


@dataclass(frozen=True, eq=False)
class TensorImages(_Indexable):
    """Images in memory, stored as uint8 and scaled, resized, repeated to three channels and normalised per batch.

    Args:
        pixels: (N, C, H, W) uint8 with C 1 or 3.
        labels: (N,) int64.
        image_size: height and width that a batch has; bilinear, antialiased when it shrinks.
        scale: the largest pixel value (16 for the digits, 255 for photographs).
        mean: mean of a pixel in 0..1, per channel; subtracted.
        std: standard deviation of a pixel in 0..1, per channel; divided by.
    """

    pixels: Tensor
    labels: Tensor
    image_size: int
    scale: float
    mean: Statistic
    std: Statistic

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A batch: images (B, 3, image_size, image_size) float32, labels (B,) int64."""
        images = self.pixels[indices].float() / self.scale  # (B, C, H, W)
        size = (self.image_size, self.image_size)
        if images.shape[-2:] != size:
            shrinks = min(images.shape[-2:]) > self.image_size
            images = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=shrinks)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return (images - mean[:, None, None]) / std[:, None, None], self.labels[indices]


@dataclass(frozen=True, eq=False)
class FolderImages(_Indexable):
    """Image files, decoded when they are asked for, with ImageNet's normalisation.

    An image of exactly `image_size` squared is taken as it is; any other has its shorter side resized to 8/7 of that
    and its centre cut out, as torchvision's classification presets do (256 and 224).
    """

    paths: tuple[Path, ...]
    labels: Tensor
    image_size: int

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A batch: images (B, 3, image_size, image_size) float32, labels (B,) int64.

        Raises:
            DataError: an image cannot be read; the message names its path.
        """
        images = torch.stack([_read_image(self.paths[index], self.image_size) for index in indices.tolist()])
        mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
        return (images - mean[:, None, None]) / std[:, None, None], self.labels[indices]


def _read_image(path: Path, size: int) -> Tensor:
    """One image file as (3, size, size) float32 in 0..1."""
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, EOFError and more
        raise DataError(
            f"{path}: expected an image that Pillow can read, but {error or type(error).__name__}; remove or replace it"
        ) from error
    if image.size != (size, size):
        image = _centre(image, size)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def _centre(image: Image.Image, size: int) -> Image.Image:
    factor = size * 8 / 7 / min(image.size)
    width, height = (max(size, round(side * factor)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


@dataclass(frozen=True, eq=False)
class Subset(_Indexable):
    """Some images of a data set, in the order of `indices`, (M,) int64."""

    dataset: ImageDataset
    indices: Tensor

    @property
    def labels(self) -> Tensor:
        """Every label: (M,) int64."""
        return self.dataset.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """A batch of the underlying data set."""
        return self.dataset.fetch(self.indices[indices])


def check_labels(labels: Tensor, classes: Sequence[str], where: str) -> None:
    """Checks that every label of (N,) names one of the classes.

    Raises:
        DataError: a label is negative or too large; the message gives the first.
    """
    wrong = ((labels < 0) | (labels >= len(classes))).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{where}: expected labels 0..{len(classes) - 1} ({len(classes)} classes), but {len(wrong)} of "
            f"{len(labels)} are outside, the first is label {int(labels[first])} of image {first}"
        )

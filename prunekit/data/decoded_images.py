"""Data sets whose images are decoded when they are fetched: files, and map-style data sets.

Images of every mode are converted to RGB of 8 bits.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from prunekit.data.augmentation import Draw, drawing
from prunekit.data.datasets import CorruptImages, ImageTransform, Indexable
from prunekit.errors import DataError, reraise_shortage
from prunekit.models.preprocessing import decoding_reason, in_rgb


class _Decoded(Indexable):
    """A data set that decodes one image after the other, and leaves out corrupt ones."""

    labels: Tensor
    transform: ImageTransform
    corrupt: CorruptImages

    def _name(self, index: int) -> str:
        raise NotImplementedError

    def _read(self, index: int) -> Image.Image | Tensor:
        """Return an image in RGB, or a tensor that is an input; any error but `DataError` marks a corrupt image."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch, images (B, C, H, W) float32 and labels (B,) int64, without corrupt images."""
        read = []
        with drawing(draw) as begin:
            for index in indices.tolist():
                begin(index)
                if (image := self._try(index, draw)) is not None:
                    read.append((index, image))
        if not read:
            return torch.empty(0, 3, self.transform.size, self.transform.size), self.labels[:0]
        return torch.stack([image for _, image in read]), self.labels[[index for index, _ in read]]

    def _try(self, index: int, draw: Draw | None) -> Tensor | None:
        try:
            image = self._read(index)
        except DataError:
            raise
        except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, EOFError and more
            reraise_shortage(error)
            self.corrupt.add(self._name(index), decoding_reason(error))
            return None
        return image if isinstance(image, Tensor) else self.transform.image(image, draw, index)


@dataclass(frozen=True, eq=False)
class FolderImages(_Decoded):
    """Image files with their labels, (N,) int64."""

    paths: tuple[Path, ...]
    labels: Tensor
    transform: ImageTransform
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    def _name(self, index: int) -> str:
        return str(self.paths[index])

    def _read(self, index: int) -> Image.Image:
        with Image.open(self.paths[index]) as file:
            return in_rgb(ImageOps.exif_transpose(file))


class MapStyle(Sized, Protocol):
    """A `torch.utils.data.Dataset` with a length."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class MappedImages(_Decoded):
    """A map-style data set of others.

    An image is a Pillow image; or uint8 pixels, an array (H, W) or (H, W, C) or a tensor (C, H, W), with C 1 or 3; or a
    float tensor (C, H, W), which is not transformed.

    Args:
        dataset: of pairs of image and label.
        labels: (N,) int64, the labels that it must return.
        transform: from pixels to inputs.
        where: name of the data in messages.
        corrupt: counts corrupt images.
        shape: (C, H, W) of float tensors; None for pixels.
    """

    dataset: MapStyle
    labels: Tensor
    transform: ImageTransform
    where: str
    corrupt: CorruptImages = field(default_factory=CorruptImages)
    shape: tuple[int, ...] | None = None

    def _name(self, index: int) -> str:
        return f"{self.where}: image {index}"

    def _read(self, index: int) -> Image.Image | Tensor:
        image, label = self.dataset[index]
        if int(label) != int(self.labels[index]):
            raise DataError(
                f"{self._name(index)}: expected label {int(self.labels[index])}, as its targets say, got {label}"
            )
        found = pixels(image, self._name(index))
        shape = tuple(found.shape) if isinstance(found, Tensor) else None
        if shape != self.shape:
            raise DataError(
                f"{self._name(index)}: expected {_kind(self.shape)}, as the first image, got {_kind(shape)}"
            )
        return found


def pixels(image: Any, where: str) -> Image.Image | Tensor:
    """Return an image of a data set as a Pillow image in RGB, or as a float32 tensor (C, H, W), which is an input."""
    if isinstance(image, Image.Image):
        return in_rgb(image)
    if isinstance(image, Tensor) and image.is_floating_point() and image.ndim == 3:
        return image.float()
    array = image.permute(1, 2, 0).numpy() if isinstance(image, Tensor) and image.ndim == 3 else np.asarray(image)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)):
        raise DataError(
            f"{where}: expected a Pillow image, uint8 pixels (H, W), (H, W, C) or a tensor (C, H, W) with C 1 or 3, or "
            f"a float tensor (C, H, W), got {type(image).__name__} {array.dtype} {array.shape}"
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array).convert("RGB")


def _kind(shape: tuple[int, ...] | None) -> str:
    return "pixels" if shape is None else f"a float tensor {shape}"

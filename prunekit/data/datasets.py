"""Labeled images that give whole batches at once: `fetch(indices)` beside the usual `dataset[i]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from prunekit.data.augment import Draw
from prunekit.data.corrupt import CorruptImages
from prunekit.data.feed import Feed
from prunekit.errors import DataError


@runtime_checkable
class SampleDataset(Protocol):
    """A data set of any task: inputs, as `prunekit.inputs.arguments` takes them, with targets."""

    @property
    def corrupt(self) -> CorruptImages:
        """What could not be read so far."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Any, Any]:
        """A batch: inputs and targets, samples on the first axis, without what cannot be read.

        Args:
            indices: (B,) int64, which samples.
            draw: seed and epoch of random augmentation; None leaves the samples as they are.
        """


@runtime_checkable
class ImageDataset(SampleDataset, Protocol):
    """A data set of labeled images."""

    @property
    def labels(self) -> Tensor:
        """Every label: (N,) int64."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One image, (C, H, W) float32 normalized, and its label."""

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """A batch: images (B, C, H, W) float32 normalized, labels (B,) int64, without what cannot be read.

        Args:
            indices: (B,) int64, which images.
            draw: seed and epoch of random augmentation; None leaves the images as they are.
        """


class Indexable:
    """`dataset[i]` for everything that can fetch a batch."""

    def __len__(self) -> int:
        raise NotImplementedError

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):  # IndexError is also what ends Python's `for` over a data set
            raise IndexError(f"image {index} of a data set of {len(self)}")
        images, labels = self.fetch(torch.tensor([index % len(self)]))
        if not len(labels):
            raise DataError(f"image {index} cannot be read")
        return images[0], int(labels[0])


@dataclass(frozen=True, eq=False)
class TensorImages(Indexable):
    """Images in memory, stored as uint8; scaled, resized, repeated to three channels and normalized per batch.

    Args:
        pixels: (N, C, H, W) uint8 with C 1 or 3.
        labels: (N,) int64.
        feed: how they are fed.
        scale: the largest pixel value (16 for the digits, 255 for photographs).
    """

    pixels: Tensor
    labels: Tensor
    feed: Feed
    scale: float = 255.0
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """A batch: images (B, 3, size, size) float32, labels (B,) int64."""
        images = self.pixels[indices].float() / self.scale  # (B, C, H, W)
        return self.feed.batch(images, draw, indices), self.labels[indices]


@dataclass(frozen=True, eq=False)
class Subset(Indexable):
    """Some images of a data set, in the order of `indices`, (M,) int64."""

    dataset: ImageDataset
    indices: Tensor

    @property
    def labels(self) -> Tensor:
        """Every label: (M,) int64."""
        return self.dataset.labels[self.indices]

    @property
    def corrupt(self) -> CorruptImages:
        """Those of the underlying data set."""
        return self.dataset.corrupt

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """A batch of the underlying data set."""
        return self.dataset.fetch(self.indices[indices], draw)


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


def numbered_classes(labels: Tensor, where: str) -> tuple[str, ...]:
    """The classes of labels (N,) without names: as many as the largest label says.

    Raises:
        DataError: there are fewer than two, or one has no images.
    """
    count = int(labels.max()) + 1
    # Of more classes than images the first len + 1 hold a gap already: a label of a billion costs no memory.
    expected = torch.arange(min(count, len(labels) + 1))
    gaps = expected[~torch.isin(expected, labels)].tolist()
    if count < 2 or gaps:
        found = f"; no image has label {', '.join(map(str, gaps[:5]))}" if gaps else ""
        raise DataError(
            f"{where}: expected labels 0..classes-1 of two or more classes, each with images, but the largest label is "
            f"{count - 1}{found}; renumber them, or name the classes in `classes`"
        )
    return tuple(str(label) for label in range(count))

"""Data sets of labeled images that read whole batches: `fetch(indices)` beside `dataset[i]`.

`ImageTransform` turns pixels into a model's input: size, augmentation, normalization. `CorruptImages` counts the images
that cannot be read, which are skipped, and raises if there are too many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import get_worker_info
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

from prunekit.data.augmentation import Augmentation, Draw, augmentation, augmented, drawing
from prunekit.errors import DataError, reraise_shortage
from prunekit.models.interface import logits
from prunekit.models.preprocessing import Preprocessing, decoding_reason, in_rgb
from prunekit.settings.inputs import Augment
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import call, inputs_as_example, running

ERASING = 1
"""Number that separates draws for erasing from earlier draws for the same image."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@runtime_checkable
class SampleDataset(Protocol):
    """A data set of any task: inputs, see `prunekit.utils.inputs.inputs_as_example`, with targets."""

    @property
    def corrupt(self) -> CorruptImages:
        """Samples that could not be read so far."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Any, Any]:
        """Return a batch of the samples with these indices (B,) int64, without those that cannot be read.

        It is inputs and targets, with samples on the first axis.
        """


@runtime_checkable
class ImageDataset(SampleDataset, Protocol):
    """A data set of labeled images."""

    @property
    def labels(self) -> Tensor:
        """Every label: (N,) int64."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one image, (C, H, W) float32 normalized, and its label."""

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch, normalized images (B, C, H, W) float32 and labels (B,) int64, without corrupt images."""


class CorruptImages:
    """The corrupt images found so far, by name with the reason; shared by all parts of a data set."""

    def __init__(self, limit: int = 0) -> None:  # the most that may be skipped
        self.limit = limit
        self.found: dict[str, str] = {}

    @classmethod
    def allowing(cls, limit: int | float, images: int) -> CorruptImages:
        """Return a count with a limit that is a number, or a share (0..1) of all images, rounded down."""
        return cls(limit if isinstance(limit, int) else int(limit * images))

    def add(self, name: str, reason: str) -> None:
        """Count an image, unless it has been counted."""
        self.merge({name: reason})

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Count an image as corrupt if reading it raises anything but a `DataError`; the error goes no further."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # decoders, and the user's own code, may raise anything
            reraise_shortage(error)
            self.add(name, decoding_reason(error))

    def merge(self, found: Mapping[str, str]) -> None:
        """Count the images that another process found."""
        self.found.update({name: reason for name, reason in found.items() if name not in self.found})
        if len(self.found) <= self.limit:
            return
        first = [f"{name}: expected an image, but {reason}" for name, reason in list(self.found.items())[:3]]
        if not self.limit:
            raise DataError(f"{first[0]}; remove or replace it, or allow some to be skipped with data.max_corrupt=N")
        raise DataError(
            f"{len(self.found)} images cannot be read, and data.max_corrupt allows {self.limit}; remove or replace "
            f"them: {'; '.join(first)}" + ("; ..." if len(self.found) > 3 else "")
        )


def describe_corrupt(found: Mapping[str, str]) -> str:
    """Return a line about skipped images, with the first few names."""
    names = ", ".join(list(found)[:3])
    return f"{len(found)} corrupt image{'s'[: len(found) != 1]} skipped: {names}" + (", ..." if len(found) > 3 else "")


@dataclass(frozen=True)
class ImageTransform:
    """The way from an image to an input of (3, size, size)."""

    size: int  # height and width
    mean: tuple[float, ...] = IMAGENET_MEAN  # of a pixel in 0..1, per channel; subtracted
    std: tuple[float, ...] = IMAGENET_STD  # standard deviation of a pixel in 0..1, per channel; divided by
    augment: Augment = "none"  # random changes, made if a seed and an epoch are given
    own: Preprocessing | None = None  # of a model, which replaces size, mean and std where nothing is augmented

    def image(self, image: Image.Image, draw: Draw | None, index: int) -> Tensor:
        """Return a Pillow image in RGB as (3, size, size) float32.

        An image of exactly this size stays as it is; of any other, the shorter side is resized to 8/7 of it and the
        center is cut out, as torchvision's classification presets do (256 and 224).
        """
        if draw is None:
            return self.preprocessing.pixels(image)
        change = self._augmentation(draw)
        if not change.resizes and image.size != (self.size, self.size):
            image = self.preprocessing.cropped(image)
        image = augmented(image, change.pixels, draw, index)
        normalized = self.normalized(pil_to_tensor(image).float() / 255)
        return augmented(normalized, change.normalized, draw, index, ERASING)

    def batch(self, images: Tensor, draw: Draw | None, indices: Tensor) -> Tensor:
        """Return images (B, C, H, W) of values in 0..1 as (B, 3, size, size), resized bilinearly with antialiasing."""
        change = self._augmentation(draw)
        if not change.resizes:
            images = self.preprocessing.resized(images)
        images = _each(images, change.pixels, draw, indices)
        return _each(self.normalized(images), change.normalized, draw, indices, ERASING)

    def _augmentation(self, draw: Draw | None) -> Augmentation:
        return augmentation("none" if draw is None else self.augment, self.size)

    def normalized(self, images: Tensor) -> Tensor:
        """Return images (..., C, H, W) of values in 0..1, with C 1 or 3, normalized: (..., 3, H, W)."""
        return self.preprocessing.normalized(images)

    @cached_property
    def preprocessing(self) -> Preprocessing:  # each batch asks
        """The way from an image file to an input without augmentation, as model folders hold it."""
        if self.own is not None:
            return self.own
        side = round(self.size * 8 / 7)
        return Preprocessing(self.size, self.size, side, mean=tuple(self.mean), std=tuple(self.std))


def _each(images: Tensor, transform: v2.Transform | None, draw: Draw | None, indices: Tensor, *which: int) -> Tensor:
    """Return images (B, C, H, W) with a transform applied to each."""
    if transform is None:
        return images
    pairs = zip(images, indices.tolist(), strict=True)
    return torch.stack([augmented(image, transform, draw, index, *which) for image, index in pairs])


class Indexable:
    """Base class that implements `dataset[i]` by `fetch`."""

    def __len__(self) -> int:
        raise NotImplementedError

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Any]:
        """Return a batch, see `SampleDataset.fetch`."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if not -len(self) <= index < len(self):  # an IndexError also ends Python's `for` over a data set
            raise IndexError(f"image {index} of a data set of {len(self)}")
        images, targets = self.fetch(torch.tensor([index % len(self)]))
        if not len(targets):
            raise DataError(f"image {index} cannot be read")
        return images[0], int(targets[0]) if isinstance(targets, Tensor) else targets[0]


@dataclass(frozen=True, eq=False)
class TensorImages(Indexable):
    """Images in memory as uint8, which are scaled, resized, repeated to three channels and normalized per batch."""

    pixels: Tensor  # (N, C, H, W) uint8 with C 1 or 3
    labels: Tensor  # (N,) int64
    transform: ImageTransform
    scale: float = 255.0  # largest pixel value (16 for the digits, 255 for photographs)
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch: images (B, 3, size, size) float32, labels (B,) int64."""
        images = self.pixels[indices].float() / self.scale  # (B, C, H, W)
        return self.transform.batch(images, draw, indices), self.labels[indices]


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
        """The corrupt images of the underlying data set."""
        return self.dataset.corrupt

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch of the underlying data set."""
        return self.dataset.fetch(self.indices[indices], draw)


class DenseAnswers:
    """The answers of the dense model to images, which stand in for labels. The model stays as it is."""

    def __init__(self, dense: nn.Module, device: torch.device) -> None:
        self._dense, self._device = dense, device

    def __call__(self, images: Tensor) -> Tensor:
        """Return the class with the highest score for images (B, C, H, W): (B,) int64 on the CPU."""
        return self.scores(images).argmax(1).cpu()

    def scores(self, images: Tensor) -> Tensor:
        """Return the scores of every class, (B, classes)."""
        model, given = self._dense.to(self._device), images.to(self._device)
        advice = "; data.image_size says how large images are"
        with training_mode(model, False), torch.no_grad(), running(model, given, where=lambda: advice):
            return logits(call(model, inputs_as_example(model, given)))


@dataclass(frozen=True, eq=False)
class AnsweredImages(Indexable):
    """Images whose labels are the dense model's answers to them, without augmentation, each found once.

    They are found when an image is first read, in the process that has the model: worker processes get them in shared
    memory, see `Batches`.
    """

    images: ImageDataset  # whose labels are the numbers of its images
    answer: DenseAnswers | None  # None in worker processes that got it pickled
    answers: Tensor  # (N,) int64 by number, -1 as long as there is none

    @classmethod
    def of(cls, images: ImageDataset, answer: DenseAnswers) -> AnsweredImages:
        """Return images that were not answered yet."""
        return cls(images, answer, torch.full((int(images.labels.max()) + 1,), -1))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "answer": None}

    @property
    def labels(self) -> Tensor:
        """Every label, (N,) int64: -1 as long as there is none."""
        return self.answers[self.images.labels]

    @property
    def corrupt(self) -> CorruptImages:
        """The corrupt images of the underlying data set."""
        return self.images.corrupt

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch, images (B, C, H, W) and labels (B,) int64."""
        images, numbers = self.images.fetch(indices, draw)
        if self.answer is not None and get_worker_info() is None and bool((self.answers[numbers] < 0).any()):
            self.add(*((images, numbers) if draw is None else self.images.fetch(indices)))
        return images, self.answers[numbers]

    def add(self, images: Tensor, numbers: Tensor) -> None:
        """Find the answers to images without augmentation (B, C, H, W), which have these numbers (B,)."""
        if self.answer is not None and len(numbers):
            self.answers[numbers] = self.answer(images)


def check_labels(labels: Tensor, classes: Sequence[str], where: str) -> None:
    """Raise if a label of (N,) is none of the classes."""
    wrong = ((labels < 0) | (labels >= len(classes))).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{where}: expected labels 0..{len(classes) - 1} ({len(classes)} classes), but {len(wrong)} of "
            f"{len(labels)} are outside, the first is label {int(labels[first])} of image {first}"
        )


def numbered_classes(labels: Tensor, where: str) -> tuple[str, ...]:
    """Return numbers as names of the classes of labels (N,), up to the largest label."""
    count = int(labels.max()) + 1
    # With more classes than images, the first len + 1 already have a gap: a label of a billion costs no memory.
    expected = torch.arange(min(max(count, 0), len(labels) + 1))
    gaps = expected[~torch.isin(expected, labels)].tolist()
    if count < 2 or gaps:
        found = f"; no image has label {', '.join(map(str, gaps[:5]))}" if gaps else ""
        raise DataError(
            f"{where}: expected labels 0..classes-1 of two or more classes, each with images, but the largest label is "
            f"{count - 1}{found}; renumber them, or name the classes in `classes`"
        )
    return tuple(str(label) for label in range(count))


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
        image = None
        with self.corrupt.noting(self._name(index)):
            image = self._read(index)
        return self.transform.image(image, draw, index) if isinstance(image, Image.Image) else image


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


def require_map_style(dataset: Any, where: str) -> None:
    """Raise unless a data set is map-style."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{where}: expected a map-style data set, with __len__ and __getitem__, got {type(dataset).__name__}"
        )


@dataclass(frozen=True, eq=False)
class MappedImages(_Decoded):
    """The images of a map-style data set that a user or another library made.

    An image is a Pillow image; or uint8 pixels, an array (H, W) or (H, W, C) or a tensor (C, H, W), with C 1 or 3; or a
    float tensor (C, H, W), which is not transformed.
    """

    dataset: MapStyle  # of pairs of image and label
    labels: Tensor  # (N,) int64, the labels that it must return
    transform: ImageTransform
    where: str  # name of the data in messages
    corrupt: CorruptImages = field(default_factory=CorruptImages)
    shape: tuple[int, ...] | None = None  # (C, H, W) of float tensors; None for pixels

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
            wanted, got = ("pixels" if one is None else f"a float tensor {one}" for one in (self.shape, shape))
            raise DataError(f"{self._name(index)}: expected {wanted}, as the first image, got {got}")
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

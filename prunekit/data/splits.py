"""Splits: training, validation and test samples, no sample in two of them, drawn by class and the same each time."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from prunekit.data.datasets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CorruptImages,
    ImageDataset,
    ImageTransform,
    SampleDataset,
    Subset,
)
from prunekit.data.library_datasets import NumberedImages, classes_of, mapped, sample_bytes
from prunekit.errors import DataError, UsageError
from prunekit.models.preprocessing import Preprocessing
from prunekit.settings.inputs import BOXED, DataSettings
from prunekit.tasks.classification import IMAGE_AGREEMENT, IMAGE_CLASSIFICATION, NO_LABELS
from prunekit.tasks.task import Task

HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Splits:
    """Training, validation and test images; no image is in two of them."""

    train: SampleDataset  # for training and calibration
    validation: SampleDataset  # for choosing the best epoch
    test: SampleDataset  # for the final measurement alone
    classes: tuple[str, ...]  # name of each label
    sample_shape: tuple[int, ...]  # (C, H, W) of one image; of other tasks, the shape of a sample's first input
    fingerprint: str  # SHA-256 of the images, their labels, their split and their transform; hexadecimal
    task: Task = IMAGE_CLASSIFICATION  # that they are for: how they are trained on, and what is measured
    preprocessing: Preprocessing | None = None  # the way from an image file to an input; None for other samples
    notes: tuple[str, ...] = ()  # what of the data was left out or changed, for the log
    vocabulary: int | None = None  # of texts, the number of tokens that their tokenizer has
    spelled: Callable[[], tuple[int, int]] | None = None  # of windows of text, counts tokens and bytes of the test text

    @property
    def unmeasured(self) -> bool:
        """True as long as nothing can be measured, because the targets are of a dense model that is not known yet."""
        return self.task.from_dense and self.task.binding is not None

    @property
    def corrupt(self) -> dict[str, str]:
        """Images that could not be read so far, by name with the reason."""
        return self.train.corrupt.found | self.validation.corrupt.found | self.test.corrupt.found


@dataclass(frozen=True)
class ImageSource:
    """Images that are still to be split, and the parts that are already separate."""

    where: str  # name of the data in messages
    classes: tuple[str, ...]  # name of each label; of unlabeled images empty: their labels are their numbers in a part
    rest: ImageDataset  # images that are not in a separate part
    test: ImageDataset | None  # test images, if they are separate
    content: tuple[bytes, ...]  # bytes that identify the data
    validation: ImageDataset | None = None  # validation images, if they are separate
    shape: tuple[int, ...] | None = None  # (C, H, W) of inputs that do not have the settings' size


def splits_of(source: ImageSource, settings: DataSettings, task: Task = IMAGE_CLASSIFICATION) -> Splits:
    """Return the splits of a source for a task; without labels for `IMAGE_AGREEMENT`, still to be bound."""
    require_shares(settings)
    draw = partial(split_off, classes=source.classes, seed=settings.split_seed, where=source.where)
    rest, test, validation, validation_share = source.rest, source.test, source.validation, settings.validation_share
    if test is None:
        rest, test = draw(rest, settings.test_share)
        validation_share /= 1 - settings.test_share
    if validation is None:
        rest, validation = draw(rest, validation_share)
    shape = source.shape or (3, settings.image_size, settings.image_size)
    how = f"{settings.source} {settings.image_size} {settings.mean} {settings.std} {settings.test_share} "
    how += f"{settings.validation_share} {settings.split_seed}" + ("" if settings.labels else " unlabeled")
    known = fingerprint([how.encode(), *source.content])
    # Arrays are resized as a whole, files by their shorter side.
    feed = image_transform_of(settings).preprocessing if source.shape is None else None
    if feed is not None and settings.source in ("digits", "npz"):
        feed = replace(feed, shorter_side=None)
    notes = () if settings.labels else (NO_LABELS,)
    task = task if settings.labels else IMAGE_AGREEMENT
    return Splits(rest, validation, test, source.classes, shape, known, task, feed, notes)


def require_labels(settings: DataSettings, task: Task) -> None:
    """Raise if labels are not to be read, and the data or the task needs them."""
    if not settings.labels and (task.name != IMAGE_CLASSIFICATION.name or settings.source in (*BOXED, "text")):
        raise UsageError(
            f"data.labels: expected true, because only images for task {IMAGE_CLASSIFICATION.name!r} can be without, "
            f"got false with source {settings.source!r} and task {task.name!r}"
        )


def require_shares(settings: DataSettings) -> None:
    """Raise if the shares for test and validation leave nothing to train on."""
    if settings.test_share + settings.validation_share >= 1:
        raise UsageError(
            f"data: expected test_share + validation_share < 1, got {settings.test_share} + {settings.validation_share}"
        )


def split_off(
    dataset: ImageDataset, share: float, *, classes: Sequence[str], seed: int, where: str
) -> tuple[Subset, Subset]:
    """Split a data set in two, each class in the same proportion; the order of the images stays.

    Without classes, any images are drawn.
    """
    labels = dataset.labels.numpy() if classes else np.zeros(len(dataset))
    generator = np.random.default_rng(seed)
    drawn = np.zeros(len(labels), dtype=bool)
    for label, name in enumerate(classes or ("",)):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            left = f"{len(members)} image{'s'[: len(members) != 1]} left"
            drawn_too = "(3 where validation and test are both drawn)"
            if not classes:
                raise DataError(f"{where}: {left}, and a split needs at least 2 {drawn_too}; add images")
            raise DataError(
                f"{where}: class {name!r} has {left}, and a stratified split needs at least 2 of each class "
                f"{drawn_too}; add images or remove the class"
            )
        count = min(max(round(len(members) * share), 1), len(members) - 1)
        drawn[generator.permutation(members)[:count]] = True
    rest, chosen = (torch.from_numpy(np.flatnonzero(part)) for part in (~drawn, drawn))
    return Subset(dataset, rest), Subset(dataset, chosen)


def fingerprint(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of byte strings, each preceded by its length, which keeps them apart."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def source_of_parts(
    parts: Mapping[str, Any],
    settings: DataSettings,
    where: str,
    content: bytes = b"",
    own: Preprocessing | None = None,
) -> ImageSource:
    """Return the source of map-style data sets named train, and perhaps test and validation.

    With a model's own preprocessing, pixels become inputs by that.
    """
    if not settings.labels:
        parts = {name: NumberedImages(part, f"{where} {name}") for name, part in parts.items()}
    images = sum(len(part) for part in parts.values() if hasattr(part, "__len__"))
    corrupt = CorruptImages.allowing(settings.max_corrupt, images)
    transform = replace(image_transform_of(settings), own=own)
    made = {name: mapped(part, settings, transform, f"{where} {name}", corrupt) for name, part in parts.items()}
    train, test, validation = made["train"], made.get("test"), made.get("validation")
    if any(part.shape != train.shape for part in made.values()):
        forms = ", ".join(f"{name}: {part.shape or 'pixels'}" for name, part in made.items())
        raise DataError(f"{where}: expected images of one form in all parts, got {forms}")
    classes = classes_of(parts["train"], list(made.values())) if settings.labels else ()
    bytes_of = tuple(sample_bytes(part) for part in made.values())
    return ImageSource(where, classes, train, test, (content, *bytes_of), validation, train.shape)


def image_transform_of(settings: DataSettings) -> ImageTransform:
    """Return the transform of image files by these settings."""
    mean, std = (HALF, HALF) if settings.source == "digits" else (IMAGENET_MEAN, IMAGENET_STD)
    return ImageTransform(settings.image_size, settings.mean or mean, settings.std or std, settings.augment)

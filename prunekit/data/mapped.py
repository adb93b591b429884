"""Map-style data sets of others, checked: torchvision's by name, and what a user's factory returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from prunekit.data.corrupt import CorruptImages
from prunekit.data.datasets import check_labels, numbered_classes
from prunekit.data.decoded import MappedImages, MapStyle, pixels
from prunekit.data.feed import Feed
from prunekit.errors import DataError, UsageError
from prunekit.settings.data import DataSettings

LABELS = ("targets", "labels", "_labels")
"""Attributes in which torchvision's data sets keep their labels."""
SAMPLES = 16


def mapped(dataset: Any, settings: DataSettings, feed: Feed, where: str, corrupt: CorruptImages) -> MappedImages:
    """Wraps a map-style data set after a look at its first readable image.

    Labels are read without decoding where the data set keeps them (`targets` or `labels`); else every image is asked
    for once.

    Raises:
        DataError: it has no length or no items, an item is no pair of image and whole number, or an image is neither
            pixels nor a float tensor.
        UsageError: the settings change pixels, and the images are float tensors, which are fed as they are.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{where}: expected a map-style data set, with __len__ and __getitem__, got {type(dataset).__name__}"
        )
    if not len(dataset):
        raise DataError(f"{where}: expected images, but the data set is empty")
    labels, first = _look(dataset, where, corrupt)
    shape = tuple(first.shape) if isinstance(first, Tensor) else None
    if shape is not None and (settings.augment != "none" or settings.mean is not None or settings.std is not None):
        raise UsageError(
            f"{where}: data.augment, data.mean and data.std change pixels, but the images are float tensors, which are "
            "fed as they are; give Pillow images or uint8, or leave these settings out"
        )
    return MappedImages(dataset, labels, feed, where, corrupt, shape)


def classes_of(dataset: Any, parts: list[MappedImages]) -> tuple[str, ...]:
    """The classes that a data set names, or as many as the largest training label says.

    Raises:
        DataError: labels outside of the classes.
    """
    names = getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and len(names) > 1:
        classes = tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)
    else:
        classes = numbered_classes(parts[0].labels, parts[0].where)
    for part in parts:
        check_labels(part.labels, classes, part.where)
    return classes


def sample_bytes(part: MappedImages) -> bytes:
    """The labels, and a few images spread over the data set, as bytes; decoding all of them would take too long."""
    chosen = torch.linspace(0, len(part) - 1, min(SAMPLES, len(part))).long()
    return part.labels.numpy().tobytes() + part.fetch(chosen)[0].numpy().tobytes()


def _item(dataset: MapStyle, index: int, where: str, corrupt: CorruptImages) -> tuple[Any, int] | None:
    """Image and label; None for a corrupt image."""
    name = f"{where}: image {index}"
    try:
        item = dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{name}: expected a pair (image, label), got {type(item).__name__}")
        image = pixels(item[0], name)
    except DataError:
        raise
    except Exception as error:  # decoders, and the user's own code, may raise anything
        corrupt.add(name, f"{type(error).__name__}: {error}")
        return None
    label = np.asarray(item[1])
    if label.ndim or label.dtype.kind not in "iu":
        raise DataError(f"{name}: expected a whole number as its label, got {item[1]!r:.60}")
    return image, int(label)


def _look(dataset: Any, where: str, corrupt: CorruptImages) -> tuple[Tensor, Any]:
    """Labels of all images, (N,) int64, and the first image that can be read; a corrupt image's label is never used."""
    known = _known_labels(dataset)
    labels, first = [], None
    for index in range(len(dataset)):
        item = _item(dataset, index, where, corrupt)
        first = item[0] if item and first is None else first
        if known is not None and first is not None:
            return known, first
        labels.append(item[1] if item else 0)
    if first is None:
        raise DataError(f"{where}: expected images, but none of {len(dataset)} can be read")
    return torch.tensor(labels), first


def _known_labels(dataset: Any) -> Tensor | None:
    if isinstance(dataset, Subset):
        whole = _known_labels(dataset.dataset)
        return None if whole is None else whole[list(dataset.indices)]
    kept = [getattr(dataset, name) for name in LABELS if hasattr(dataset, name)]
    if isinstance(dataset, TensorDataset):
        kept = [dataset.tensors[-1]]
    for values in kept:
        array = np.asarray(values) if isinstance(values, list | tuple | np.ndarray | Tensor) else np.empty(0)
        if array.shape == (len(dataset),) and array.dtype.kind in "iu":
            return torch.from_numpy(array.astype(np.int64))
    return None

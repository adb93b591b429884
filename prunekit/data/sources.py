"""The three sources of images: the embedded digits, a folder per class, a NumPy archive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prunekit.data.arrays import Arrays, read_npz
from prunekit.data.datasets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FolderImages,
    ImageDataset,
    TensorImages,
    check_labels,
)
from prunekit.data.folders import scan_folder
from prunekit.data.settings import DataSettings
from prunekit.data.splits import Splits, fingerprint, split_off
from prunekit.errors import DataError, UsageError

HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class _Source:
    """What a reader finds: images that are still to be split, the test images if they come apart."""

    where: str
    classes: tuple[str, ...]
    rest: ImageDataset
    test: ImageDataset | None
    content: tuple[bytes, ...]


def load_splits(settings: DataSettings) -> Splits:
    """Loads images and splits them: stratified, and the same for the same settings and content.

    `test_share` and `validation_share` are shares of all images. Where the source has test images of its own, only the
    validation images are drawn, as a share of its training images.

    Raises:
        DataError: the data is missing, empty or unreadable, or labels do not fit the classes.
        UsageError: `root` is missing for a source that needs it, or the shares leave nothing to train on.
    """
    if settings.test_share + settings.validation_share >= 1:
        raise UsageError(
            f"data: expected test_share + validation_share < 1, got {settings.test_share} + {settings.validation_share}"
        )
    source = _READERS[settings.source](settings)
    draw = partial(split_off, classes=source.classes, seed=settings.split_seed, where=source.where)
    rest, test, validation_share = source.rest, source.test, settings.validation_share
    if test is None:
        rest, test = draw(rest, settings.test_share)
        validation_share /= 1 - settings.test_share
    train, validation = draw(rest, validation_share)
    shape = (3, settings.image_size, settings.image_size)
    how = f"{settings.source} {settings.image_size} {settings.test_share} {settings.validation_share} "
    digest = fingerprint([f"{how}{settings.split_seed}".encode(), *source.content])
    return Splits(train, validation, test, source.classes, shape, digest)


def _digits(settings: DataSettings) -> _Source:
    """UCI optical digits, Alpaydin & Kaynak 1998 (see DIGITS.md): 1,797 grey images of 8x8, values 0..16."""
    with resources.as_file(resources.files("prunekit.data") / "digits.npz") as path, np.load(path) as archive:
        pixels, labels = archive["images"][:, None], archive["labels"].astype(np.int64)
    dataset = TensorImages(
        torch.from_numpy(pixels), torch.from_numpy(labels), settings.image_size, scale=16.0, mean=HALF, std=HALF
    )
    classes = tuple(str(digit) for digit in range(10))
    return _Source("digits", classes, dataset, None, (pixels.tobytes(), labels.tobytes()))


def _npz(settings: DataSettings) -> _Source:
    path = _root(settings)
    archive = read_npz(path)

    def dataset(arrays: Arrays) -> TensorImages:
        check_labels(arrays.labels, archive.classes, f"{path}: {arrays.name}")
        return TensorImages(
            arrays.pixels, arrays.labels, settings.image_size, scale=255.0, mean=IMAGENET_MEAN, std=IMAGENET_STD
        )

    test = None if archive.test is None else dataset(archive.test)
    parts = [archive.rest] if archive.test is None else [archive.rest, archive.test]
    content = tuple(_bytes(tensor) for arrays in parts for tensor in (arrays.pixels, arrays.labels))
    return _Source(str(path), archive.classes, dataset(archive.rest), test, content)


def _imagefolder(settings: DataSettings) -> _Source:
    root = _root(settings)
    folder = scan_folder(root)

    def dataset(files: tuple[tuple[Path, int], ...]) -> FolderImages:
        labels = torch.tensor([label for _, label in files])
        return FolderImages(tuple(path for path, _ in files), labels, settings.image_size)

    test = None if folder.test is None else dataset(folder.test)
    # Contents are known by name, size and time of change: reading every file would take hours on a large data set.
    stats = ((path, path.stat()) for path, _ in (*folder.rest, *(folder.test or ())))
    content = tuple(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode() for path, stat in stats)
    return _Source(str(root), folder.classes, dataset(folder.rest), test, content)


_READERS: dict[str, Callable[[DataSettings], _Source]] = {
    "digits": _digits,
    "npz": _npz,
    "imagefolder": _imagefolder,
}


def _root(settings: DataSettings) -> Path:
    if settings.root is None:
        raise UsageError(f"data.root: source {settings.source!r} needs the path of its data, got none")
    if not settings.root.exists():
        raise DataError(f"{settings.root}: data.root does not exist; expected {_EXPECTED[settings.source]}")
    return settings.root


_EXPECTED = {
    "npz": "a NumPy archive (.npz)",
    "imagefolder": "a folder with train/ and test/, or with one folder of images for each class",
}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()

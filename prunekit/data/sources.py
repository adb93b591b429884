"""Sources of data, by name: where the samples of the settings come from, and what is missing where they do not.

Those of labeled images are here: the embedded digits, folders, NumPy archives, and data sets of other libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prunekit.data.coco import GET_COCO
from prunekit.data.datasets import (
    CorruptImages,
    FolderImages,
    TensorImages,
)
from prunekit.data.detection_sources import detection_splits
from prunekit.data.library_datasets import open_rows, open_sets
from prunekit.data.local_files import LabeledArrays, LabeledFiles, read_npz, scan_folder
from prunekit.data.splits import ImageSource, Splits, image_transform_of, source_of_parts, splits_of
from prunekit.data.texts import text_splits
from prunekit.data.yolo import GET_YOLO
from prunekit.errors import DataError, UsageError
from prunekit.settings.data_and_model import BOXED, DataSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import get_task


def load_splits(settings: DataSettings, task: str = IMAGE_CLASSIFICATION.name) -> Splits:
    """Load labeled images and split them: stratified, and the same for the same settings and content.

    Texts, for tasks that take them, are split into blocks. `test_share` and `validation_share` are shares of all
    images. If the source has separate test images, only validation images are drawn, as a share of its training images.

    Args:
        settings: of the data.
        task: name of the task, which says what becomes of texts.

    Raises:
        DataError: the data is missing, empty or unreadable, or labels do not fit the classes.
        UsageError: `root` is missing for a source that needs it, or the shares leave nothing to train on.
    """
    if settings.source == "own":
        raise UsageError("data.source: these images are their owner's; give them as --data file.py:factory")
    missing = missing_data(settings)
    if missing is not None:
        raise DataError(missing)
    if settings.source in BOXED:
        return detection_splits(settings)
    if settings.source == "text" or (settings.source == "huggingface" and get_task(task).texts is not None):
        return text_splits(settings, get_task(task))
    return splits_of(_READERS[settings.source](settings), settings)


def missing_data(settings: DataSettings) -> str | None:
    """Return which data is missing, where it was searched and how to supply it; None if its root exists."""
    if settings.source not in _EXPECTED or (settings.source == "huggingface" and settings.name is not None):
        return None
    if settings.root is None:
        raise UsageError(f"data.root: source {settings.source!r} needs the path of its data, got none")
    if settings.root.exists() or settings.download:
        return None
    where = settings.origin or _ORIGINS.get(settings.source)
    origin = f"; {where}" if where else ""
    beside = "" if settings.root.is_absolute() else ", here or beside the recipe that names it"
    expected = f"expected {_EXPECTED[settings.source]}{beside}; give its path as data.root=PATH{origin}"
    return f"data.root: {settings.root.absolute()} does not exist; {expected}"


def _digits(settings: DataSettings) -> ImageSource:
    """Return the UCI optical digits, Alpaydin & Kaynak 1998 (see DIGITS.md): 1,797 gray images of 8x8, values 0..16."""
    with resources.as_file(resources.files("prunekit.data") / "digits.npz") as path, np.load(path) as archive:
        pixels, labels = archive["images"][:, None], archive["labels"].astype(np.int64)
    transform = image_transform_of(settings)
    dataset = TensorImages(torch.from_numpy(pixels), torch.from_numpy(labels), transform, scale=16.0)
    classes = tuple(str(digit) for digit in range(10))
    return ImageSource("digits", classes, dataset, None, (pixels.tobytes(), labels.tobytes()))


def _npz(settings: DataSettings) -> ImageSource:
    path = _root(settings)
    archive = read_npz(path)

    def dataset(arrays: LabeledArrays) -> TensorImages:
        return TensorImages(arrays.pixels, arrays.labels, image_transform_of(settings))

    test = None if archive.test is None else dataset(archive.test)
    parts = [archive.rest] if archive.test is None else [archive.rest, archive.test]
    content = tuple(_bytes(tensor) for arrays in parts for tensor in (arrays.pixels, arrays.labels))
    return ImageSource(str(path), archive.classes, dataset(archive.rest), test, content)


def _imagefolder(settings: DataSettings) -> ImageSource:
    root = _root(settings)
    folder, transform = scan_folder(root), image_transform_of(settings)
    stats = {path: path.stat() for path, _ in (*folder.rest, *(folder.test or ()))}
    corrupt = CorruptImages.allowing(settings.max_corrupt, len(stats))
    corrupt.merge({str(path): "the file is empty" for path, stat in stats.items() if not stat.st_size})

    def dataset(files: LabeledFiles) -> FolderImages:
        paths, labels = zip(*files, strict=True)
        return FolderImages(paths, torch.tensor(labels), transform, corrupt)

    test = None if folder.test is None else dataset(folder.test)
    # Files are identified by name, size and time of change: reading all would take hours for a large data set.
    content = tuple(
        f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode() for path, stat in stats.items()
    )
    return ImageSource(str(root), folder.classes, dataset(folder.rest), test, content)


def _torchvision(settings: DataSettings) -> ImageSource:
    train, test = open_sets(settings)
    return source_of_parts({"train": train, "test": test}, settings, str(settings.name))


def _huggingface(settings: DataSettings) -> ImageSource:
    return source_of_parts(open_rows(settings), settings, str(settings.root or settings.name))


def _root(settings: DataSettings) -> Path:
    assert settings.root is not None  # see `missing_data`
    return settings.root


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


_READERS: dict[str, Callable[[DataSettings], ImageSource]] = {
    "digits": _digits,
    "npz": _npz,
    "imagefolder": _imagefolder,
    "torchvision": _torchvision,
    "huggingface": _huggingface,
}
_EXPECTED = {
    "npz": "a NumPy archive (.npz)",
    "imagefolder": "a folder with train/ and test/ or val/, or with one folder of images for each class",
    "torchvision": "the folder of torchvision's files (data.download=true makes and fills it)",
    "huggingface": "the folder that `save_to_disk` of Hugging Face's datasets wrote",
    "coco": "the folder of a data set in the format of COCO, with annotations/ and its images",
    "yolo": "the folder of a data set of ultralytics, or its data.yaml",
    "text": "a file of text (.txt or .jsonl), or a folder of them",
}
_ORIGINS = {"coco": GET_COCO, "yolo": GET_YOLO}

"""Sources of images, and their stratified split into training, validation and test images.

Sources are the embedded digits, folders, NumPy archives, and data sets of other libraries; those of texts are in
`prunekit.data.texts`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.data.datasets import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CorruptImages,
    ImageDataset,
    ImageTransform,
    SampleDataset,
    Subset,
    TensorImages,
)
from prunekit.data.decoded_images import FolderImages
from prunekit.data.library_datasets import classes_of, mapped, open_rows, open_sets, sample_bytes
from prunekit.data.local_files import LabeledArrays, LabeledFiles, read_npz, scan_folder
from prunekit.errors import DataError, UsageError
from prunekit.models.preprocessing import Preprocessing
from prunekit.settings.inputs import BOXED, DataSettings
from prunekit.tasks.classification import IMAGE_CLASSIFICATION
from prunekit.tasks.task import Task, get_task

HALF = (0.5, 0.5, 0.5)
GET_COCO = (
    "COCO is at https://cocodataset.org/#download: 2017 Train images, 2017 Val images and 2017 Train/Val annotations, "
    "unpacked into one folder"
)
GET_YOLO = "small ones are at https://github.com/ultralytics/assets/releases, such as coco8.zip"


@dataclass(frozen=True)
class Splits:
    """Training, validation and test images; no image is in two of them.

    Attributes:
        train: for training and calibration.
        validation: for choosing the best epoch.
        test: for the final measurement alone.
        classes: name of each label.
        sample_shape: (C, H, W) of one image; of other tasks, the shape of a sample's first input.
        fingerprint: SHA-256 of the images, their labels, their split and their transform; hexadecimal.
        task: that they are for: how they are trained on, and what is measured.
        preprocessing: the way from an image file to an input; None for other samples.
        notes: what of the data was left out or changed, for the log.
        vocabulary: of texts, the number of tokens that their tokenizer has.
    """

    train: SampleDataset
    validation: SampleDataset
    test: SampleDataset
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    fingerprint: str
    task: Task = IMAGE_CLASSIFICATION
    preprocessing: Preprocessing | None = None
    notes: tuple[str, ...] = ()
    vocabulary: int | None = None

    @property
    def corrupt(self) -> dict[str, str]:
        """Images that could not be read so far, by name with the reason."""
        return self.train.corrupt.found | self.validation.corrupt.found | self.test.corrupt.found


@dataclass(frozen=True)
class ImageSource:
    """Images that are still to be split, and the parts that are already separate.

    Attributes:
        where: name of the data in messages.
        classes: name of each label.
        rest: images that are not in a separate part.
        test: test images, if they are separate.
        content: bytes that identify the data.
        validation: validation images, if they are separate.
        shape: (C, H, W) of inputs that do not have the settings' size.
    """

    where: str
    classes: tuple[str, ...]
    rest: ImageDataset
    test: ImageDataset | None
    content: tuple[bytes, ...]
    validation: ImageDataset | None = None
    shape: tuple[int, ...] | None = None


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
        from prunekit.data.detection.detection_sources import detection_splits

        return detection_splits(settings)
    if settings.source == "text" or (settings.source == "huggingface" and get_task(task).texts is not None):
        from prunekit.data.texts import text_splits

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


def splits_of(source: ImageSource, settings: DataSettings) -> Splits:
    """Return the splits of a source."""
    if settings.test_share + settings.validation_share >= 1:
        raise UsageError(
            f"data: expected test_share + validation_share < 1, got {settings.test_share} + {settings.validation_share}"
        )
    draw = partial(split_off, classes=source.classes, seed=settings.split_seed, where=source.where)
    rest, test, validation, validation_share = source.rest, source.test, source.validation, settings.validation_share
    if test is None:
        rest, test = draw(rest, settings.test_share)
        validation_share /= 1 - settings.test_share
    if validation is None:
        rest, validation = draw(rest, validation_share)
    shape = source.shape or (3, settings.image_size, settings.image_size)
    how = f"{settings.source} {settings.image_size} {settings.mean} {settings.std} {settings.test_share} "
    how += f"{settings.validation_share} {settings.split_seed}"
    known = fingerprint([how.encode(), *source.content])
    feed = preprocessing_of(settings) if source.shape is None else None
    return Splits(rest, validation, test, source.classes, shape, known, preprocessing=feed)


def preprocessing_of(settings: DataSettings) -> Preprocessing:
    """Return the way from an image file to an input: arrays are resized as a whole, files by their shorter side."""
    transform = image_transform_of(settings)
    whole = settings.source in ("digits", "npz")
    return replace(transform.preprocessing, shorter_side=None) if whole else transform.preprocessing


def split_off(
    dataset: ImageDataset, share: float, *, classes: Sequence[str], seed: int, where: str
) -> tuple[Subset, Subset]:
    """Split a data set in two, each class in the same proportion; the order of the images stays."""
    labels = dataset.labels.numpy()
    generator = np.random.default_rng(seed)
    drawn = np.zeros(len(labels), dtype=bool)
    for label, name in enumerate(classes):
        members = np.flatnonzero(labels == label)
        if len(members) < 2:
            left = f"{len(members)} image{'s'[: len(members) != 1]} left"
            raise DataError(
                f"{where}: class {name!r} has {left}, and a stratified split needs at least 2 of "
                "each class (3 where validation and test are both drawn); add images or remove the class"
            )
        count = min(max(round(len(members) * share), 1), len(members) - 1)
        drawn[generator.permutation(members)[:count]] = True
    return Subset(dataset, _indices(~drawn)), Subset(dataset, _indices(drawn))


def _indices(chosen: np.ndarray) -> Tensor:
    return torch.from_numpy(np.flatnonzero(chosen))


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
    images = sum(len(part) for part in parts.values() if hasattr(part, "__len__"))
    corrupt = CorruptImages.allowing(settings.max_corrupt, images)
    transform = replace(_image_transform(settings), own=own)
    made = {name: mapped(part, settings, transform, f"{where} {name}", corrupt) for name, part in parts.items()}
    train, test, validation = made["train"], made.get("test"), made.get("validation")
    if any(part.shape != train.shape for part in made.values()):
        forms = ", ".join(f"{name}: {part.shape or 'pixels'}" for name, part in made.items())
        raise DataError(f"{where}: expected images of one form in all parts, got {forms}")
    classes = classes_of(parts["train"], list(made.values()))
    bytes_of = tuple(sample_bytes(part) for part in made.values())
    return ImageSource(where, classes, train, test, (content, *bytes_of), validation, train.shape)


def image_transform_of(settings: DataSettings) -> ImageTransform:
    """Return the transform of image files by these settings."""
    return _image_transform(settings, HALF, HALF) if settings.source == "digits" else _image_transform(settings)


def _image_transform(
    settings: DataSettings, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
) -> ImageTransform:
    return ImageTransform(settings.image_size, settings.mean or mean, settings.std or std, settings.augment)


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
        return TensorImages(arrays.pixels, arrays.labels, _image_transform(settings))

    test = None if archive.test is None else dataset(archive.test)
    parts = [archive.rest] if archive.test is None else [archive.rest, archive.test]
    content = tuple(_bytes(tensor) for arrays in parts for tensor in (arrays.pixels, arrays.labels))
    return ImageSource(str(path), archive.classes, dataset(archive.rest), test, content)


def _imagefolder(settings: DataSettings) -> ImageSource:
    root = _root(settings)
    folder, transform = scan_folder(root), _image_transform(settings)
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

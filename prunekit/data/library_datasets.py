"""Data sets of other libraries: torchvision's by name, Hugging Face's, and map-style ones."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from prunekit.data.datasets import (
    CorruptImages,
    ImageTransform,
    MappedImages,
    MapStyle,
    check_labels,
    numbered_classes,
    pixels,
    require_map_style,
)
from prunekit.data.roots import SETS
from prunekit.errors import DataError, UsageError, nearest, raised_as, reraise_shortage, with_type
from prunekit.settings.inputs import DataSettings

LABELS = ("targets", "labels", "_labels")
"""Attributes of torchvision's data sets that may hold their labels."""
SAMPLES = 16
TEXTS = 1000
"""Texts that are read at once."""


class NumberedImages:
    """The images of a map-style data set whose labels are not read, each with its number in place of a label."""

    def __init__(self, dataset: Any, where: str) -> None:
        require_map_style(dataset, where)
        self._dataset, self.targets = dataset, np.arange(len(dataset))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item = self._dataset[index]
        return (item[0] if isinstance(item, tuple | list) and item else item), index


def mapped(
    dataset: Any, settings: DataSettings, transform: ImageTransform, where: str, corrupt: CorruptImages
) -> MappedImages:
    """Wrap a map-style data set after checking its first readable image.

    Labels are read without decoding if the data set has them (`targets` or `labels`); else every item is read once.
    """
    require_map_style(dataset, where)
    if not len(dataset):
        raise DataError(f"{where}: expected images, but the data set is empty")
    labels, first = _look(dataset, where, corrupt)
    shape = tuple(first.shape) if isinstance(first, Tensor) else None
    if shape is not None and (settings.augment != "none" or settings.mean is not None or settings.std is not None):
        raise UsageError(
            f"{where}: data.augment, data.mean and data.std change pixels, but the images are float tensors, which are "
            "fed as they are; give Pillow images or uint8, or leave these settings out"
        )
    return MappedImages(dataset, labels, transform, where, corrupt, shape)


def classes_of(dataset: Any, parts: list[MappedImages]) -> tuple[str, ...]:
    """Return the class names of a data set, or numbers up to the largest training label."""
    names = getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and len(names) > 1:
        classes = tuple(", ".join(name) if isinstance(name, tuple) else str(name) for name in names)
    else:
        classes = numbered_classes(parts[0].labels, parts[0].where)
    for part in parts:
        check_labels(part.labels, classes, part.where)
    return classes


def sample_bytes(part: MappedImages) -> bytes:
    """Return the labels and a few images of a data set as bytes; decoding all would take too long."""
    chosen = torch.linspace(0, len(part) - 1, min(SAMPLES, len(part))).long()
    return part.labels.numpy().tobytes() + part.fetch(chosen)[0].numpy().tobytes()


def _item(dataset: MapStyle, index: int, where: str, corrupt: CorruptImages) -> tuple[Any, int] | None:
    """Return an image and its label; None for a corrupt image."""
    name, image = f"{where}: image {index}", None
    with corrupt.noting(name):
        item = dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{name}: expected a pair (image, label), got {type(item).__name__}")
        image = pixels(item[0], name)
    if image is None:
        return None
    label = np.asarray(item[1])
    if label.ndim or label.dtype.kind not in "iu":
        raise DataError(f"{name}: expected a whole number as its label, got {item[1]!r:.60}")
    return image, int(label)


def _look(dataset: Any, where: str, corrupt: CorruptImages) -> tuple[Tensor, Any]:
    """Return all labels, (N,) int64, with any value for corrupt images, and the first image that can be read."""
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


def open_sets(settings: DataSettings) -> dict[str, Any]:
    """Return the training and the test part of a data set; nothing is downloaded unless `settings.download`.

    Some, such as CIFAR10, are pickles, which torchvision loads after checking their MD5 sums.
    """
    name = str(settings.name)
    if name not in SETS:
        alike = next((known for known in SETS if known.lower() == name.lower()), name)
        raise UsageError(
            "data.name: expected a data set of torchvision with a label for each image, and a training and a test "
            f"part, got {name!r}; {nearest(alike, SETS)}"
        )
    kind = getattr(torchvision.datasets, name)
    train, test = (_open(kind, settings, **part) for part in SETS[name])
    return {"train": train, "test": test}


def _open(kind: Any, settings: DataSettings, **part: Any) -> Any:
    if "download" in inspect.signature(kind).parameters:
        part["download"] = settings.download
    try:
        return kind(str(settings.root), **part)
    except Exception as error:  # RuntimeError, OSError, ValueError, ModuleNotFoundError
        reraise_shortage(error)
        which = ", ".join(f"{key}={value!r}" for key, value in part.items())
        root = Path(str(settings.root)).absolute()
        absent = [str(path.relative_to(root)) for path in _files(kind, root, part) if not path.is_file()]
        files = f"missing below {root}: {', '.join(absent)}" if absent else f"looked below {root}"
        origin = f"; {settings.origin}" if settings.origin else ""
        fetch = "" if settings.download or "download" not in part else ", or have them fetched with data.download=true"
        raise DataError(
            f"data.root: torchvision's {kind.__name__} ({which}) cannot be used: {error}; {files}; put its files there "
            f"or set data.root{fetch}{origin}"
        ) from error


def _files(kind: Any, root: Path, part: dict[str, Any]) -> list[Path]:
    """Return the files that a data set needs, if its class lists them, in one of torchvision's three ways."""
    if hasattr(kind, "train_list"):  # CIFAR, STL10
        return [root / kind.base_folder / entry[0] for entry in (*kind.train_list, *kind.test_list)]
    if hasattr(kind, "resources"):  # MNIST and those made like it
        return [root / kind.__name__ / "raw" / Path(entry[0]).stem for entry in kind.resources]
    names = getattr(kind, "split_list", {}).get(part.get("split"), ())  # SVHN, USPS
    return [root / names[1]] if len(names) > 1 else []


FIRST_WITHOUT_SCRIPTS = 4
"""The first major version of `datasets` that runs no code of a data set's repository."""
HELD_OUT = ("test", "validation")


class HuggingFaceRows:
    """Rows of a Hugging Face data set as pairs of image and label, from the columns of these names.

    Without a column of labels they are images alone.
    """

    def __init__(self, rows: Any, image: str, label: str | None, classes: tuple[str, ...] | None) -> None:
        self._rows, self._image, self._label = rows, image, label
        self.classes = classes
        if label is not None:
            self.targets = np.asarray(rows.select_columns([label]).with_format("numpy")[:][label])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        if row[self._image] is None:
            raise ValueError(f"column {self._image!r} is empty")
        return row[self._image] if self._label is None else (row[self._image], row[self._label])


def open_rows(settings: DataSettings) -> dict[str, HuggingFaceRows]:
    """Return the parts of a data set: train, and test and validation if it has them.

    A data set on the hub is fetched, or read from the library's cache, only with `settings.download`.
    `trust_remote_code` is never set, and versions of the library that have it raise.
    """
    library, parts, where = _opened(settings)
    image, label = _columns(library, parts["train"].features, settings, where)
    classes = None if label is None else getattr(parts["train"].features[label], "names", None)
    rows = {name: HuggingFaceRows(part, image, label, classes and tuple(classes)) for name, part in parts.items()}
    if "test" not in rows and "validation" in rows:  # as for ImageNet, whose results are on the validation images
        rows["test"] = rows.pop("validation")
    return rows


def open_texts(settings: DataSettings) -> dict[str, Iterator[str]]:
    """Return the texts of each part of a data set: train, and test and validation if it has them.

    They are in the column `text`, or in the only one of strings.
    """
    _, parts, where = _opened(settings)
    features = parts["train"].features
    strings = [name for name, kind in features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    column = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
    if column is None:
        raise UsageError(
            f"{where}: expected a column named text, or one of strings alone, got {', '.join(features)}; rename it: "
            '`rename_column("...", "text")`'
        )
    return {name: _texts(part, column) for name, part in parts.items()}


def _texts(part: Any, column: str) -> Iterator[str]:
    """Yield the texts of a column that are not empty; a few at a time are in memory."""
    for rows in part.select_columns([column]).iter(TEXTS):
        yield from filter(None, rows[column])


def _opened(settings: DataSettings) -> tuple[Any, dict[str, Any], str]:
    """Return the library, the parts of a data set by name, and its name in messages."""
    where = str(settings.root or settings.name)
    try:
        import datasets as library
    except ImportError as error:
        raise DataError(
            f"data.source=huggingface needs the package datasets ({error}); pip install prunekit[hf-data]"
        ) from error
    if int(library.__version__.partition(".")[0]) < FIRST_WITHOUT_SCRIPTS:
        raise DataError(
            f"expected datasets {FIRST_WITHOUT_SCRIPTS}.0 or newer, which runs no code of data sets, got "
            f"{library.__version__}; pip install -U prunekit[hf-data]"
        )
    if settings.root is None and not settings.download:
        raise UsageError(f"data.download: expected true, because {where} is on the hub; or save it, and give data.root")
    kind = "a data set on Hugging Face's hub" if settings.root is None else "a folder that `save_to_disk` wrote"
    with raised_as(DataError, f"{where}: expected {kind}, but: ", reason=with_type):
        found = library.load_dataset(where) if settings.root is None else library.load_from_disk(where)
    parts = dict(found) if isinstance(found, Mapping) else {"train": found}
    if "train" not in parts:
        raise DataError(f"{where}: expected a part named train, found {', '.join(parts) or 'none'}")
    return library, {name: parts[name] for name in ("train", *HELD_OUT) if name in parts}, where


def _columns(library: Any, features: Mapping[str, Any], settings: DataSettings, where: str) -> tuple[str, str | None]:
    """Return the columns of images and labels, None if these are not read: of the settings, or the only of a kind."""
    if settings.columns is not None:
        for name in settings.columns:
            if name not in features:
                raise UsageError(f"data.columns: {where} has no column {name!r}; {nearest(name, list(features))}")
        image, label = settings.columns
        return image, label if settings.labels else None
    images = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, library.ClassLabel)]
    if len(images) == 1 and not settings.labels:
        return images[0], None
    if len(images) != 1 or len(labels) != 1:
        raise UsageError(
            f"{where}: expected one column of images and one of class labels, got {images} and {labels}; name them as "
            "data.columns=[image, label]"
        )
    return images[0], labels[0]

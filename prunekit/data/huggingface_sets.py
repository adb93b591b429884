"""Data sets of Hugging Face's library `datasets`: a folder that it saved, or a name on its hub; the extra `hf-data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from prunekit.errors import DataError, UsageError, nearest
from prunekit.settings.data import DataSettings

FIRST_WITHOUT_SCRIPTS = 4
"""The major version of `datasets` from which on no code of a data set's repository is ever run."""
HELD_OUT = ("test", "validation")


class Rows:
    """Rows of a data set as pairs of image and label.

    Args:
        rows: a `datasets.Dataset`.
        image: name of the column of images.
        label: name of the column of labels.
        classes: name of each label; None where the column has none.
    """

    def __init__(self, rows: Any, image: str, label: str, classes: tuple[str, ...] | None) -> None:
        self._rows, self._image, self._label = rows, image, label
        self.classes = classes
        self.targets = np.asarray(rows.select_columns([label]).with_format("numpy")[:][label])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        row = self._rows[index]
        if row[self._image] is None:
            raise ValueError(f"column {self._image!r} is empty")
        return row[self._image], row[self._label]


def open_rows(settings: DataSettings) -> dict[str, Rows]:
    """The parts of a data set: train, and test and validation where they are; of one without parts, train alone.

    A hub's data set is fetched, or taken from the library's cache, only with `settings.download`. `trust_remote_code`
    is never given, and versions of the library that know it are refused.

    Raises:
        UsageError: a name without `download`, or columns that are not there or not told apart.
        DataError: the library is missing or too old, or the data cannot be read or has no training part.
    """
    library, where = _library(), str(settings.root or settings.name)
    if settings.root is None and not settings.download:
        raise UsageError(f"data.download: expected true, because {where} is on the hub; or save it, and give data.root")
    try:
        found = library.load_dataset(where) if settings.root is None else library.load_from_disk(where)
    except Exception as error:  # the library raises OSError, ValueError, pyarrow's and huggingface_hub's errors
        kind = "a data set on Hugging Face's hub" if settings.root is None else "a folder that `save_to_disk` wrote"
        raise DataError(f"{where}: expected {kind}, but: {type(error).__name__}: {error}") from error
    parts = dict(found) if isinstance(found, Mapping) else {"train": found}
    if "train" not in parts:
        raise DataError(f"{where}: expected a part named train, found {', '.join(parts) or 'none'}")
    image, label = _columns(library, parts["train"].features, settings, where)
    classes = getattr(parts["train"].features[label], "names", None)
    names = ["train", *(name for name in HELD_OUT if name in parts)]
    rows = {name: Rows(parts[name], image, label, classes and tuple(classes)) for name in names}
    if "test" not in rows and "validation" in rows:  # as ImageNet's, whose validation images are what is reported
        rows["test"] = rows.pop("validation")
    return rows


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.source=huggingface needs the package datasets ({error}); pip install prunekit[hf-data]"
        ) from error
    if int(datasets.__version__.partition(".")[0]) < FIRST_WITHOUT_SCRIPTS:
        raise DataError(
            f"expected datasets {FIRST_WITHOUT_SCRIPTS}.0 or newer, which runs no code of data sets, got "
            f"{datasets.__version__}; pip install -U prunekit[hf-data]"
        )
    return datasets


def _columns(library: Any, features: Mapping[str, Any], settings: DataSettings, where: str) -> tuple[str, str]:
    """Names of the columns of images and labels: as the settings say, or the only ones of their kind."""
    if settings.columns is not None:
        for name in settings.columns:
            if name not in features:
                raise UsageError(f"data.columns: {where} has no column {name!r}; {nearest(name, list(features))}")
        image, label = settings.columns
        return image, label
    images = [name for name, kind in features.items() if isinstance(kind, library.Image)]
    labels = [name for name, kind in features.items() if isinstance(kind, library.ClassLabel)]
    if len(images) != 1 or len(labels) != 1:
        raise UsageError(
            f"{where}: expected one column of images and one of class labels, got {images} and {labels}; name them as "
            "data.columns=[image, label]"
        )
    return images[0], labels[0]

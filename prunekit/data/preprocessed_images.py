"""Labeled images to test a model on, fed by the model's own preprocessing: class folders, or a NumPy archive.

Labels are those of the model: classes are matched by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.data.augmentation import Draw
from prunekit.data.datasets import CorruptImages, Indexable
from prunekit.data.local_files import read_npz, scan_folder
from prunekit.data.splits import Splits, fingerprint
from prunekit.errors import DataError, nearest
from prunekit.models.preprocessing import Preprocessing

ARCHIVE = ".npz"


@dataclass(frozen=True, eq=False)
class PreprocessedImages(Indexable):
    """Images with their labels, which a preprocessing turns into inputs.

    Args:
        images: paths of image files, or uint8 arrays (H, W) or (H, W, 3).
        labels: (N,) int64.
        preprocessing: from an image to an input.
        corrupt: stays empty: an image that cannot be read raises.
    """

    images: Sequence[Path] | np.ndarray[Any, Any]
    labels: Tensor
    preprocessing: Preprocessing
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch: inputs (B, C, H, W) float32, labels (B,) int64."""
        return self.preprocessing([self.images[index] for index in indices.tolist()]), self.labels[indices]


def is_labeled_images(data: str) -> bool:
    """Return whether a text names a folder or an archive of images, and not code such as `file.py:factory`."""
    return Path(data).is_dir() or Path(data).suffix == ARCHIVE


def labeled_images(path: Path, preprocessing: Preprocessing, classes: Sequence[str]) -> Splits:
    """Return labeled images whose test part a model is tested on: that of the data if it has one, else all of it."""
    if not path.exists():
        raise DataError(f"{path}: expected a folder of images or a NumPy archive ({ARCHIVE}), and there is none")
    images: Sequence[Path] | np.ndarray[Any, Any]
    if path.is_dir():
        folder = scan_folder(path)
        images, labels = zip(*(folder.test or folder.rest), strict=True)
        found, given, numbered = folder.classes, torch.tensor(labels), False
    else:
        archive = read_npz(path)
        arrays = archive.test or archive.rest
        images, given = np.moveaxis(arrays.pixels.numpy(), 1, 3), arrays.labels
        images = images[..., 0] if images.shape[3] == 1 else images
        found, numbered = archive.classes, archive.classes == tuple(map(str, range(len(archive.classes))))
    matched = _matched(found, classes, str(path), numbered)
    test = PreprocessedImages(images, torch.tensor(matched)[given], preprocessing)
    known = fingerprint([str(path.resolve()).encode(), given.numpy().tobytes(), str(preprocessing).encode()])
    shape = (len(preprocessing.mean), preprocessing.height, preprocessing.width)
    return Splits(test, test, test, tuple(classes) or found, shape, known, preprocessing=preprocessing)


def _matched(found: Sequence[str], classes: Sequence[str], where: str, numbered: bool) -> list[int]:
    """Return the model's label of each class of the data."""
    if not classes:
        return list(range(len(found)))
    if numbered and not set(found) <= set(classes) and len(found) <= len(classes):
        return list(range(len(found)))
    wrong = [name for name in found if name not in classes]
    if wrong:
        more = f", nor are {len(wrong) - 1} more" if wrong[1:] else ""
        raise DataError(
            f"{where}: class {wrong[0]!r} is none of the model's {len(classes)} classes{more}; "
            f"{nearest(wrong[0], classes)}; rename the folders or classes as the model names them"
        )
    times = Counter(classes)
    twice = [name for name in found if times[name] > 1]
    if twice:
        raise DataError(f"{where}: {twice[0]!r} is the name of {times[twice[0]]} of the model's classes; leave it out")
    return [list(classes).index(name) for name in found]

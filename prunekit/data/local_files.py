"""Local files of images: a folder for each class, or a NumPy archive.

Folders are read as `torchvision.datasets.ImageFolder` reads them.
"""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from prunekit.data.datasets import check_labels, numbered_classes
from prunekit.data.roots import EXTENSIONS
from prunekit.errors import DataError, cut_short, nearest
from prunekit.reading.array_files import read_arrays
from prunekit.reading.text_files import shown

TWO_PARTS = ("x_train", "y_train", "x_test", "y_test")
ARCHIVE = "a NumPy archive (.npz) without objects"
ONE_PART = ("images", "labels")
PARTS = ("train", "test", "val")
LabeledFiles = tuple[tuple[Path, int], ...]
Part = TypeVar("Part")


@dataclass(frozen=True)
class ClassParts(Generic[Part]):
    """The name of each class, and the labeled images; test and validation by themselves if the files have them so.

    Without labels there are no classes, and the label of an image is its number in its part, from 0.
    """

    classes: tuple[str, ...]
    rest: Part
    test: Part | None
    validation: Part | None = None


def scan_folder(root: Path) -> ClassParts[LabeledFiles]:
    """Find the images of `root/train/<class>/` and `root/test/<class>/`, or of `root/<class>/`.

    `root/val/` may replace `root/test/`, as for ImageNet. Classes are the folders' names in alphabetical order; files
    are at any depth below them, in ImageFolder's order. Unlike there, hidden folders are not classes.
    """
    if not root.is_dir():
        raise DataError(f"{root}: expected a folder, but this is a file; a NumPy archive is read with data.source=npz")
    tests = [root / name for name in ("test", "val") if (root / name).is_dir()]
    train = (root / "train").is_dir()
    if not train and not tests:
        classes = _classes(root, ", or train/ with test/ or val/")
        return ClassParts(classes, _files(root, classes), None)
    if not train or len(tests) != 1:
        found = ", ".join(f"{part.name}/" for part in [*([root / "train"] if train else []), *tests])
        raise DataError(f"{root}: expected train/ with test/ or val/, or class folders alone, found {found}")
    classes = _classes(root / "train")
    for name in _classes(tests[0]):
        if name not in classes:
            raise DataError(f"{tests[0] / name}: no such class in {root / 'train'}; {nearest(name, classes)}")
    return ClassParts(classes, _files(root / "train", classes), _files(tests[0], classes))


def scan_unlabeled(root: Path) -> ClassParts[LabeledFiles]:
    """Find all images below a folder, or those of its `train/` and `test/` or `val/` or both; the label is a number."""
    named = {name: root / name for name in PARTS if (root / name).is_dir()}
    parts = named if "train" in named and len(named) > 1 else {"train": root}
    made = {name: tuple((file, at) for at, file in enumerate(image_files(part))) for name, part in parts.items()}
    return ClassParts((), made["train"], made.get("test", made.get("val")), made.get("val") if "test" in made else None)


def has_classes(root: Path) -> bool:
    """Return whether a folder, or a part such as its `train/`, has two or more folders, which may be classes."""
    return len(_folders(next((root / name for name in PARTS if (root / name).is_dir()), root))) > 1


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _classes(folder: Path, instead: str = "") -> tuple[str, ...]:
    found = _folders(folder)
    top = folder.resolve()
    entries = [entry for entry in found if not top.is_relative_to(entry.resolve())]  # a link to where it is is no class
    places: set[Path] = set()
    for entry in entries:
        place = entry.resolve()
        if (entry.is_symlink() and place.is_relative_to(top)) or place in places:
            raise DataError(
                f"{entry}: expected a folder of its own for each class, got a link to {place}, whose images "
                "are of another class too; remove the link"
            )
        places.add(place)
    names = tuple(entry.name for entry in entries)
    if len(names) < 2:
        expected = f"one folder of images for each of two or more classes{instead}"
        alone = any(path.suffix.lower() in EXTENSIONS for path in folder.iterdir())
        found_too = " and images at the top" if alone else ""
        advice = "if the images have no labels: data.labels=false"
        raise DataError(f"{folder}: expected {expected}, found {list(names)}{found_too}; {advice}")
    return names


def _files(folder: Path, classes: tuple[str, ...]) -> LabeledFiles:
    return tuple((path, label) for label, name in enumerate(classes) for path in image_files(folder / name, folder))


def image_files(folder: Path, root: Path | None = None) -> list[Path]:
    """Return the image files at any depth below a folder, in the order of torchvision's ImageFolder.

    Links to folders are followed, as there, but each folder is visited once. A link is not followed to a folder around
    itself, nor to one inside or around `root`: the files there are found in their own place.
    """
    top, seen, walk = (root or folder).resolve(), {folder.resolve()}, list[tuple[str, list[str]]]()
    for place, inner, names in os.walk(folder, followlinks=True):
        walk.append((place, sorted(names)))
        here, followed = Path(place).resolve(), []
        for name in inner:
            path, real = Path(place, name), Path(place, name).resolve()
            around = here.is_relative_to(real) or top.is_relative_to(real) or real.is_relative_to(top)
            if not (path.is_symlink() and around) and real not in seen:
                followed.append(name)
                seen.add(real)
        inner[:] = followed
    paths = [Path(place, name) for place, names in sorted(walk) for name in names]
    paths = [path for path in paths if path.suffix.lower() in EXTENSIONS and path.is_file()]
    if not paths:
        raise DataError(f"{folder}: no images here; expected files that end in {', '.join(EXTENSIONS)}")
    return paths


@dataclass(frozen=True)
class LabeledArrays:
    """Pixels (N, C, H, W) uint8 with C 1 or 3, labels (N,) int64, and the name of the labels' array.

    Without labels, those of images are their numbers.
    """

    pixels: Tensor
    labels: Tensor
    name: str


def read_npz(path: Path, *, labeled: bool = True) -> ClassParts[LabeledArrays]:
    """Read the arrays `x_train, y_train, x_test, y_test`, or `images, labels`, and perhaps `classes` (names).

    Images are uint8, (N, H, W) or (N, H, W, C) with C 1 or 3; labels are integers, (N,), and `classes` the name of each
    from 0 on. Without `classes`, labels are numbered up to the largest training label. If they are not `labeled`, only
    the images are read.
    """
    arrays = read_arrays(path, ARCHIVE, DataError)
    if "" in arrays:
        raise DataError(f"{shown(path)}: expected {ARCHIVE}, but it is one array (.npy)")
    step = 1 if labeled else 2  # the names of images are followed by those of their labels
    two_parts, one_part = TWO_PARTS[::step], ONE_PART[::step]
    if all(name in arrays for name in two_parts):
        rest, test = (_pair(path, arrays, *names[: 3 - step]) for names in (TWO_PARTS[:2], TWO_PARTS[2:]))
    elif all(name in arrays for name in one_part):
        rest, test = _pair(path, arrays, *one_part), None
    else:
        images = any(name in arrays for name in (TWO_PARTS[0], ONE_PART[0]))
        raise DataError(
            f"{path}: expected arrays {', '.join(two_parts)}, or {', '.join(one_part)}; "
            f"found {cut_short(shown(', '.join(sorted(arrays)) or 'none'))}"
            f"{'; if the images have no labels: data.labels=false' if images and labeled else ''}"
        )
    if not labeled:
        return ClassParts((), rest, test)
    if "classes" in arrays:
        classes = _class_names(arrays["classes"], f"{path}: classes")
    else:
        classes = numbered_classes(rest.labels, f"{path}: {rest.name}")
    for part in (rest, test):
        if part is not None:
            check_labels(part.labels, classes, f"{path}: {part.name}")
    return ClassParts(classes, rest, test)


def _class_names(given: np.ndarray[Any, Any], where: str) -> tuple[str, ...]:
    """Return the names of the classes from an array of a file, which may be of any kind."""
    if given.ndim != 1 or len(given) < 2 or given.dtype.kind not in "USiu":
        raise DataError(
            f"{where}: expected the name of each class as text, shape (classes,) of two or more, got {given.dtype} "
            f"{given.shape}"
        )
    try:
        names = tuple(np.char.decode(given, "utf-8").tolist() if given.dtype.kind == "S" else map(str, given.tolist()))
    except (UnicodeError, ValueError) as error:
        raise DataError(f"{where}: expected names as text in UTF-8, but {error}") from error
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{where}: expected a name of its own for each class, got {cut_short(repr(twice))} twice")
    return names


def _pair(path: Path, arrays: dict[str, np.ndarray[Any, Any]], images: str, labels: str = "") -> LabeledArrays:
    x = arrays[images]
    y = arrays[labels] if labels else np.arange(len(x) if x.ndim else 0)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)):
        raise DataError(
            f"{path}: {images}: expected uint8 of shape (N, H, W) or (N, H, W, C) with C 1 or 3, "
            f"got {x.dtype} {x.shape}"
        )
    if not x.size:
        raise DataError(f"{path}: {images}: expected images, but the array is empty, shape {x.shape}")
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) != len(x):
        raise DataError(f"{path}: {labels}: expected {len(x)} integers, shape ({len(x)},), got {y.dtype} {y.shape}")
    if int(y.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{path}: {labels}: expected labels from 0, one for each class, got {int(y.max())}")
    pixels = torch.from_numpy(np.ascontiguousarray(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)))
    return LabeledArrays(pixels, torch.from_numpy(y.astype(np.int64)), labels)

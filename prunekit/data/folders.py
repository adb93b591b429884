"""One folder of images for each class, as `torchvision.datasets.ImageFolder` has it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prunekit.errors import DataError, nearest

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

Files = tuple[tuple[Path, int], ...]


@dataclass(frozen=True)
class Folder:
    """The files found, each with its label, and the test images where they have a folder of their own."""

    classes: tuple[str, ...]
    rest: Files
    test: Files | None


def scan_folder(root: Path) -> Folder:
    """Finds the images of `root/train/<class>/` and `root/test/<class>/`, or of `root/<class>/`.

    `root/val/` does for `root/test/`, as ImageNet has it. Classes are the folders' names in alphabetical order; files
    lie at any depth below them, and come in ImageFolder's order. Unlike there, hidden folders are no classes.

    Raises:
        DataError: no class folder, a class without images, both `test/` and `val/`, or a test class that is not
            trained.
    """
    if not root.is_dir():
        raise DataError(f"{root}: expected a folder, but this is a file; a NumPy archive is read with data.source=npz")
    tests = [root / name for name in ("test", "val") if (root / name).is_dir()]
    train = (root / "train").is_dir()
    if not train and not tests:
        classes = _classes(root, ", or train/ with test/ or val/")
        return Folder(classes, _files(root, classes), None)
    if not train or len(tests) != 1:
        found = ", ".join(f"{part.name}/" for part in [*([root / "train"] if train else []), *tests])
        raise DataError(f"{root}: expected train/ with test/ or val/, or class folders alone, found {found}")
    classes = _classes(root / "train")
    for name in _classes(tests[0]):
        if name not in classes:
            raise DataError(f"{tests[0] / name}: no such class in {root / 'train'}; {nearest(name, classes)}")
    return Folder(classes, _files(root / "train", classes), _files(tests[0], classes))


def _classes(folder: Path, instead: str = "") -> tuple[str, ...]:
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))
    if len(names) < 2:
        expected = f"one folder of images for each of two or more classes{instead}"
        raise DataError(f"{folder}: expected {expected}, found {list(names)}")
    return names


def _files(folder: Path, classes: tuple[str, ...]) -> Files:
    found = [(path, label) for label, name in enumerate(classes) for path in _images(folder / name)]
    return tuple(found)


def _images(folder: Path) -> list[Path]:
    walk = sorted(os.walk(folder, followlinks=True))  # as ImageFolder does, so that image i is the same one there
    paths = [Path(root, name) for root, _, names in walk for name in sorted(names)]
    paths = [path for path in paths if path.suffix.lower() in EXTENSIONS and path.is_file()]
    if not paths:
        raise DataError(f"{folder}: no images here; expected files that end in {', '.join(EXTENSIONS)}")
    return paths

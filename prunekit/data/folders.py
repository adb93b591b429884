"""One folder of images for each class, as `torchvision.datasets.ImageFolder` has it."""

from __future__ import annotations

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

    Classes are the folders' names in alphabetical order; files lie at any depth below them.

    Raises:
        DataError: no class folder, a class without images, an empty file, or a test class that is not trained.
    """
    if not root.is_dir():
        raise DataError(f"{root}: expected a folder, but this is a file; a NumPy archive is read with data.source=npz")
    parts = [(root / name).is_dir() for name in ("train", "test")]
    if not any(parts):
        classes = _classes(root)
        return Folder(classes, _files(root, classes), None)
    if not all(parts):
        missing = "test" if parts[0] else "train"
        raise DataError(f"{root}: expected train/ and test/, or class folders alone, but there is no {missing}/")
    classes = _classes(root / "train")
    for name in _classes(root / "test"):
        if name not in classes:
            raise DataError(f"{root / 'test' / name}: no such class in {root / 'train'}; {nearest(name, classes)}")
    return Folder(classes, _files(root / "train", classes), _files(root / "test", classes))


def _classes(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))
    if len(names) < 2:
        raise DataError(f"{folder}: expected one folder of images for each of two or more classes, found {list(names)}")
    return names


def _files(folder: Path, classes: tuple[str, ...]) -> Files:
    found = [(path, label) for label, name in enumerate(classes) for path in _images(folder / name)]
    return tuple(found)


def _images(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())
    if not paths:
        raise DataError(f"{folder}: no images here; expected files that end in {', '.join(EXTENSIONS)}")
    for path in paths:
        if not path.stat().st_size:
            raise DataError(f"{path}: expected an image, but the file is empty; remove or replace it")
    return paths

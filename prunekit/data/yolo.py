"""Data sets as ultralytics has them: a `data.yaml`, folders or lists of images, and a text file of labels for each."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from prunekit.data.annotated_images import ImageFiles, Objects, checked_boxes, require_boxes
from prunekit.data.coco import masks_of
from prunekit.data.datasets import CorruptImages
from prunekit.data.roots import EXTENSIONS, GET_YOLO
from prunekit.errors import DataError, cut_short
from prunekit.models.preprocessing import in_rgb
from prunekit.reading.text_files import read_text, shown
from prunekit.reading.yaml_files import read_yaml
from prunekit.utils.availability import package_folders

PARTS = {"train": "train", "validation": "val", "test": "test"}
"""Keys of the parts in a `data.yaml`."""
MOST_CLASSES = 100_000
MOST_POINTS = 10_000
MOST_SHARE = 1e6
"""Bound of the numbers of labels, which are classes and shares of an image's width and height."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class YoloDescription:
    """The facts in a `data.yaml`."""

    where: Path  # the file, or the folder if there is none
    classes: tuple[str, ...]  # name of each class; empty: the numbers that occur
    images: dict[str, tuple[Path, ...]]  # files of images of each part: `train`, `validation`, `test`
    # number of keypoints of an object, and of numbers of each, 2 or 3; None: there are none
    point_shape: tuple[int, int] | None = None
    flipped_points: tuple[int, ...] = ()  # see `AnnotatedImages`


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of one image, as shares of its width and height."""

    classes: Array  # (n,) int64
    boxes: Array  # (n, 4) float32, left, top, right, bottom
    polygons: tuple[Array | None, ...]  # of each object (P, 2) float32; None where the file has a box alone
    keypoints: Array | None = None  # (n, K, 3) float32; None: the file has none


@dataclass(frozen=True, eq=False)
class YoloImages(ImageFiles):
    """The images of one part."""

    classes: tuple[str, ...]  # name of each class
    paths: tuple[Path, ...]  # of each image
    labels: tuple[Labels, ...]  # of each image
    targets: tuple[str, ...]  # what is given besides boxes: `masks`, `keypoints`
    flipped_points: tuple[int, ...]  # see `AnnotatedImages`
    notes: tuple[str, ...]  # what was left out

    def read(self, index: int) -> tuple[Image.Image, Objects]:
        """Return an image and its objects."""
        with Image.open(self.paths[index]) as file:
            image = in_rgb(ImageOps.exif_transpose(file))
        known, size = self.labels[index], np.array(image.size, dtype=np.float32)
        outlines = [[] if polygon is None else [(polygon * size).ravel()] for polygon in known.polygons]
        points = known.keypoints
        if points is not None:
            points = np.concatenate([points[..., :2] * size, points[..., 2:]], -1)
        return image, Objects(
            torch.from_numpy(known.boxes * np.tile(size, 2)),
            torch.from_numpy(known.classes),
            torch.zeros(len(known.classes), dtype=torch.int64),
            masks_of(outlines, image.size) if "masks" in self.targets else None,
            torch.from_numpy(points) if points is not None and "keypoints" in self.targets else None,
        )


def describe_yolo(root: Path) -> YoloDescription:
    """Return the facts in the `data.yaml` of a data set; nothing that it names is downloaded or run.

    The root is the file; or a folder with it, or with `images/train` and `images/val` alone, whose classes are then
    those of ultralytics' own file for a folder of this name, if that package is installed.
    """
    file = root if root.is_file() else _file_in(root)
    if file is None:
        files = [folder / "cfg" / "datasets" / f"{root.name}.yaml" for folder in package_folders("ultralytics")]
        known = next((path for path in files if path.is_file()), None)
        content, base = (_parsed(known) if known else {}), root
        content = {key: f"images/{key}" for key in PARTS.values() if (root / "images" / key).is_dir()} | {
            key: content[key] for key in ("names", "kpt_shape", "flip_idx") if key in content
        }
    else:
        content = _parsed(file)
        base = _base(file, content)
    where = file or root
    images = {part: _images(base, content[key], where, key) for part, key in PARTS.items() if content.get(key)}
    if "train" not in images or len(images) < 2:
        found = ", ".join(PARTS[part] for part in images) or "neither"
        raise DataError(
            f"{where}: expected `train` and `val`, where the images of each are, as in ultralytics' data.yaml, or "
            f"folders images/train and images/val, found {found}; {GET_YOLO}"
        )
    shape, flipped = content.get("kpt_shape"), content.get("flip_idx") or []
    if shape is not None and not (
        _is_numbers(shape) and len(shape) == 2 and 0 < shape[0] <= MOST_POINTS and shape[1] in (2, 3)
    ):
        raise DataError(
            f"{shown(where)}: kpt_shape: expected [keypoints, 2 or 3], at most {MOST_POINTS:,} of them, got "
            f"{cut_short(ascii(shape))}"
        )
    if flipped and (not _is_numbers(flipped) or shape is None or sorted(flipped) != list(range(shape[0]))):
        raise DataError(
            f"{shown(where)}: flip_idx: expected the number of each keypoint once, got {cut_short(ascii(flipped))}"
        )
    points = None if shape is None else (int(shape[0]), int(shape[1]))
    return YoloDescription(where, _names(content, where), images, points, tuple(flipped))


def _is_numbers(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and all(type(value) is int and value >= 0 for value in given)


def _file_in(folder: Path) -> Path | None:
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder with images/ and labels/, or a data.yaml; {GET_YOLO}")
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
    named = [path for path in files if path.stem in ("data", "dataset", folder.name)]
    if len(named or files) > 1:
        found = ", ".join(path.name for path in named or files)
        raise DataError(f"{folder}: expected one file that describes the data, found {found}; give one as data.root")
    return next(iter(named or files), None)


def _parsed(path: Path) -> dict[str, Any]:
    content = read_yaml(path, "YAML as of ultralytics' data sets", DataError)
    if not isinstance(content, dict):
        raise DataError(f"{shown(path)}: expected a mapping with train, val and names, got {type(content).__name__}")
    return content


def _base(file: Path, content: Mapping[str, Any]) -> Path:
    """Return the folder that the paths of a `data.yaml` are in: its `path`, from its own folder or the one above."""
    given = content.get("path")
    if not isinstance(given, str) or not given:
        return file.parent
    places = [file.parent / given, file.parent.parent / given]
    return next((place for place in places if os.path.isdir(place)), file.parent)


def _names(content: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    names, count = content.get("names"), content.get("nc")
    if count is not None and not (type(count) is int and 0 < count <= MOST_CLASSES):
        raise DataError(
            f"{shown(where)}: nc: expected the number of classes, 1 to {MOST_CLASSES:,}, got {cut_short(ascii(count))}"
        )
    if names is None:
        return tuple(map(str, range(count or 0)))
    if isinstance(names, Mapping):
        if any(type(number) is not int for number in names) or names.keys() != set(range(len(names))):
            raise DataError(
                f"{shown(where)}: names: expected numbers 0 to {len(names) - 1}, got {cut_short(ascii([*names]))}"
            )
        names = [names[number] for number in range(len(names))]
    plain = isinstance(names, list) and all(isinstance(name, (str, int, float)) for name in names)
    if not plain or not names or (count is not None and count != len(names)):
        many = "" if count is None else f", {count} as `nc` says"
        raise DataError(f"{shown(where)}: names: expected the name of each class{many}, got {cut_short(ascii(names))}")
    return tuple(map(str, names))


def _images(base: Path, given: Any, where: Path, key: str) -> tuple[Path, ...]:
    """Return the image files of a part: of a folder, of a list of paths in a text file, or of several of these."""
    found: list[Path] = []
    for entry in given if isinstance(given, list) else [given]:
        path = _place(base, entry) if isinstance(entry, str) else None
        if path is None:
            raise DataError(
                f"{shown(where)}: {key}: expected a folder of images, or a text file with their paths, got "
                f"{cut_short(ascii(entry))}, which is not in {shown(base)}; {GET_YOLO}"
            )
        if path.is_dir():
            found += [file for file in sorted(path.rglob("*")) if file.suffix.lower() in EXTENSIONS]
        else:
            lines = read_text(path, "a list of images, a path on each line", DataError).splitlines()
            found += [path.parent / line.strip() for line in lines if line.strip()]
    nameless = next((path for path in found if path.suffix.lower() not in EXTENSIONS), None)
    if not found or nameless is not None:
        got = "none" if nameless is None else cut_short(ascii(nameless.name))
        raise DataError(
            f"{shown(where)}: {key}: expected images in {cut_short(ascii(given))}, files that end in "
            f"{', '.join(EXTENSIONS)}, found {got}"
        )
    return tuple(dict.fromkeys(found))


def _place(base: Path, entry: str) -> Path | None:
    # Exports of Roboflow write `../train/images` of a folder beside the file itself.
    places = [base / entry, *([base / entry.removeprefix("../")] if entry.startswith("../") else [])]
    return next((place for place in places if os.path.exists(place)), None)  # of names too long for a system too


def label_file(image: Path) -> Path:
    """Return the file of labels of an image: in `labels` in the place of the last `images` of its path, as `.txt`."""
    parts = list(image.parts)
    places = [index for index, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def read_yolo(description: YoloDescription, part: str, targets: Sequence[str], corrupt: CorruptImages) -> YoloImages:
    """Read the labels of a part; an image without a file of labels has no objects."""
    where = f"{description.where} {part}"
    if "keypoints" in targets and description.point_shape is None:
        raise DataError(f"{where}: data.targets asks for keypoints, and {description.where} has no kpt_shape")
    paths, labels = list[Path](), list[Labels]()
    for path in description.images[part]:
        file = label_file(path)
        try:
            found = _labels(file, description)
        except ValueError as error:
            corrupt.add(str(path), f"its labels, {file}, have another form: {error}")
            continue
        if "masks" in targets and any(polygon is None for polygon in found.polygons):
            raise DataError(
                f"{file}: data.targets asks for masks, and expected polygons, but an object has a box alone"
            )
        paths.append(path)
        labels.append(found)
    count = sum(len(one.classes) for one in labels)
    require_boxes(count, len(paths), where, f"expected labels such as {label_file(description.images[part][0])}")
    boxes = np.concatenate([one.boxes for one in labels])
    clipped, stays, notes = checked_boxes(boxes, np.ones((count, 2)), where)
    ends = np.cumsum([len(one.classes) for one in labels])[:-1]
    kept = [
        _some(one, box, stay)
        for one, box, stay in zip(labels, np.split(clipped, ends), np.split(stays, ends), strict=True)
    ]
    return YoloImages(
        description.classes, tuple(paths), tuple(kept), tuple(targets), description.flipped_points, tuple(notes)
    )


def _some(labels: Labels, boxes: Array, stays: Array) -> Labels:
    polygons = tuple(compress(labels.polygons, stays))
    points = None if labels.keypoints is None else labels.keypoints[stays]
    return Labels(labels.classes[stays], boxes[stays].astype(np.float32), polygons, points)


def _labels(file: Path, description: YoloDescription) -> Labels:
    """Read a file of labels: lines of a class and a box, a polygon, or a box and keypoints."""
    try:
        content = read_text(file, "labels, as ultralytics has them", DataError) if os.path.isfile(file) else ""
    except DataError as error:
        raise ValueError(str(error)) from error
    shape = description.point_shape
    classes, boxes, polygons, points = list[int](), list[list[float]](), list[Array | None](), list[Array]()
    for number, line in enumerate(content.splitlines(), 1):
        if not line.split():
            continue
        values = list[float]()  # none if one is something else, or far beyond any image
        with suppress(ValueError):
            values = [float(value) for value in line.split()]
        values = values if all(abs(value) <= MOST_SHARE for value in values) else []
        label, rest = (values or [-1.0])[0], np.array(values[1:], dtype=np.float32)
        numbers = 4 if shape is None else 4 + shape[0] * shape[1]
        is_polygon = shape is None and len(rest) >= 6 and len(rest) % 2 == 0
        is_class = 0 <= label < MOST_CLASSES and label == int(label)
        if not is_class or not (len(rest) == numbers or is_polygon):
            expected = (
                "a class and a box (x, y, width, height), or a polygon" if shape is None else f"{1 + numbers} numbers"
            )
            raise ValueError(f"line {number}: expected {expected}, got {line[:60]!r}")
        if description.classes and label >= len(description.classes):
            raise DataError(
                f"{file}: line {number}: there is no class {int(label)}; {description.where} names "
                f"{len(description.classes)}, 0 to {len(description.classes) - 1}"
            )
        classes.append(int(label))
        if is_polygon:
            corners = rest.reshape(-1, 2)
            boxes.append([*corners.min(0).tolist(), *corners.max(0).tolist()])
            polygons.append(corners)
            continue
        x, y, width, height = rest[:4].tolist()
        boxes.append([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
        polygons.append(None)
        if shape is not None:
            found = rest[4:].reshape(shape)
            seen = found[:, 2:] if shape[1] == 3 else 2.0 * (found != 0).any(1, keepdims=True)
            points.append(np.concatenate([found[:, :2], seen], 1))
    known = None if shape is None else np.array(points, dtype=np.float32).reshape(-1, shape[0], 3)
    return Labels(
        np.array(classes, dtype=np.int64), np.array(boxes, dtype=np.float32).reshape(-1, 4), tuple(polygons), known
    )

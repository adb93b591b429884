"""Data sets in the format of COCO (Lin et al. 2014): folders of images, and a JSON file of annotations for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from prunekit.data.detection.annotated_images import ImageFiles, Objects, checked_boxes, mirrored_points, require_boxes
from prunekit.data.sources import GET_COCO
from prunekit.errors import DataError, UsageError
from prunekit.models.preprocessing import in_rgb
from prunekit.utils.files import sha256

PARTS = {"train": ("train",), "validation": ("val", "valid"), "test": ("test",)}
"""Names of the parts of a data set in the names of files."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class CocoImages(ImageFiles):
    """The images of one annotation file.

    Attributes:
        classes: name of each class.
        paths: of each image, in the order of the file.
        sizes: (N, 2), width and height of each image, as the file says.
        starts: (N + 1,) int64, where the annotations of each image begin.
        boxes: (M, 4) float32, left, top, right and bottom in pixels, within the image.
        labels: (M,) int64, from 0.
        crowds: (M,) int64.
        outlines: of each annotation, polygons or run lengths; None: not read.
        keypoints: (M, K, 3) float32; None: not read.
        flipped_points: see `AnnotatedImages`.
        notes: what was left out of the file.
    """

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    sizes: Array
    starts: Array
    boxes: Array
    labels: Array
    crowds: Array
    outlines: tuple[Any, ...] | None
    keypoints: Array | None
    flipped_points: tuple[int, ...]
    notes: tuple[str, ...]

    def read(self, index: int) -> tuple[Image.Image, Objects]:
        """Return an image and its objects.

        Raises:
            ValueError: the image has another size than the annotations say.
        """
        with Image.open(self.paths[index]) as file:
            found = in_rgb(file)
            wanted = tuple(self.sizes[index].tolist())
            if found.size != wanted:  # some files are turned by their EXIF entry, as the annotations may be
                found = in_rgb(ImageOps.exif_transpose(file))
        if found.size != wanted:
            raise ValueError(f"its size is {found.size}, and {wanted} in the annotations")
        here = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return found, Objects(
            torch.from_numpy(self.boxes[here]),
            torch.from_numpy(self.labels[here]),
            torch.from_numpy(self.crowds[here]),
            None if self.outlines is None else masks_of(self.outlines[here], found.size),
            None if self.keypoints is None else torch.from_numpy(self.keypoints[here]),
        )


def masks_of(outlines: Sequence[Any], size: tuple[int, int]) -> Tensor:
    """Return the masks (n, H, W) uint8 of objects in an image of a size (width, height).

    Args:
        outlines: of each object polygons, lists of x and y in turn, or run lengths of COCO: `counts`, a list or text,
            and `size`, height and width.
        size: width and height of the image.

    Raises:
        UsageError: outlines are run lengths as text, and pycocotools, which reads them, is not installed.
    """
    width, height = size
    found = np.zeros((len(outlines), height, width), dtype=np.uint8)
    for mask, outline in zip(found, outlines, strict=True):
        if isinstance(outline, Mapping):
            mask[:] = _of_run_lengths(outline)
            continue
        drawing = Image.new("L", size)
        for polygon in outline:
            ImageDraw.Draw(drawing).polygon([float(value) for value in polygon], fill=1)
        mask[:] = np.asarray(drawing)
    return torch.from_numpy(found)


def _of_run_lengths(given: Mapping[str, Any]) -> Array:
    height, width = given["size"]
    counts = given["counts"]
    if isinstance(counts, list):  # the length of each run of zeros and ones in turn, column after column
        values = np.repeat(np.arange(len(counts)) % 2, counts).astype(np.uint8)
        found: Array = values.reshape(width, height).T
        return found
    try:
        decode = import_module("pycocotools.mask").decode
    except ModuleNotFoundError as error:
        raise UsageError(
            "masks as compressed run lengths need the package pycocotools: pip install prunekit[detection]"
        ) from error
    found = decode({"size": [height, width], "counts": counts})
    return found


@dataclass(frozen=True)
class AnnotationFile:
    """A file of annotations, and the folder of its images."""

    path: Path
    folder: Path

    @cached_property
    def content(self) -> bytes:
        """Bytes that identify the data: the hash of the file."""
        return sha256(self.path).encode()


def annotation_files(root: Path, suffix: str | None, keypoints: bool) -> dict[str, AnnotationFile]:
    """Return the annotation file of each part of a data set: `train`, and `validation` or `test` or both.

    Args:
        root: folder with `annotations/instances_train2017.json` and so on, and `train2017/` and so on, perhaps in
            `images/`; or with `train/_annotations.coco.json`, beside its images, and so on.
        suffix: what follows `train` in the names, such as `2017`; None: what is there.
        keypoints: whether files with keypoints are wanted, `person_keypoints_train2017.json`.

    Raises:
        DataError: there are no such files, or several for one part.
    """
    if not root.is_dir():
        raise DataError(f"{root}: expected the folder of a data set in the format of COCO; {GET_COCO}")
    found: dict[str, AnnotationFile] = {}
    for part, names in PARTS.items():
        places = [
            AnnotationFile(path, folder)
            for name in names
            for path, folder in _candidates(root, name, suffix, keypoints)
            if path.is_file()
        ]
        if len(places) > 1:
            raise DataError(
                f"{root}: expected one file of annotations for {part}, found "
                f"{', '.join(str(place.path.relative_to(root)) for place in places)}; say which with data.name, what "
                f"follows {names[0]!r} in the names of files"
            )
        if places:
            found[part] = places[0]
    if "train" not in found or len(found) < 2:
        kind = "person_keypoints" if keypoints else "instances"
        there = ", ".join(str(place.path.relative_to(root)) for place in found.values()) or "none of them"
        year = "2017" if suffix is None else suffix
        raise DataError(
            f"{root}: expected annotations/{kind}_train{year}.json and annotations/{kind}_val{year}.json, or "
            f"train/_annotations.coco.json and valid/_annotations.coco.json, found {there}; {GET_COCO}"
        )
    return found


def _candidates(root: Path, part: str, suffix: str | None, keypoints: bool) -> list[tuple[Path, Path]]:
    prefix = "person_keypoints_" if keypoints else "instances_"
    found = [(root / part / "_annotations.coco.json", root / part)]
    pattern = f"{prefix}{part}*.json" if suffix is None else f"{prefix}{part}{suffix}.json"
    for path in sorted((root / "annotations").glob(pattern)):
        if part == "val" and path.stem.startswith(f"{prefix}valid"):
            continue
        name = path.stem.removeprefix(prefix)
        folders = (root / name, root / "images" / name, root / "images", root)
        found.append((path, next((folder for folder in folders if folder.is_dir()), folders[0])))
    return found


def read_coco(file: AnnotationFile, targets: Sequence[str], category_ids: bool) -> CocoImages:
    """Read a file of annotations.

    Args:
        file: of annotations, with the folder of its images.
        targets: what is read besides boxes: `masks`, `keypoints`.
        category_ids: whether a class's number is that of its category, less one; else categories are numbered in the
            order of their ids.

    Raises:
        DataError: it has another form, no boxes, a category or image that it does not define, or no masks or keypoints
            where they are wanted.
    """
    where = str(file.path)
    content = _parsed(file.path)
    categories = sorted(content["categories"], key=lambda one: one["id"])
    numbers = {one["id"]: one["id"] - 1 if category_ids else i for i, one in enumerate(categories)}
    if category_ids and min(numbers.values(), default=0) < 0:
        raise DataError(f"{where}: expected ids of categories from 1 with data.category_ids, got {min(numbers)}")
    named = {numbers[one["id"]]: str(one.get("name", one["id"])) for one in categories}
    classes = tuple(named.get(number, "N/A") for number in range(max(named, default=-1) + 1))
    places = {one["id"]: index for index, one in enumerate(content["images"])}
    sizes = np.array([[one["width"], one["height"]] for one in content["images"]], dtype=np.int64).reshape(-1, 2)
    annotations = sorted(content["annotations"], key=lambda one: places.get(one["image_id"], -1))
    _require_known(annotations, places, numbers, where)
    require_boxes(len(annotations), len(places), where, "give the file of annotations with `bbox`")
    owners = np.array([places[one["image_id"]] for one in annotations], dtype=np.int64)
    given = np.array([one["bbox"] for one in annotations], dtype=np.float64)
    given[:, 2:] += given[:, :2]
    boxes, stays, notes = checked_boxes(given, sizes[owners], where)
    kept = [one for one, stay in zip(annotations, stays, strict=True) if stay]
    names = next((tuple(one["keypoints"]) for one in categories if one.get("keypoints")), ())
    return CocoImages(
        classes,
        tuple(_path(file.folder, one["file_name"], where) for one in content["images"]),
        sizes,
        np.searchsorted(owners[stays], np.arange(len(places) + 1)),
        boxes[stays].astype(np.float32),
        np.array([numbers[one["category_id"]] for one in kept], dtype=np.int64),
        np.array([int(one.get("iscrowd", 0)) for one in kept], dtype=np.int64),
        _outlines(kept, where) if "masks" in targets else None,
        _keypoints(kept, len(names), where) if "keypoints" in targets else None,
        mirrored_points(names),
        tuple(notes),
    )


def _parsed(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected annotations in JSON, but {error}") from error
    forms = {
        "images": ("id", "file_name", "width", "height"),
        "annotations": ("image_id", "category_id", "bbox"),
        "categories": ("id",),
    }
    if isinstance(content, dict) and "images" in content and content.get("annotations") is None:
        raise DataError(f"{path}: it has images, and no annotations, as COCO's test set; no mAP can be measured")
    for name, keys in forms.items():
        entries = content.get(name) if isinstance(content, dict) else None
        known = entries if isinstance(entries, list) else [None]
        wrong = next((number for number, one in enumerate(known) if not _has(one, keys)), None)
        if wrong is not None:
            at = f"entry {wrong} of {name}" if isinstance(entries, list) else name
            raise DataError(
                f"{path}: expected lists images (id, file_name, width, height), annotations (image_id, category_id, "
                f"bbox) and categories (id, name), as COCO has them; {at} is another thing"
            )
    found: dict[str, Any] = content
    return found


def _has(entry: Any, keys: Sequence[str]) -> bool:
    if not isinstance(entry, Mapping) or not all(key in entry for key in keys):
        return False
    box = entry.get("bbox", [0, 0, 0, 0])
    return isinstance(box, list) and len(box) == 4 and all(isinstance(value, (int, float)) for value in box)


def _path(folder: Path, name: str, where: str) -> Path:
    found = folder / name
    if not found.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{where}: expected names of files in {folder}, got {name!r}")
    return found


def _require_known(
    annotations: Sequence[Mapping[str, Any]], images: Mapping[Any, int], categories: Mapping[Any, int], where: str
) -> None:
    for key, known, what in (("image_id", images, "image"), ("category_id", categories, "category")):
        wrong = next((one for one in annotations if one[key] not in known), None)
        if wrong is not None:
            raise DataError(
                f"{where}: annotation {wrong.get('id', '?')}: there is no {what} {wrong[key]!r}; expected one of the "
                f"{len(known)} in its list"
            )


def _outlines(annotations: Sequence[Mapping[str, Any]], where: str) -> tuple[Any, ...]:
    found = tuple(one.get("segmentation") for one in annotations)
    lacking = next((one for one, outline in zip(annotations, found, strict=True) if not outline), None)
    if lacking is not None:
        raise DataError(
            f"{where}: expected a segmentation of each object, as data.targets asks for masks; annotation "
            f"{lacking.get('id', '?')} has none"
        )
    return found


def _keypoints(annotations: Sequence[Mapping[str, Any]], count: int, where: str) -> Array:
    """Return the keypoints (M, K, 3) float32; those of crowds are unknown."""
    found = np.zeros((len(annotations), count, 3), dtype=np.float32)
    for values, one in zip(found, annotations, strict=True):
        given = one.get("keypoints")
        if given is None and one.get("iscrowd"):
            continue
        if not isinstance(given, list) or not count or len(given) != 3 * count:
            raise DataError(
                f"{where}: expected keypoints of each object, three numbers for each of the {count} that its category "
                f"names, as data.targets asks for keypoints; annotation {one.get('id', '?')} has "
                f"{len(given) if isinstance(given, list) else 'none'}"
            )
        values[:] = np.asarray(given, dtype=np.float32).reshape(count, 3)
    return found

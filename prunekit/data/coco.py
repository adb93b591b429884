"""Data sets in the format of COCO (Lin et al. 2014): folders of images, and a JSON file of annotations for each."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from prunekit.data.annotated_images import ImageFiles, Objects, checked_boxes, mirrored_points, require_boxes
from prunekit.data.roots import GET_COCO
from prunekit.errors import DataError, cut_short
from prunekit.models.preprocessing import in_rgb
from prunekit.reading.text_files import read_json, shown

PARTS = {"train": ("train",), "validation": ("val", "valid"), "test": ("test",)}
"""Names of the parts of a data set in the names of files."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class CocoImages(ImageFiles):
    """The images of one annotation file."""

    classes: tuple[str, ...]  # name of each class
    paths: tuple[Path, ...]  # of each image, in the order of the file
    sizes: Array  # (N, 2), width and height of each image, as the file says
    starts: Array  # (N + 1,) int64, where the annotations of each image begin
    boxes: Array  # (M, 4) float32, left, top, right and bottom in pixels, within the image
    labels: Array  # (M,) int64, from 0
    crowds: Array  # (M,) int64
    outlines: tuple[Any, ...] | None  # of each annotation, polygons or run lengths; None: not read
    keypoints: Array | None  # (M, K, 3) float32; None: not read
    flipped_points: tuple[int, ...]  # see `AnnotatedImages`
    notes: tuple[str, ...]  # what was left out of the file

    def read(self, index: int) -> tuple[Image.Image, Objects]:
        """Return an image and its objects."""
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

    The outline of an object is polygons, lists of x and y in turn, or run lengths of COCO: `counts`, a list or text,
    and `size`, height and width.
    """
    width, height = size
    found = np.zeros((len(outlines), height, width), dtype=np.uint8)
    for mask, outline in zip(found, outlines, strict=True):
        if isinstance(outline, Mapping):
            counts = run_lengths(outline["counts"]) or []  # column after column
            values = np.repeat(np.arange(len(counts)) % 2, counts).astype(np.uint8)
            mask[:] = values.reshape(*reversed(outline["size"])).T
            continue
        drawing = Image.new("L", size)
        for polygon in outline:
            ImageDraw.Draw(drawing).polygon([float(value) for value in polygon], fill=1)
        mask[:] = np.asarray(drawing)
    return torch.from_numpy(found)


@dataclass(frozen=True)
class AnnotationFile:
    """A file of annotations, and the folder of its images."""

    path: Path
    folder: Path


def annotation_files(root: Path, suffix: str | None, keypoints: bool) -> dict[str, AnnotationFile]:
    """Return the annotation file of each part of a data set: `train`, and `validation` or `test` or both.

    The root has `annotations/instances_train2017.json` and so on, and `train2017/` and so on, perhaps in `images/`; or
    `train/_annotations.coco.json`, beside its images, and so on.
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

    With `category_ids` the number of a class is the id of its category, less one; else categories are numbered in the
    order of their ids.
    """
    where = str(file.path)
    images, annotations, categories = read_entries(file.path, category_ids=category_ids)
    numbers = {one["id"]: one["id"] - 1 if category_ids else i for i, one in enumerate(categories)}
    named = {numbers[one["id"]]: str(one.get("name", one["id"])) for one in categories}
    classes = tuple(named.get(number, "N/A") for number in range(max(named, default=-1) + 1))
    places = {one["id"]: index for index, one in enumerate(images)}
    sizes = np.array([[one["width"], one["height"]] for one in images], dtype=np.int64).reshape(-1, 2)
    annotations = sorted(annotations, key=lambda one: places.get(one["image_id"], -1))
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
        tuple(_path(file.folder, one["file_name"], where) for one in images),
        sizes,
        np.searchsorted(owners[stays], np.arange(len(places) + 1)),
        boxes[stays].astype(np.float32),
        np.array([numbers[one["category_id"]] for one in kept], dtype=np.int64),
        np.array([int(one.get("iscrowd", 0)) for one in kept], dtype=np.int64),
        _outlines(kept, sizes[owners[stays]].tolist(), where) if "masks" in targets else None,
        _keypoints(kept, len(names), where) if "keypoints" in targets else None,
        mirrored_points(names),
        tuple(notes),
    )


def _path(folder: Path, name: str, where: str) -> Path:
    found = folder / name
    if not found.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{where}: expected names of files in {folder}, got {_shown(name)}")
    return found


def _require_known(
    annotations: Sequence[Mapping[str, Any]], images: Mapping[Any, int], categories: Mapping[Any, int], where: str
) -> None:
    for key, known, what in (("image_id", images, "image"), ("category_id", categories, "category")):
        wrong = next((one for one in annotations if one[key] not in known), None)
        if wrong is not None:
            raise DataError(
                f"{where}: annotation {_id(wrong)}: there is no {what} {_shown(wrong[key])}; expected one "
                f"of the {len(known)} in its list"
            )


def _outlines(annotations: Sequence[Mapping[str, Any]], sizes: list[list[int]], where: str) -> tuple[Any, ...]:
    found = tuple(one.get("segmentation") for one in annotations)
    lacking = next((one for one, outline in zip(annotations, found, strict=True) if not outline), None)
    if lacking is not None:
        raise DataError(
            f"{where}: expected a segmentation of each object, as data.targets asks for masks; annotation "
            f"{_id(lacking)} has none"
        )
    for one, outline, (width, height) in zip(annotations, found, sizes, strict=True):
        if not is_outline(outline, width, height):
            raise DataError(
                f"{where}: annotation {_id(one)}: segmentation: expected polygons, lists of x and y in turn, or run "
                f"lengths of a mask of {width}x{height} pixels, got {_shown(outline)}"
            )
    return found


def _keypoints(annotations: Sequence[Mapping[str, Any]], count: int, where: str) -> Array:
    """Return the keypoints (M, K, 3) float32; those of crowds are unknown."""
    found = np.zeros((len(annotations), count, 3), dtype=np.float32)
    for values, one in zip(found, annotations, strict=True):
        given = one.get("keypoints")
        if given is None and one.get("iscrowd"):
            continue
        if not isinstance(given, list) or not count or len(given) != 3 * count or not all(map(is_number, given)):
            raise DataError(
                f"{where}: expected keypoints of each object, three numbers for each of the {count} that its category "
                f"names, as data.targets asks for keypoints; annotation {_id(one)} has "
                f"{len(given) if isinstance(given, list) else 'none'}"
            )
        values[:] = np.asarray(given, dtype=np.float32).reshape(count, 3)
    return found


EXPECTED = "annotations in JSON, as COCO has them"
MOST_BYTES = 2**32
MOST_PIXELS = 2**31
"""Bound of widths, heights and coordinates."""
MOST_CATEGORIES = 2**16
Entries = list[dict[str, Any]]


def read_entries(path: Path, *, category_ids: bool = False) -> tuple[Entries, Entries, Entries]:
    """Return the images, annotations and categories of a file, the categories by their ids."""
    content = read_json(path, EXPECTED, DataError, most=MOST_BYTES, finite=False)
    if isinstance(content, dict) and "images" in content and content.get("annotations") is None:
        raise DataError(f"{shown(path)}: it has images, and no annotations, as COCO's test set; no mAP can be measured")
    for name, (keys, _) in FORMS.items():
        entries = content.get(name) if isinstance(content, dict) else None
        known = entries if isinstance(entries, list) else [None]
        wrong = next((i for i, one in enumerate(known) if not isinstance(one, dict) or not one.keys() >= {*keys}), None)
        if wrong is not None:
            at = f"entry {wrong} of {name}" if isinstance(entries, list) else name
            raise DataError(
                f"{shown(path)}: expected lists images (id, file_name, width, height), annotations (image_id, "
                f"category_id, bbox) and categories (id, name), as COCO has them; {at} is another thing"
            )
    images, annotations, categories = (content[name] for name in FORMS)
    for name, (_, rules) in FORMS.items():
        for number, one in enumerate(content[name]):
            for key, (expected, holds) in rules.items():
                if key in one and not holds(one[key]):
                    at = f"{shown(path)}: {name}[{number}].{key}"
                    raise DataError(f"{at}: expected {expected}, got {_shown(one[key])}")
    for name in ("images", "categories"):
        seen: set[Any] = set()
        for number, one in enumerate(content[name]):
            if one["id"] in seen:
                at = f"{shown(path)}: {name}[{number}].id"
                raise DataError(f"{at}: expected an id of its own, got {_shown(one['id'])} again")
            seen.add(one["id"])
    kinds = {isinstance(one["id"], str) for one in categories}
    numbered = categories if category_ids else ()
    if len(kinds) > 1 or not all(type(one["id"]) is int and 0 < one["id"] <= MOST_CATEGORIES for one in numbered):
        wanted = f"from 1 to {MOST_CATEGORIES:,} with data.category_ids" if category_ids else "all numbers or all text"
        got = _shown([one["id"] for one in categories])
        raise DataError(f"{shown(path)}: expected ids of categories, {wanted}, got {got}")
    return images, annotations, sorted(categories, key=lambda one: one["id"])


def is_number(value: Any) -> bool:
    """Return whether a value is a number, finite and not beyond what images have."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_PIXELS


def is_outline(value: Any, width: int, height: int) -> bool:
    """Return whether a value is the outline of an object in an image: polygons, or run lengths that fill it."""
    if isinstance(value, dict):
        counts = run_lengths(value.get("counts"))
        return value.get("size") == [height, width] and counts is not None and sum(counts) == width * height
    return isinstance(value, list) and all(
        isinstance(polygon, list) and len(polygon) >= 4 and len(polygon) % 2 == 0 and all(map(is_number, polygon))
        for polygon in value
    )


def run_lengths(given: Any) -> list[int] | None:
    """Return the length of each run of zeros and ones in turn; None if they are not given, as a list or as text.

    As text each length is groups of five bits, the lowest first. A group is one sign, counted from "0", whose sixth bit
    says that another group follows. From the fourth length on the difference to the length before the last is given.
    """
    if isinstance(given, list):
        return given if all(type(one) is int and one >= 0 for one in given) else None
    if not isinstance(given, str):
        return None
    found: list[int] = []
    value = shift = 0
    for sign in given:
        bits = ord(sign) - ord("0")
        if not 0 <= bits < 64 or shift > 60:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        value -= (bits & 16) and 1 << shift
        value += found[-2] if len(found) > 2 else 0
        if value < 0:
            return None
        found.append(value)
        value = shift = 0
    return found if not shift else None


def _is_id(value: Any) -> bool:
    return (isinstance(value, (int, str)) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 1 and value == int(value)


def _is_box(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    return all(is_number(one) or (isinstance(one, float) and not math.isfinite(one)) for one in value)


Rule = tuple[str, Callable[[Any], object]]
"""The expectation of a value in words, and whether it is met."""
FORMS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Rule]]] = {
    "images": (
        ("id", "file_name", "width", "height"),
        {
            "id": ("a number or text", _is_id),
            "file_name": ("the name of a file", lambda value: isinstance(value, str) and value and "\0" not in value),
            "width": ("a whole number of pixels, from 1", _is_size),
            "height": ("a whole number of pixels, from 1", _is_size),
        },
    ),
    "annotations": (
        ("image_id", "category_id", "bbox"),
        {
            "image_id": ("the id of an image", _is_id),
            "category_id": ("the id of a category", _is_id),
            "bbox": ("[left, top, width, height] in pixels", _is_box),
            "iscrowd": ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1)),
        },
    ),
    "categories": (
        ("id",),
        {
            "id": ("a number or text", _is_id),
            "name": ("text", lambda value: isinstance(value, str) or _is_id(value)),
            "keypoints": (
                "a list of names",
                lambda value: value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
            ),
        },
    ),
}
"""Lists of a file: the keys that each of their entries has, and the rule of each value."""


def _shown(value: Any) -> str:
    return cut_short(ascii(value))


def _id(annotation: Mapping[str, Any]) -> str:
    return _shown(annotation.get("id", "?"))

"""Entries of a file of annotations in the format of COCO, each checked before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prunekit.errors import DataError, cut_short
from prunekit.reading.text_files import read_json, shown

EXPECTED = "annotations in JSON, as COCO has them"
MOST_BYTES = 2**32
MOST_PIXELS = 2**31
"""Bound of widths, heights and coordinates."""
MOST_CATEGORIES = 2**16
FORMS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id",),
}
"""Lists of a file, and the keys that each of their entries has."""
Entries = list[dict[str, Any]]


def read_entries(path: Path, *, category_ids: bool = False) -> tuple[Entries, Entries, Entries]:
    """Return the images, annotations and categories of a file, the categories by their ids."""
    content = read_json(path, EXPECTED, DataError, most=MOST_BYTES, finite=False)
    if isinstance(content, dict) and "images" in content and content.get("annotations") is None:
        raise DataError(f"{shown(path)}: it has images, and no annotations, as COCO's test set; no mAP can be measured")
    for name, keys in FORMS.items():
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
    check = _Check(shown(path))
    for number, one in enumerate(images):
        check.of(one, f"images[{number}]", IMAGE)
    for number, one in enumerate(annotations):
        check.of(one, f"annotations[{number}]", ANNOTATION)
    for number, one in enumerate(categories):
        check.of(one, f"categories[{number}]", CATEGORY)
    check.ids(images, "images")
    check.ids(categories, "categories")
    kinds = {isinstance(one["id"], str) for one in categories}
    numbered = categories if category_ids else ()
    if len(kinds) > 1 or not all(type(one["id"]) is int and 0 < one["id"] <= MOST_CATEGORIES for one in numbered):
        wanted = f"from 1 to {MOST_CATEGORIES:,} with data.category_ids" if category_ids else "all numbers or all text"
        got = _shown([one["id"] for one in categories])
        raise DataError(f"{check.where}: expected ids of categories, {wanted}, got {got}")
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

    In text each is in groups of five bits, beginning with the lowest, in signs from "0" on, of which the sixth bit says
    that another follows; from the fourth on it is the difference to the one before the last.
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
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(
            isinstance(one, (int, float)) and not isinstance(one, bool) and (not math.isfinite(one) or is_number(one))
            for one in value
        )
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


Rule = tuple[str, Callable[[Any], bool]]
"""The expectation of a value in words, and whether it is met."""
IMAGE: Mapping[str, Rule] = {
    "id": ("a number or text", _is_id),
    "file_name": ("the name of a file", _is_name),
    "width": ("a whole number of pixels, from 1", _is_size),
    "height": ("a whole number of pixels, from 1", _is_size),
}
ANNOTATION: Mapping[str, Rule] = {
    "image_id": ("the id of an image", _is_id),
    "category_id": ("the id of a category", _is_id),
    "bbox": ("[left, top, width, height] in pixels", _is_box),
    "iscrowd": ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1)),
}
CATEGORY: Mapping[str, Rule] = {
    "id": ("a number or text", _is_id),
    "name": ("text", lambda value: isinstance(value, str) or _is_id(value)),
    "keypoints": (
        "a list of names",
        lambda value: value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
    ),
}


class _Check:
    """Checks of the entries of a file.

    Args:
        where: the file, which begins messages.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def of(self, entry: Mapping[str, Any], at: str, rules: Mapping[str, Rule]) -> None:
        """Raise a `DataError` at the first value of an entry that is another thing than its rule says."""
        for key, (expected, holds) in rules.items():
            if key in entry and not holds(entry[key]):
                raise DataError(f"{self.where}: {at}.{key}: expected {expected}, got {_shown(entry[key])}")

    def ids(self, entries: Sequence[Mapping[str, Any]], name: str) -> None:
        """Raise a `DataError` if two entries have one id."""
        seen: set[Any] = set()
        for number, one in enumerate(entries):
            if one["id"] in seen:
                raise DataError(
                    f"{self.where}: {name}[{number}].id: expected an id of its own, got {_shown(one['id'])} again"
                )
            seen.add(one["id"])


def _shown(value: Any) -> str:
    return cut_short(ascii(value))

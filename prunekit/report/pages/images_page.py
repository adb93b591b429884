"""The page of feature maps, and pictures of filters and class maps as data of other pages."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prunekit.errors import ArtifactError
from prunekit.reading.text_files import read_json
from prunekit.report.rendering import write

FACTS = "features.json"
LARGEST = 1_000_000
"""Limit of bytes of feature maps in a page, which take a third more as text; other pictures are named by their file."""
LARGEST_MAPS = 650_000
"""Limit of bytes of class activation and saliency maps in a page."""
LARGEST_DETECTIONS = 2_500_000
"""Limit of bytes of images with boxes in a page."""


def write_features(folder: Path) -> Path:
    """Render `features.html` into a folder that `prunekit.jobs.pictures.write_features` has written."""
    return write(folder / "features.html", "features.html", features=features_data(folder))


def features_data(folder: Path) -> dict[str, Any] | None:
    """Return `features.json` of a folder, with the pictures as data; None if there is none."""
    facts = read_facts(folder / FACTS, {"layers"}, "`layers`")
    if facts is None:
        return None
    left, layers = LARGEST, []
    for layer in facts["layers"]:
        data = read_picture(folder / layer["picture"])
        left -= len(data)
        layers.append({**layer, "data": as_data(data) if left >= 0 else None})
    return {**facts, "folder": folder.name, "input": as_data(read_picture(folder / facts["input"])), "layers": layers}


def filters_data(folder: Path) -> dict[str, Any] | None:
    """Return `filters.json` of a folder, with the picture as data; None if there is none."""
    keys = {"layer", "models", "filters", "shape", "kept"}
    facts = read_facts(folder / "filters.json", keys, "layer, models and filters")
    return facts and {**facts, "data": as_data(read_picture(folder / "filters.png"))}


def detections_data(folder: Path) -> dict[str, Any] | None:
    """Return `detections.json` of a folder, with the pictures as data; None if there is none."""
    facts = read_facts(folder / "detections.json", {"images", "models"}, "images and models")
    if facts is None:
        return None
    left, images = LARGEST_DETECTIONS, []
    for image in facts["images"]:
        data = read_picture(folder / image["picture"])
        left -= len(data)
        file = f"{folder.name}/{image['picture']}"
        images.append({**image, "file": file, "data": as_data(data) if left >= 0 else None})
    return {**facts, "images": images}


def maps_data(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON files of a folder of maps, each with its picture as data, the newest first."""
    left = LARGEST_MAPS
    for path in sorted(folder.glob("*.json"), key=lambda file: (-file.stat().st_mtime_ns, file.name)):
        facts = read_facts(path, {"title", "image", "models"}, "title, image and models")
        picture = read_picture(path.with_suffix(".png"))
        left -= len(picture)
        name = path.with_suffix(".png").relative_to(folder.parent)
        yield {**(facts or {}), "file": str(name), "data": as_data(picture) if left >= 0 else None}


def read_facts(path: Path, keys: set[str], expected: str) -> dict[str, Any] | None:
    """Read a JSON object that has the keys; None if there is no such file."""
    if not path.is_file():
        return None
    facts = read_json(path)
    if not isinstance(facts, dict) or not keys <= facts.keys():
        raise ArtifactError(f"{path}: expected an object with {expected}; was it written by prunekit?")
    return facts


def read_picture(path: Path) -> bytes:
    """Return the bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error


def as_data(picture: bytes) -> str:
    """Return a PNG file as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}"

"""From pictures of feature maps and filters in a folder to one self-contained HTML page, or a section of one."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunekit.artifacts import read_json
from prunekit.errors import ArtifactError
from prunekit.report.templates import write

FACTS = "features.json"
LARGEST = 1_000_000
"""Bytes of pictures in a page, a third more as text, so that it stays under 3 MB; others are named with their files."""


def write_features_page(folder: Path) -> Path:
    """Renders `features.html` into a folder of pictures; see `prunekit.report.write_features`."""
    return write(folder / "features.html", "features.html", features=pictured(folder))


def pictured(folder: Path) -> dict[str, Any] | None:
    """What `features.json` in a folder says, with the pictures as data; None where there is none.

    Raises:
        ArtifactError: the file, or one of the pictures, is damaged or missing.
    """
    path = folder / FACTS
    if not path.is_file():
        return None
    facts = read_json(path)
    if not isinstance(facts, Mapping) or not isinstance(facts.get("layers"), list):
        raise ArtifactError(f"{path}: expected an object with `layers`; was it written by prunekit?")
    left, layers = LARGEST, []
    for layer in facts["layers"]:
        data = read_picture(folder / layer["picture"])
        left -= len(data)
        layers.append({**layer, "data": as_data(data) if left >= 0 else None})
    return {**facts, "folder": folder.name, "input": as_data(read_picture(folder / facts["input"])), "layers": layers}


def filters_of(folder: Path) -> dict[str, Any] | None:
    """What `filters.json` in a folder says, with the picture as data; None where there is none.

    Raises:
        ArtifactError: the file, or the picture, is damaged or missing.
    """
    path = folder / "filters.json"
    if not path.is_file():
        return None
    facts = read_json(path)
    if not isinstance(facts, Mapping) or not {"layer", "models", "filters", "shape", "kept"} <= facts.keys():
        raise ArtifactError(f"{path}: expected an object with layer, models and filters; was it written by prunekit?")
    return {**facts, "data": as_data(read_picture(folder / "filters.png"))}


def read_picture(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        ArtifactError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error


def as_data(picture: bytes) -> str:
    """A PNG file as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}"

"""Class activation and saliency maps of a run, as pictures of its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prunekit.artifacts import read_json
from prunekit.errors import ArtifactError
from prunekit.report.features import as_data, read_picture

LARGEST = 650_000
"""Bytes of pictures in a page; the others are named with their files."""


def mapped(folder: Path) -> list[dict[str, Any]]:
    """What the JSON files in a folder of maps say, each with its picture as data, the newest first.

    Raises:
        ArtifactError: a file, or one of the pictures, is damaged or missing.
    """
    return list(_mapped(folder))


def _mapped(folder: Path) -> Iterator[dict[str, Any]]:
    left = LARGEST
    for path in sorted(folder.glob("*.json"), key=lambda file: (-file.stat().st_mtime_ns, file.name)):
        facts = read_json(path)
        if not isinstance(facts, Mapping) or not {"title", "image", "models"} <= facts.keys():
            raise ArtifactError(f"{path}: expected an object with title, image and models; was it written by prunekit?")
        picture = read_picture(path.with_suffix(".png"))
        left -= len(picture)
        name = path.with_suffix(".png").relative_to(folder.parent)
        yield {**facts, "file": str(name), "data": as_data(picture) if left >= 0 else None}

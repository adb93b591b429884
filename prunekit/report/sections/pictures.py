"""Sections that show pictures in the folder of a run, and the pages that `prunekit visualize` makes of them."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prunekit.errors import ArtifactError
from prunekit.reading.text_files import read_json
from prunekit.report.rendering import write
from prunekit.report.run_data import Run
from prunekit.report.sections.section import register_section

LARGEST = 1_000_000
"""Limit of bytes of feature maps in a page, which take a third more as text; other pictures are named by their file."""
LARGEST_DETECTIONS = 2_500_000
"""Limit of bytes of images with boxes in a page."""


@register_section("detections", about="test images with boxes, dense beside pruned", order=95)
def detections(run: Run) -> dict[str, Any] | None:
    """Return the pictures of boxes in test images: as labeled, and as the models find them."""
    folder = run.folder / "detections"
    facts = read_facts(folder / "detections.json", {"images", "models"}, "images and models")
    if facts is None:
        return None
    return {"detections": {**facts, "images": list(_with_data(folder, facts["images"], LARGEST_DETECTIONS))}}


@register_section("features", about="pictures of feature maps", order=110)
def features(run: Run) -> dict[str, Any] | None:
    """Return the pictures of feature maps of an image."""
    found = features_data(run.folder / "features")
    return None if found is None else {"features": found}


@register_section("filters", about="the filters of the first layer", order=120)
def filters(run: Run) -> dict[str, Any] | None:
    """Return the picture of the first layer's filters."""
    folder, keys = run.folder / "filters", {"layer", "models", "filters", "shape", "kept"}
    facts = read_facts(folder / "filters.json", keys, "layer, models and filters")
    return facts and {"filters": {**facts, "data": as_data(read_picture(folder / "filters.png"))}}


def write_features(folder: Path) -> Path:
    """Render `features.html` into a folder that `prunekit.jobs.analyses.pictures.write_features` has written."""
    return write(folder / "features.html", "features.html", features=features_data(folder))


def features_data(folder: Path) -> dict[str, Any] | None:
    """Return `features.json` of a folder, with the pictures as data; None if there is none."""
    facts = read_facts(folder / "features.json", {"layers"}, "`layers`")
    if facts is None:
        return None
    layers, first = list(_with_data(folder, facts["layers"], LARGEST)), as_data(read_picture(folder / facts["input"]))
    return {**facts, "folder": folder.name, "input": first, "layers": layers}


def _with_data(folder: Path, rows: list[dict[str, Any]], most: int) -> Iterator[dict[str, Any]]:
    """Yield rows with their pictures as data, which is None for those beyond so many bytes."""
    for row in rows:
        picture = read_picture(folder / row["picture"])
        most -= len(picture)
        file = f"{folder.name}/{row['picture']}"
        yield {**row, "file": file, "data": as_data(picture) if most >= 0 else None}


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

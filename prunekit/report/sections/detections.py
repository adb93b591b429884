"""The section that shows test images with the boxes that each model finds in them."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prunekit.errors import ArtifactError
from prunekit.reading.text_files import read_json
from prunekit.report.run_data import Run
from prunekit.report.sections.section import register_section

LARGEST = 2_500_000
"""Limit of bytes of images in a page, which take a third more as text; others are named by their file."""


@register_section("detections", about="test images with boxes, dense beside pruned", order=95)
def detections(run: Run) -> dict[str, Any] | None:
    """Return the pictures of boxes in test images: as labeled, and as the models find them."""
    path = run.folder / "detections" / "detections.json"
    if not path.is_file():
        return None
    facts = read_json(path)
    if not isinstance(facts, dict) or not {"images", "models"} <= facts.keys():
        raise ArtifactError(f"{path}: expected an object with images and models; was it written by prunekit?")
    return {"detections": {**facts, "images": list(_with_data(path.parent, facts["images"]))}}


def _with_data(folder: Path, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows with their pictures as data URLs, which are None beyond `LARGEST` bytes."""
    left = LARGEST
    for row in rows:
        path = folder / Path(row["picture"]).name  # a stranger's file names none outside its folder
        try:
            picture = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror or error})") from error
        left -= len(picture)
        data = f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}" if left >= 0 else None
        yield {**row, "file": f"{folder.name}/{path.name}", "data": data}

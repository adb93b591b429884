"""Data sets of drawn shapes as files, in the formats of COCO and of ultralytics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prunekit.data.drawn_shapes import CLASSES, DrawnShapes

SIZE = (80, 60)
"""Width and height of the files: images are drawn square, and stretched."""


def write_coco(
    root: Path, images: int = 6, change: Callable[[dict[str, Any]], Any] = lambda content: None, first: int = 0
) -> Path:
    """Write train2017/ and val2017/ with annotations, whose categories are numbered 1, 3 and 7."""
    for part in ("train2017", "val2017"):
        content = coco_content(root / part, images, first)
        change(content)
        (root / "annotations").mkdir(exist_ok=True)
        for kind in ("instances", "person_keypoints"):
            (root / "annotations" / f"{kind}_{part}.json").write_text(json.dumps(content))
        first += images
    return root


def coco_content(folder: Path, images: int, first: int) -> dict[str, Any]:
    """Write images into a folder, and return their annotations."""
    folder.mkdir(parents=True)
    drawn = DrawnShapes(first + images, 60, ("masks", "keypoints"))
    known: dict[str, Any] = {"images": [], "annotations": []}
    known["categories"] = [
        {"id": number, "name": name, "keypoints": ["center", "left", "right"]}
        for number, name in zip((1, 3, 7), CLASSES, strict=True)
    ]
    wide = torch.tensor([SIZE[0] / 60, 1.0])
    for index in range(first, first + images):
        image, objects = drawn.read(index)
        name = f"{index:03}.png"
        image.resize(SIZE).save(folder / name)
        known["images"].append({"id": 500 + index, "file_name": name, "width": SIZE[0], "height": SIZE[1]})
        assert objects.keypoints is not None
        assert objects.masks is not None
        for box, label, points, mask in zip(
            objects.boxes * wide.repeat(2), objects.labels, objects.keypoints, objects.masks, strict=True
        ):
            x, y, right, bottom = box.tolist()
            placed = torch.cat([points[:, :2] * wide, points[:, 2:]], 1)
            stretched = np.asarray(mask.numpy())[:, (np.arange(SIZE[0]) * 60) // SIZE[0]]
            known["annotations"].append(
                {
                    "id": len(known["annotations"]) + 1,
                    "image_id": 500 + index,
                    "category_id": (1, 3, 7)[int(label)],
                    "bbox": [x, y, right - x, bottom - y],
                    "iscrowd": 0,
                    "segmentation": {"size": [SIZE[1], SIZE[0]], "counts": run_lengths(stretched)},
                    "keypoints": placed.flatten().tolist(),
                }
            )
    return known


def run_lengths(mask: np.ndarray[Any, Any]) -> list[int]:
    """Return the lengths of runs of zeros and ones in turn, column after column."""
    values = mask.T.ravel()
    edges = np.flatnonzero(np.diff(values)) + 1
    lengths = np.diff(np.concatenate([[0], edges, [len(values)]])).tolist()
    return [0, *lengths] if values[0] else lengths


def write_yolo(root: Path, images: int = 6, kind: str = "boxes", description: bool = True) -> Path:
    """Write images/ and labels/ of train and val, and a data.yaml; labels are boxes, polygons or points."""
    drawn = DrawnShapes(2 * images, 60, ("keypoints",))
    for number, part in enumerate(("train", "val")):
        for folder in ("images", "labels"):
            (root / folder / part).mkdir(parents=True)
        for index in range(number * images, (number + 1) * images):
            image, objects = drawn.read(index)
            image.resize(SIZE).save(root / "images" / part / f"{index:03}.png")
            if len(objects):  # a file of labels is left out where there are none
                text = "\n".join(_lines(objects, kind))
                (root / "labels" / part / f"{index:03}.txt").write_text(text + "\n")
    if description:
        points = "kpt_shape: [3, 3]\nflip_idx: [0, 2, 1]\n" if kind == "points" else ""
        names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
        (root / "data.yaml").write_text(f"path: .\ntrain: images/train\nval: images/val\n{points}names:\n{names}")
    return root


def _lines(objects: Any, kind: str) -> list[str]:
    lines = []
    for box, label, points in zip(objects.boxes / 60, objects.labels.tolist(), objects.keypoints, strict=True):
        left, top, right, bottom = box.tolist()
        if kind == "polygons":
            numbers = [left, top, right, top, right, bottom, left, bottom]
        else:
            numbers = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
        if kind == "points":
            scaled = torch.cat([points[:, :2] / 60, points[:, 2:]], 1)
            numbers += scaled.flatten().tolist()
        lines.append(" ".join([str(label), *(f"{value:.6f}" for value in numbers)]))
    return lines

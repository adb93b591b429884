"""Pictures of what a job's models detect in some test images, beside the boxes that these have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from prunekit.data.loader import batches
from prunekit.inspection.visualize.boxes import CONFIDENCE, boxes_side_by_side
from prunekit.inspection.visualize.image_files import write_png
from prunekit.jobs.run.job_inputs import Prepared
from prunekit.tasks.detection import DETECTION, Targets
from prunekit.utils.context import training_mode
from prunekit.utils.files import write_json
from prunekit.utils.inputs import call, inputs_as_example

FOLDER = "detections"
SHOWN = 6
"""The most images that are shown."""
LOOKED_AT = 24
"""Test images, evenly spread, of which the first with boxes are shown."""


def write_detections(prepared: Prepared, models: Mapping[str, nn.Module], run: Path) -> list[str]:
    """Draw the boxes of a few test images, and those that each model finds in them, a PNG file for each image."""
    splits = prepared.splits
    if splits.task is not DETECTION:
        return []
    spread = torch.linspace(0, len(splits.test) - 1, min(LOOKED_AT, len(splits.test))).long()
    images, targets = _read(prepared, spread)
    chosen = [i for i, target in enumerate(targets) if len(target["labels"])][:SHOWN]
    found = {name: _detected(model, images[chosen]) for name, model in models.items()} if chosen else {}
    rows = []
    for number, i in enumerate(chosen):
        sides = {"labeled": targets[i], **{name: each[number] for name, each in found.items()}}
        counts = {name: _count(side) for name, side in sides.items()}
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        heading = f"Test image {int(spread[i])}", f"boxes: {said}; of models those of at least {CONFIDENCE:.0%}"
        file = f"{number:02}.png"
        write_png(run / FOLDER / file, boxes_side_by_side(images[i], sides, splits.classes, heading))
        rows.append({"image": int(spread[i]), "picture": file, "boxes": counts})
    if rows:
        write_json(run / FOLDER / "detections.json", {"models": list(models), "images": rows})
    return [str(row["picture"]) for row in rows]


def _read(prepared: Prepared, indices: Tensor) -> tuple[Tensor, Targets]:
    parts = list(batches(prepared.splits.test, len(indices), shuffle_seed=None, indices=indices))
    return torch.cat([images for images, _ in parts]), [target for _, targets in parts for target in targets]


def _detected(model: nn.Module, images: Tensor) -> Targets:
    example = inputs_as_example(model, images)
    with training_mode(model, False), torch.inference_mode():
        found: Targets = DETECTION.scored(model, example, call(model, example))
    return found


def _count(found: Mapping[str, Tensor]) -> int:
    scores = found.get("scores")
    return len(found["labels"]) if scores is None else int((scores >= CONFIDENCE).sum())

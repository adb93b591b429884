"""Pictures of detections: one image with the boxes that it has, and those that each model finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageColor, ImageDraw, ImageFont
from torch import Tensor

from prunekit.inspection.visualize.image_files import Pixels
from prunekit.inspection.visualize.image_grids import page

CONFIDENCE = 0.25
"""Boxes of a lower score are not drawn, as by the commands of ultralytics."""
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colors of classes, in turn; the color-blind tell them apart (Okabe & Ito 2008)."""
SIDE = 320
"""Pixels of the longer side, about; smaller images are enlarged by a whole number."""
LINE, TEXT = 3, 15
"""Pixels: how wide lines are, and how high text is."""
Boxes = Mapping[str, Tensor]
"""`boxes` (n, 4) as left, top, right and bottom in pixels, `labels` (n,) from 0, and of detections `scores` (n,)."""


def with_boxes(image: Tensor, found: Boxes, classes: Sequence[str], least: float = CONFIDENCE) -> Pixels:
    """Return an image with its boxes, each with the name of its class and its score in percent."""
    factor = max(1, round(SIDE / max(image.shape[-2:])))
    pixels = (image.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8)
    shown = Image.fromarray(pixels.permute(1, 2, 0).numpy().repeat(factor, 0).repeat(factor, 1))
    rows = found["boxes"].detach().cpu().float() * factor
    rows[:, 0::2] = rows[:, 0::2].clamp(0, shown.width - 1)
    rows[:, 1::2] = rows[:, 1::2].clamp(0, shown.height - 1)
    scores = found["scores"].detach().cpu().tolist() if "scores" in found else [None] * len(rows)
    boxes = [
        (row, _name(label, score, classes), COLORS[label % len(COLORS)])
        for row, label, score in zip(rows.tolist(), found["labels"].tolist(), scores, strict=True)
        if score is None or score >= least
    ]
    pen = ImageDraw.Draw(shown)
    for row, _, color in boxes:
        pen.rectangle([round(value) for value in row], outline=color, width=LINE)
    for row, name, color in boxes:  # above all lines
        _write(pen, shown.size, row, name, color)
    return np.asarray(shown)


def _name(label: int, score: float | None, classes: Sequence[str]) -> str:
    name = classes[label] if 0 <= label < len(classes) else str(label)
    return name if score is None else f"{name} {100 * score:.0f}"


def _write(pen: ImageDraw.ImageDraw, size: tuple[int, int], box: Sequence[float], name: str, color: str) -> None:
    """Write the name of a box on its color: above its top edge, or below that where the picture ends."""
    font = ImageFont.load_default(TEXT)
    width, height = round(pen.textlength(name, font)) + 2 * LINE, round(1.25 * TEXT)
    left, top = max(0, min(round(box[0]), size[0] - width)), round(box[1])
    top = top - height if top >= height else max(0, min(top, size[1] - height))
    pen.rectangle((left, top, left + width - 1, top + height - 1), fill=color)
    light = sum(part * share for part, share in zip(ImageColor.getrgb(color), (0.3, 0.59, 0.11), strict=False)) > 140
    pen.text((left + LINE, top + height / 2), name, fill="black" if light else "white", font=font, anchor="lm")


def boxes_side_by_side(
    image: Tensor, sides: Mapping[str, Boxes], classes: Sequence[str], heading: tuple[str, str]
) -> Pixels:
    """Return the picture of an image, (H, W, 3): a panel for its true boxes, and one for those of each model."""
    return page([(name, with_boxes(image, found, classes)) for name, found in sides.items()], heading)

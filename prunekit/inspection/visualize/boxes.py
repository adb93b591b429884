"""Pictures of detections: one image with the boxes that it has, and those that each model finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.utils import draw_bounding_boxes

from prunekit.inspection.visualize.image_files import Pixels
from prunekit.inspection.visualize.image_grids import page

CONFIDENCE = 0.25
"""Boxes of a lower score are not drawn, as by the commands of ultralytics."""
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colors of classes, in turn; the color-blind tell them apart (Okabe & Ito 2008)."""
SIDE = 320
"""Pixels of the longer side, at least; smaller images are enlarged."""
Boxes = Mapping[str, Tensor]
"""`boxes` (n, 4) as left, top, right and bottom in pixels, `labels` (n,) from 0, and of detections `scores` (n,)."""


def with_boxes(image: Tensor, found: Boxes, classes: Sequence[str], least: float = CONFIDENCE) -> Pixels:
    """Return an image with its boxes, each with the name of its class and its score in percent.

    Args:
        image: (3, H, W) of values 0..1.
        found: the boxes.
        classes: name of each label; of others the number is shown.
        least: boxes of a lower score are left out.
    """
    factor = max(1, round(SIDE / max(image.shape[-2:])))
    pixels = (image.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = F.interpolate(pixels[None].float(), scale_factor=factor, mode="nearest")[0].to(torch.uint8)
    scores = found.get("scores")
    shown = torch.ones(len(found["labels"]), dtype=torch.bool) if scores is None else scores.detach().cpu() >= least
    boxes, labels = found["boxes"].detach().cpu().float()[shown] * factor, found["labels"].cpu()[shown].tolist()
    boxes[:, 0::2] = boxes[:, 0::2].clamp(0, pixels.shape[2] - 1)
    boxes[:, 1::2] = boxes[:, 1::2].clamp(0, pixels.shape[1] - 1)
    if len(boxes):
        names = [classes[label] if 0 <= label < len(classes) else str(label) for label in labels]
        if scores is not None:
            sure = scores.detach().cpu()[shown].tolist()
            names = [f"{name} {100 * score:.0f}" for name, score in zip(names, sure, strict=True)]
        colors = [COLORS[label % len(COLORS)] for label in labels]
        pixels = draw_bounding_boxes(pixels, boxes, names, colors, width=2)
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def boxes_side_by_side(
    image: Tensor, sides: Mapping[str, Boxes], classes: Sequence[str], heading: tuple[str, str]
) -> Pixels:
    """Return the picture of an image, (H, W, 3): a panel for its true boxes, and one for those of each model.

    Args:
        image: (3, H, W) of values 0..1.
        sides: the boxes by the names of the panels, in their order.
        classes: name of each label.
        heading: two lines above the panels.
    """
    return page([(name, with_boxes(image, found, classes)) for name, found in sides.items()], heading)

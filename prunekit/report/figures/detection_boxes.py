"""Images of detections: the boxes of a model beside those of another and the labeled ones, and PNG files of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont
from torch import Tensor

from prunekit.utils.files import StrPath, atomic_file

Pixels = NDArray[np.uint8]
"""(H, W, 3) red, green and blue."""
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
GAP, MARGIN, NARROWEST = 5, 14, 300
"""Pixels: before the name of a panel, around panels, and the least width of a picture."""
WHITE, INK, SOFT = (255, 255, 255), (31, 41, 55), (107, 114, 128)


def write_png(path: StrPath, pixels: Pixels) -> Path:
    """Write pixels (H, W, 3) as a PNG file, atomically."""
    path = Path(path)
    with atomic_file(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG", optimize=True)
    return path


def with_boxes(image: Tensor, found: Boxes, classes: Sequence[str]) -> Pixels:
    """Return an image with its boxes, each with the name of its class and its score in percent."""
    factor = max(1, round(SIDE / max(image.shape[-2:])))
    values = image.detach().cpu().float().clamp(0, 1).expand(3, -1, -1)
    pixels = (values * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    shown = Image.fromarray(pixels.repeat(factor, 0).repeat(factor, 1))
    rows = found["boxes"].detach().cpu().float() * factor
    rows[:, 0::2] = rows[:, 0::2].clamp(0, shown.width - 1)
    rows[:, 1::2] = rows[:, 1::2].clamp(0, shown.height - 1)
    scores = found["scores"].detach().cpu().tolist() if "scores" in found else [None] * len(rows)
    boxes = [
        (row, _name(label, score, classes), COLORS[label % len(COLORS)])
        for row, label, score in zip(rows.tolist(), found["labels"].tolist(), scores, strict=True)
        if score is None or score >= CONFIDENCE
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


def page(panels: Sequence[tuple[str, Pixels]], heading: tuple[str, str]) -> Pixels:
    """Return panels side by side under their names, and a heading of two parts, broken into lines where it is long."""
    sizes: list[Any] = [ImageFont.load_default(size) for size in (16, 12, 13)]
    width = max(sum(panel.shape[1] + MARGIN for _, panel in panels) + MARGIN, NARROWEST)
    lines = [(line, size) for part, size in zip(heading, sizes, strict=False) for line in _lines(part, size, width)]
    head = 6 + sum(_height(size) for _, size in lines)
    tall = head + 24 + max(panel.shape[0] for _, panel in panels) + MARGIN
    made = Image.new("RGB", (width, tall), WHITE)
    pen, left, top = ImageDraw.Draw(made), MARGIN, 6
    for line, size in lines:
        pen.text((MARGIN, top), line, fill=INK if size is sizes[0] else SOFT, font=size)
        top += _height(size)
    for name, panel in panels:
        pen.text((left + GAP, head + 4), name, fill=INK, font=sizes[2])
        made.paste(Image.fromarray(panel), (left, head + 24))
        left += panel.shape[1] + MARGIN
    return np.asarray(made)


def _height(font: Any) -> int:
    return round(1.35 * float(font.size))


def _lines(text: str, font: Any, width: int) -> list[str]:
    """Return text in lines that fit between the margins of a picture; a word that is wider has a line of its own."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width - 2 * MARGIN:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines

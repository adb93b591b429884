"""A data set of drawn shapes in ultralytics' format, for each of its tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

NAMES = ("square", "circle", "triangle")
POINTS = 4
"""Key points of each shape: the corners of its box."""


def draw_shapes(folder: Path, *, task: str = "detect", images: int = 16, side: int = 64, seed: int = 0) -> Path:
    """Write images with labels, half as many for validation, and return what `data=` takes."""
    generator = np.random.default_rng(seed)
    for split, count in (("train", images), ("val", max(images // 2, 1))):
        for index in range(count):
            if task == "classify":
                _classified(folder / split, index, side, generator)
            else:
                _labeled(folder, split, index, side, task, generator)
    if task == "classify":
        return folder
    points = f"kpt_shape: [{POINTS}, 2]\n" if task == "pose" else ""
    names = "".join(f"  {index}: {name}\n" for index, name in enumerate(NAMES))
    text = f"path: {folder}\ntrain: images/train\nval: images/val\n{points}names:\n{names}"
    (folder / "data.yaml").write_text(text, encoding="utf-8")
    return folder / "data.yaml"


def _labeled(folder: Path, split: str, index: int, side: int, task: str, generator: np.random.Generator) -> None:
    image, lines = _background(side, generator), []
    for _ in range(int(generator.integers(1, 4))):
        kind = int(generator.integers(len(NAMES)))
        outline = _shape(image, kind, generator)
        lines.append(" ".join([str(kind), *(f"{value / side:.5f}" for value in _label(outline, task))]))
    for name, write in (
        (f"images/{split}/{index:03d}.png", lambda path: image.save(path)),
        (f"labels/{split}/{index:03d}.txt", lambda path: path.write_text("\n".join(lines))),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name)


def _classified(folder: Path, index: int, side: int, generator: np.random.Generator) -> None:
    image, kind = _background(side, generator), index % len(NAMES)
    _shape(image, kind, generator)
    (folder / NAMES[kind]).mkdir(parents=True, exist_ok=True)
    image.save(folder / NAMES[kind] / f"{index:03d}.png")


def _background(side: int, generator: np.random.Generator) -> Image.Image:
    return Image.fromarray(generator.integers(0, 96, (side, side, 3), dtype=np.uint8))


def _shape(image: Image.Image, kind: int, generator: np.random.Generator) -> np.ndarray:
    """Draw a shape, and return its outline: (points, 2) pixels."""
    side = image.width
    radius = generator.uniform(0.15, 0.3) * side
    middle = generator.uniform(radius, side - radius, 2)
    turns = np.arange(24) / 24 if kind == 1 else np.arange(4 - kind // 2) / (4 - kind // 2) + 0.125
    outline = middle + radius * np.stack([np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)], 1)
    color = tuple(int(value) for value in generator.integers(128, 256, 3))
    ImageDraw.Draw(image).polygon([(float(x), float(y)) for x, y in outline], fill=color)
    return outline


def _label(outline: np.ndarray, task: str) -> list[float]:
    low, high = outline.min(0), outline.max(0)
    corners = [low[0], low[1], high[0], low[1], high[0], high[1], low[0], high[1]]
    box = [*(low + high) / 2, *(high - low)]
    labels = {"segment": outline.flatten().tolist(), "obb": corners, "pose": [*box, *corners]}
    return [float(value) for value in labels.get(task, box)]

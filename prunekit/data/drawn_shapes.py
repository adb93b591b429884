"""Drawn shapes with their boxes: circles, squares and triangles on noisy backgrounds, each image from its number alone.

They need no file, and a small detector learns them in minutes: for tests, benchmarks and first steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.ops import masks_to_boxes

from prunekit.data.annotated_images import Objects, mirrored_points

CLASSES = ("circle", "square", "triangle")
KEYPOINTS = ("center", "left", "right")
"""Keypoints of each shape: its center, and the middles of its leftmost and rightmost columns."""
MOST = 4
"""The most shapes in an image."""
SEED = 1998
EMPTY = 0.1
"""Share of the images without a shape."""
VISIBLE = 0.3
"""Share of a shape that must not be hidden behind others; else it is left out."""
LEAST = 12
"""The fewest pixels of a shape that can be seen."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class DrawnShapes:
    """Images of shapes, drawn whenever they are read; about one in ten is empty.

    Boxes, masks and keypoints are of what can be seen: a shape may hide a part of an earlier one.
    """

    count: int  # number of images
    size: int  # their height and width
    targets: tuple[str, ...] = ()  # what is given besides boxes: `masks`, `keypoints`

    @property
    def classes(self) -> tuple[str, ...]:
        """Name of each class."""
        return CLASSES

    @property
    def flipped_points(self) -> tuple[int, ...]:
        """Left and right are exchanged in a mirrored image."""
        return mirrored_points(KEYPOINTS)

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"shapes: image {index}"

    def read(self, index: int) -> tuple[Image.Image, Objects]:
        """Return an image and its objects, the same at each call."""
        generator = np.random.default_rng((SEED, index))
        pixels = _background(generator, self.size)
        labels, masks, centers, areas = list[int](), list[Array](), list[tuple[float, float]](), list[int]()
        for _ in range(0 if generator.random() < EMPTY else int(generator.integers(1, MOST + 1))):
            label, center, outside = _shape(generator, self.size)
            cover = np.clip(0.5 - outside, 0, 1)[..., None]  # of each pixel, smooth at the edge
            pixels = pixels * (1 - cover) + _color(generator, pixels, cover) * cover
            inside = outside <= 0
            masks = [mask & ~inside for mask in masks] + [inside]
            areas.append(int(inside.sum()))
            labels.append(label)
            centers.append(center)
        kept = [i for i, mask in enumerate(masks) if mask.sum() >= max(LEAST, VISIBLE * areas[i])]
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        return image, self._objects([labels[i] for i in kept], [masks[i] for i in kept], [centers[i] for i in kept])

    def _objects(self, labels: list[int], masks: list[Array], centers: list[tuple[float, float]]) -> Objects:
        points = [_points(mask, center) for mask, center in zip(masks, centers, strict=True)]
        stacked = torch.from_numpy(np.array(masks, np.uint8).reshape(-1, self.size, self.size))
        return Objects(
            masks_to_boxes(stacked) + torch.tensor([0.0, 0.0, 1.0, 1.0]),  # of the last row and column the far edge
            torch.tensor(labels, dtype=torch.int64),
            torch.zeros(len(labels), dtype=torch.int64),
            stacked if "masks" in self.targets else None,
            torch.tensor(points, dtype=torch.float32).reshape(-1, 3, 3) if "keypoints" in self.targets else None,
        )


def _background(generator: np.random.Generator, size: int) -> Array:
    """Return pixels (size, size, 3), 0..255: a gradient from one color to another, with noise."""
    start, end = generator.uniform(0, 255, (2, 3))
    angle = generator.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[:size, :size] / size - 0.5
    slope = (0.5 + 0.7 * (np.cos(angle) * columns + np.sin(angle) * rows))[..., None]
    noise = generator.normal(0, generator.uniform(4, 24), (size, size, 3))
    found: Array = start * (1 - slope) + end * slope + noise
    return found


def _shape(generator: np.random.Generator, size: int) -> tuple[int, tuple[float, float], Array]:
    """Return the class of a shape, its center (x, y), and how far each pixel is outside of it, (size, size)."""
    label, radius = int(generator.integers(len(CLASSES))), size * generator.uniform(0.08, 0.26)
    x, y = generator.uniform(0.6 * radius, size - 0.6 * radius, 2)
    angle = generator.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[:size, :size] + 0.5
    across = np.cos(angle) * (columns - x) + np.sin(angle) * (rows - y)
    along = np.cos(angle) * (rows - y) - np.sin(angle) * (columns - x)
    if CLASSES[label] == "circle":
        outside = np.hypot(across, along) - radius
    elif CLASSES[label] == "square":
        outside = np.maximum(np.abs(across), np.abs(along)) - radius * 0.8
    else:  # three half-planes, each at half of the radius from the center
        turns = 2 * np.pi * np.arange(3) / 3
        sides = np.cos(turns)[:, None, None] * across + np.sin(turns)[:, None, None] * along
        outside = sides.max(0) - radius * 0.55
    return label, (float(x), float(y)), outside


def _color(generator: np.random.Generator, pixels: Array, cover: Array) -> Array:
    """Return a color that differs from what it covers, with a little noise, (size, size, 3)."""
    around = (pixels * cover).sum((0, 1)) / max(float(cover.sum()), 1e-9)
    color = generator.uniform(0, 255, 3)
    if np.abs(color - around).max() < 80:
        color = np.where(around > 127, around - 110, around + 110)
    found: Array = color + generator.normal(0, 6, pixels.shape)
    return found


def _points(mask: Array, center: tuple[float, float]) -> list[list[float]]:
    """Return x, y and visibility of the keypoints of a shape from its center and the mask of its visible pixels."""
    columns = np.flatnonzero(mask.any(0))
    ends = [(column + 0.5, float(np.flatnonzero(mask[:, column]).mean()) + 0.5) for column in columns[[0, -1]]]
    size = len(mask)
    x, y = (min(max(value, 0.0), size - 0.01) for value in center)
    seen = 2.0 if mask[int(y), int(x)] else 1.0
    return [[x, y, seen], *([float(across), down, 2.0] for across, down in ends)]

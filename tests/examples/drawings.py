"""Drawn scenes with known classes, places and depths, which the examples of images learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

SIZE = 32
"""Height and width of a scene in pixels."""
CLASSES = ("ground", "disk", "square", "cross")


@dataclass(frozen=True, eq=False)
class Scene:
    """A reddish disk, a greenish square and a bluish cross, of which the nearer are larger and cover the others.

    Attributes:
        image: (3, SIZE, SIZE) float32, 0 to 1.
        mask: (SIZE, SIZE) int64, the class of each pixel, an index of `CLASSES`.
        depth: (1, SIZE, SIZE) float32, the distance of each pixel, 1 to 4.
        centers: (3, 2) float32, x and y of disk, square and cross in pixels.
    """

    image: Tensor
    mask: Tensor
    depth: Tensor
    centers: Tensor

    @property
    def normalized(self) -> Tensor:
        """The image with a mean of about 0 and a standard deviation of about 1 over scenes."""
        return (self.image - 0.24) / 0.16


def draw(seed: int) -> Scene:
    """Draw the scene of a seed."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    depth, mask = 4 - 2 * y / SIZE, np.zeros((SIZE, SIZE), np.int64)  # the ground: far above, near below
    image = random.uniform(0.1, 0.4, (3, 1, 1)) * (1 - 0.5 * y / SIZE)
    centers, distances = random.uniform(0.2, 0.8, (3, 2)) * SIZE, random.uniform(1, 2, 3)
    for kind in np.argsort(-distances):  # the nearest is drawn last
        dx, dy, radius = np.abs(x - centers[kind, 0]), np.abs(y - centers[kind, 1]), 0.2 * SIZE / distances[kind]
        cross = (np.minimum(dx, dy) < radius / 3) & (np.maximum(dx, dy) < radius)
        inside = (dx**2 + dy**2 < radius**2, np.maximum(dx, dy) < 0.8 * radius, cross)[kind]
        mask, depth = np.where(inside, kind + 1, mask), np.where(inside, distances[kind], depth)
        color = random.uniform(0.1, 0.6, (3, 1, 1)) + 0.4 * (np.arange(3) == kind)[:, None, None]
        image = np.where(inside, color, image)
    image = np.clip(image + random.normal(0, 0.02, image.shape), 0, 1)
    values = (image.astype("f4"), mask, depth.astype("f4")[None], centers.astype("f4"))
    pixels, classes, distance, places = map(torch.from_numpy, values)
    return Scene(pixels, classes, distance, places)


class Scenes(Dataset[tuple[Any, Any]]):
    """Drawn scenes, the same for the same seeds.

    Args:
        first: seed of the first one.
        count: number of scenes.
        sample: scene -> (input, target).
    """

    classes = CLASSES

    def __init__(self, first: int, count: int, sample: Callable[[Scene], tuple[Any, Any]]) -> None:
        self.samples = [sample(draw(seed)) for seed in range(first, first + count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.samples[index]


def scenes(sample: Callable[[Scene], tuple[Any, Any]], train: int = 256, test: int = 64) -> tuple[Scenes, Scenes]:
    """Return training and test scenes as (input, target)."""
    return Scenes(0, train, sample), Scenes(1_000_000, test, sample)

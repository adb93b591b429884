"""Small models and data for the training tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prunekit.data.datasets import ImageTransform, TensorImages
from prunekit.data.splits import Splits
from prunekit.training.callbacks.callback import Callback

CPU = torch.device("cpu")


def net(seed: int = 0) -> nn.Sequential:
    """Convolution, BatchNorm, dropout and a linear layer for 1x8x8 digits repeated to three channels."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


def images(count: int, seed: int) -> TensorImages:
    """Four classes, told apart by which quarter of the image is bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    pixels: Tensor = torch.randint(0, 120, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    for index, label in enumerate(labels.tolist()):
        row, column = divmod(label, 2)
        pixels[index, 0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 100
    half = (0.5, 0.5, 0.5)
    return TensorImages(pixels, labels, ImageTransform(8, half, half))


def splits(count: int = 66) -> Splits:
    """A training set that is no multiple of the batches used, and a small validation set."""
    return Splits(images(count, 0), images(20, 1), images(20, 2), ("a", "b", "c", "d"), (3, 8, 8), "f")


class Ends(Exception):
    """What `EndsAfter` raises."""


class EndsAfter(Callback):
    """Ends the run after a step, in every process."""

    def __init__(self, step: int) -> None:
        self.last = step

    def after_step(self, step: int, made: bool) -> None:
        if step == self.last:
            raise Ends

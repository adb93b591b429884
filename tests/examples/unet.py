"""Segmentation: a U-Net (Ronneberger et al. 2015) that gives each pixel a class; the task is built in."""

from __future__ import annotations

import torch
from drawings import CLASSES, Scenes, scenes
from torch import Tensor, nn

from prunekit.tasks.segmentation import SEGMENTATION
from prunekit.tasks.task import Task


class Block(nn.Sequential):
    """Two convolutions, each with a norm and a ReLU."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """A U-Net: each step up reads what the step down of its size returned.

    Args:
        classes: of a pixel.
        widths: channels at each size, the full one first.
    """

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        below, above = widths[1:], widths[:-1]
        self.down = nn.ModuleList(map(Block, (3, *widths[:-1]), widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in zip(below, above, strict=True))
        self.join = nn.ModuleList(Block(2 * width, width) for width in above)
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores (B, classes, H, W) of images (B, 3, H, W)."""
        skips = [self.down[0](images)]
        for block in list(self.down)[1:]:
            skips.append(block(self.pool(skips[-1])))
        values = skips.pop()
        for up, join in reversed(list(zip(self.up, self.join, strict=True))):
            values = join(torch.cat([skips.pop(), up(values)], 1))
        scores: Tensor = self.head(values)
        return scores


def model() -> UNet:
    """Return an untrained U-Net for the drawn scenes."""
    return UNet(len(CLASSES))


def data() -> tuple[Scenes, Scenes]:
    """Return training and test images (3, H, W) with the class of each pixel (H, W)."""
    return scenes(lambda scene: (scene.normalized, scene.mask))


def task() -> Task:
    """Return the built-in task: the cross entropy of pixels; mean IoU and pixel accuracy."""
    return SEGMENTATION

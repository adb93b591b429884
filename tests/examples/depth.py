"""Monocular depth: an encoder and a decoder with bilinear steps that return the distance of each pixel."""

from __future__ import annotations

import torch
from drawings import Scenes, scenes
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.tasks.task import Score, Task


class DepthNet(nn.Module):
    """Three steps down, and up again, to which what was seen on the way down is added.

    Args:
        widths: channels at half, a quarter and an eighth of the size.
    """

    def __init__(self, widths: tuple[int, int, int] = (16, 32, 64)) -> None:
        super().__init__()
        steps = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, 1, 1), nn.ReLU())
            for a, b in steps
        )
        self.up = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in steps[:0:-1])
        self.head = nn.Conv2d(widths[0], 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return depths (B, 1, H, W), above 0, of images (B, 3, H, W)."""
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(down(skips[-1] if skips else images))
        values = skips.pop()
        for up in self.up:
            skip = skips.pop()
            larger = F.interpolate(values, size=skip.shape[2:], mode="bilinear", align_corners=False)
            values = F.relu(up(larger) + skip)
        found = F.interpolate(self.head(values), size=images.shape[2:], mode="bilinear", align_corners=False)
        return found.clamp(-5, 5).exp()


def model() -> DepthNet:
    """Return an untrained net."""
    return DepthNet()


def data() -> tuple[Scenes, Scenes]:
    """Return training and test images (3, H, W) with the depth of each pixel (1, H, W)."""
    return scenes(lambda scene: (scene.normalized, scene.depth))


def loss(depth: Tensor, wanted: Tensor) -> Tensor:
    """Return the scale-invariant error of the logarithm, half of whose mean is left in (Eigen et al. 2014)."""
    gap = (depth.log() - wanted.log()).flatten(1)
    return (gap.square().mean(1) - 0.5 * gap.mean(1).square()).mean()


def counts(depth: Tensor, wanted: Tensor) -> Tensor:
    """Return the number of pixels whose depth is within a factor of 1.25, and of all, as float64."""
    near = torch.maximum(depth / wanted, wanted / depth) < 1.25
    return torch.stack([near.sum(), torch.tensor(near.numel(), device=near.device)]).double()


def task() -> Task:
    """Return the task: the scale-invariant error; the percentage of pixels within a factor of 1.25, `delta < 1.25`."""
    return Task(
        "depth",
        loss,
        counts,
        (Score("delta1", "δ < 1.25", lambda sums: 100 * float(sums[0] / sums[1])),),
        samples="images",
    )

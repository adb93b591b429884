"""Keypoints: a net that returns a heatmap for each joint, as SimpleBaselines do (Xiao et al. 2018)."""

from __future__ import annotations

import torch
from drawings import SIZE, Scenes, scenes
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.tasks.task import Score, Task

STRIDE, SIGMA = 2, 1.0
"""Pixels of the image for one of a heatmap, and the width of a joint there."""


class PoseNet(nn.Sequential):
    """Convolutions that halve the image, transposed ones that enlarge it again, and a heatmap for each joint.

    It returns (B, joints, H / STRIDE, W / STRIDE) for images (B, 3, H, W).
    """

    def __init__(self, joints: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        layers: list[nn.Module] = []
        for channels, width in zip((3, *widths), widths, strict=False):
            down = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
            layers += [down, nn.BatchNorm2d(width), nn.ReLU(),
                       nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]  # fmt: skip
        for channels, width in zip(widths[::-1], widths[-2::-1], strict=False):
            up = nn.ConvTranspose2d(channels, width, 4, stride=2, padding=1, bias=False)
            layers += [up, nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(widths[0], joints, 1))


def model() -> PoseNet:
    """Return an untrained net for the centers of the three things in a scene."""
    return PoseNet(3)


def data() -> tuple[Scenes, Scenes]:
    """Return training and test images (3, H, W) with x and y of each joint in pixels, (3, 2)."""
    return scenes(lambda scene: (scene.normalized, scene.centers))


def loss(heatmaps: Tensor, joints: Tensor) -> Tensor:
    """Return the cross entropy of places (B, joints, h, w), of which each joint (B, joints, 2) wants a Gaussian."""
    y, x = (torch.arange(size, device=joints.device) * STRIDE for size in heatmaps.shape[2:])
    dx, dy = x[None, None, None, :] - joints[..., 0, None, None], y[None, None, :, None] - joints[..., 1, None, None]
    wanted = torch.exp(-(dx**2 + dy**2) / (2 * (SIGMA * STRIDE) ** 2))
    shares = wanted.flatten(2) / wanted.sum((2, 3))[..., None]
    return F.cross_entropy(heatmaps.flatten(0, 1).flatten(1), shares.flatten(0, 1))


def counts(heatmaps: Tensor, joints: Tensor) -> Tensor:
    """Return the number of joints found within a tenth of the image, and of all."""
    places = heatmaps.flatten(2).argmax(2)
    found = STRIDE * torch.stack([places % heatmaps.shape[3], places // heatmaps.shape[3]], 2)
    near = (found - joints).norm(dim=2) < SIZE / 10
    return torch.stack([near.sum(), torch.tensor(near.numel(), device=near.device)])


def task() -> Task:
    """Return the task: the cross entropy of heatmaps; the percentage of correct keypoints (Yang & Ramanan 2013)."""
    return Task(
        "pose", loss, counts, (Score("pck", "PCK@0.1", lambda sums: 100 * float(sums[0] / sums[1])),), samples="images"
    )

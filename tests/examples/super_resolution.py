"""Super-resolution: a residual net with pixel shuffle (Shi et al. 2016; Lim et al. 2017) that doubles the size."""

from __future__ import annotations

import torch
from drawings import Scene, Scenes, scenes
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.tasks.task import Score, Task

FACTOR = 2
"""How many times larger the image becomes."""


class Residual(nn.Module):
    """Two convolutions around a ReLU, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))

    def forward(self, values: Tensor) -> Tensor:
        """Return values (B, width, H, W)."""
        return values + self.body(values)  # type: ignore[no-any-return]


class Enlarger(nn.Module):
    """Residual blocks at the small size, a pixel shuffle, and a correction of what plain interpolation gives."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.grow = nn.Sequential(nn.Conv2d(width, width * FACTOR**2, 3, padding=1), nn.PixelShuffle(FACTOR), nn.ReLU())
        self.tail = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return images (B, 3, FACTOR * H, FACTOR * W) of images (B, 3, H, W)."""
        plain = F.interpolate(images, scale_factor=float(FACTOR), mode="bilinear", align_corners=False)
        return plain + self.tail(self.grow(self.body(self.head(images))))  # type: ignore[no-any-return]


def model() -> Enlarger:
    """Return an untrained net."""
    return Enlarger()


def _small(scene: Scene) -> tuple[Tensor, Tensor]:
    return F.avg_pool2d(scene.image, FACTOR), scene.image


def data() -> tuple[Scenes, Scenes]:
    """Return training and test images (3, H / FACTOR, W / FACTOR) with the image at its full size."""
    return scenes(_small)


def counts(images: Tensor, wanted: Tensor) -> Tensor:
    """Return the sum over images of the peak signal-to-noise ratio in dB, and the number of images."""
    errors = (images.clamp(0, 1) - wanted).square().flatten(1).mean(1).clamp_min(1e-10)
    return torch.stack([-10 * errors.log10().sum(), errors.new_tensor(len(errors))])


def task() -> Task:
    """Return the task: the mean absolute error; the peak signal-to-noise ratio of pixels from 0 to 1, in dB."""
    psnr = Score("psnr", "PSNR", lambda sums: float(sums[0] / sums[1]), unit="dB")
    return Task("super_resolution", F.l1_loss, counts, (psnr,), samples="images")

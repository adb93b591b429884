"""Images of a batch mixed with each other, labels in the same shares: mixup and CutMix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torchvision.transforms import v2

from prunekit.data.augment import drawn_from

MIXING = 2
"""Tells what is drawn for a batch from what is drawn for the image of the same number."""


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019); where both are on, each batch draws one of them.

    Attributes:
        classes: how many there are; two at least.
        mixup: the share of an image is drawn from Beta(mixup, mixup); 0 is off, and one of the two is on.
        cutmix: the share of the area that stays is drawn from Beta(cutmix, cutmix); 0 is off.
    """

    classes: int
    mixup: float = 0.0
    cutmix: float = 0.0

    def __call__(self, images: Tensor, labels: Tensor, draw: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """A batch mixed with itself rolled by one.

        Args:
            images: (B, C, H, W) float.
            labels: (B,) int64.
            draw: seed, epoch and the batch's number in it; nothing else decides what is drawn.

        Returns:
            Images, and the share of every class in each: (B, classes) float32, rows sum to 1.
        """
        kinds: list[v2.Transform] = []
        if self.mixup:
            kinds.append(v2.MixUp(alpha=self.mixup, num_classes=self.classes))
        if self.cutmix:
            kinds.append(v2.CutMix(alpha=self.cutmix, num_classes=self.classes))
        with drawn_from(*draw, MIXING):
            mixed, shares = v2.RandomChoice(kinds)(images, labels)
        return mixed, shares

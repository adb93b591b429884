"""Augmentation of whole batches."""

from __future__ import annotations

import torch
from torch import Tensor


def random_shift(images: Tensor, share: float) -> Tensor:
    """Moves each image by a whole number of pixels, drawn evenly for height and width; edges are repeated.

    Args:
        images: (B, C, H, W).
        share: the largest shift as a share of the side, up and down, left and right; under one pixel nothing moves.
    """
    if not share:
        return images
    count, _, height, width = images.shape
    rows, columns = (_shifted(count, side, share).to(images.device) for side in (height, width))  # (B, H), (B, W)
    which = torch.arange(count, device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _shifted(count: int, side: int, share: float) -> Tensor:
    """Which row (or column) each position takes: (count, side)."""
    most = int(side * share)
    offsets = torch.randint(-most, most + 1, (count, 1))
    return (torch.arange(side) + offsets).clamp(0, side - 1)

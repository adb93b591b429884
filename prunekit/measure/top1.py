"""Top-1 accuracy with the number of images behind it and a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prunekit.context import training_mode
from prunekit.distributed.exchange import total
from prunekit.errors import DataError
from prunekit.models import logits

Z_95 = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy in percent, the counts it comes from, and its 95 % Wilson interval in percent."""

    top1: float
    correct: int
    n_test: int
    low: float
    high: float


def accuracy(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device, *, together: bool = False
) -> Accuracy:
    """Top-1 accuracy of a classifier, in eval mode and without gradients.

    Args:
        model: returns logits (B, classes); it is moved to `device`, and its train/eval mode is restored.
        batches: images (B, C, H, W) and labels (B,).
        device: where it runs.
        together: whether all processes of a group call this, each with its share of the batches: then their images
            count together, and no image may be in two shares.

    Raises:
        DataError: there are no images.
    """
    correct, count = torch.zeros((), dtype=torch.int64, device=device), 0
    model.to(device)
    with training_mode(model, False), torch.inference_mode():
        for images, labels in batches:
            predicted = logits(model(images.to(device))).argmax(1)  # (B,)
            correct += (predicted == labels.to(device)).sum()
            count += len(labels)
    hits, count = map(int, total(int(correct), count)) if together else (int(correct), count)
    if not count:
        raise DataError("accuracy: expected at least one image, got none")
    low, high = wilson_interval(hits, count)
    return Accuracy(100 * hits / count, hits, count, low, high)


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion, in percent (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    share, z2 = correct / count, Z_95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    # Rounding must not push the ends that are exact, 0 of n and n of n, out of 0..100.
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)

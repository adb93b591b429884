"""The class scores that maps and gradients are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prunekit.errors import ModelError, UsageError
from prunekit.models import logits

Target = int | Sequence[int] | Tensor | None
"""A class, or one for each image; None: that of the highest score."""


def class_scores(output: Any) -> Tensor:
    """The logits (B, classes) of what a model returned.

    Raises:
        ModelError: there are none.
    """
    scores = logits(output)
    if scores.ndim != 2:
        raise ModelError(
            f"expected a classifier, which returns logits (B, classes), got {tuple(scores.shape)}; wrap the model so "
            "that it returns the scores to look at, one column for each"
        )
    return scores


def chosen(scores: Tensor, target: Target) -> Tensor:
    """The class of each image, (B,) int64, on the device of the scores (B, classes).

    Raises:
        UsageError: there is no such class, or there are not as many as images.
    """
    if target is None:
        return scores.detach().argmax(1)
    images, classes = scores.shape
    found = torch.as_tensor(target, dtype=torch.int64, device=scores.device)
    found = found.expand(images) if found.ndim == 0 else found
    if found.shape != (images,):
        raise UsageError(f"target: expected a class, or one for each of {images} images, got {found.numel()}")
    wrong = found[(found < 0) | (found >= classes)]
    if len(wrong):
        raise UsageError(f"class {int(wrong[0])}: the model has {classes} classes, 0 to {classes - 1}")
    return found

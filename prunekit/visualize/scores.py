"""The class scores that maps and gradients are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunekit.errors import ModelError, UsageError
from prunekit.models import logits

ClassIndex = int | Sequence[int] | Tensor | None
"""A class, or one for each image; None: that of the highest score."""


@dataclass(frozen=True, eq=False)
class ClassMap:
    """Where in each image a model sees a class, on the CPU.

    Attributes:
        method: how it was found.
        layer: whose activations it is made of; None: it is of the pixels.
        values: (B, h, w), float32 or float64; not negative, but for `cam`.
        classes: (B,) int64, the class of each map.
        probabilities: (B,), the softmax of these classes.
        predicted: (B,) int64, the class of the highest score.
    """

    method: str
    layer: str | None
    values: Tensor
    classes: Tensor
    probabilities: Tensor
    predicted: Tensor


def class_map(method: str, layer: str | None, values: Tensor, scores: Tensor, classes: Tensor) -> ClassMap:
    """A map with what the scores (B, classes) say of its classes (B,)."""
    scores = scores.detach()
    probabilities = scores.softmax(1).gather(1, classes[:, None])[:, 0]
    return ClassMap(method, layer, values.cpu(), classes.cpu(), probabilities.cpu(), scores.argmax(1).cpu())


def require_images(images: Tensor) -> None:
    """Checks that there is a batch of images.

    Raises:
        UsageError: there is none.
    """
    if images.ndim != 4 or not len(images):
        raise UsageError(f"images: expected one or more, (B, C, H, W), got a tensor of shape {tuple(images.shape)}")


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


def chosen(scores: Tensor, target: ClassIndex) -> Tensor:
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

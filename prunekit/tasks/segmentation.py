"""Semantic segmentation, a class for each pixel: the loss, the counts and the scores."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prunekit.errors import DataError, ModelError
from prunekit.models.interface import logits
from prunekit.tasks.task import Score, Task, register_task, with_smoothing
from prunekit.utils.tensors import occurrences

IGNORED = 255
"""The class of pixels that do not count, as in PASCAL VOC and torchvision's references."""
AUXILIARY = 0.5
"""Weight of the auxiliary head's loss, as in torchvision's reference."""


def scores_of(output: Any) -> Tensor:
    """Return the class scores (B, classes, H, W) of an output: torchvision's `output["out"]`, or as of classifiers."""
    found = output["out"] if isinstance(output, Mapping) and "out" in output else logits(output)
    if found.ndim != 4:
        raise ModelError(f"expected class scores (B, classes, H, W) for segmentation, got shape {tuple(found.shape)}")
    return found


def cross_entropy(output: Any, masks: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy over pixels whose class is not 255, and half of that of the head `aux`, if any.

    A batch without such pixels has a loss of 0. Masks (B, H, W) int64 are the class of each pixel.
    """
    loss = _mean(scores_of(output), masks, label_smoothing)
    head = output.get("aux") if isinstance(output, Mapping) else None
    return loss if head is None else loss + AUXILIARY * _mean(head, masks, label_smoothing)


def _mean(scores: Tensor, masks: Tensor, label_smoothing: float) -> Tensor:
    try:
        total = F.cross_entropy(scores, masks, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum")
        return total / (masks != IGNORED).sum().clamp_min(1)
    except IndexError as error:
        largest, classes = int(masks[masks != IGNORED].max()), scores.shape[1]
        raise DataError(
            f"masks: expected classes 0..{classes - 1}, as many as the model has, and {IGNORED}; the largest is "
            f"{largest}: {error}"
        ) from error


def pixels(output: Any, masks: Tensor) -> Tensor:
    """Return the pixels of each class that are predicted right, predicted, and there, (3 x classes,) int64."""
    scores = scores_of(output)
    classes = scores.shape[1]
    predicted = scores.argmax(1).where(masks != IGNORED, classes)  # which is no class, and is not counted
    right = predicted.where(predicted == masks, classes)
    wanted = masks.where(masks != IGNORED, classes)
    return torch.cat([occurrences(kind, classes) for kind in (right, predicted, wanted)])


def mean_iou(counts: Tensor) -> float:
    """Return the mean over classes of intersection over union in percent, without classes that never occur.

    The Jaccard index as PASCAL VOC measures segmentation (Everingham et al. 2015), over all pixels of all images.
    """
    right, predicted, wanted = counts.reshape(3, -1)
    union = predicted + wanted - right
    return 100 * float((right / union)[union > 0].mean()) if bool(union.any()) else 0.0


def pixel_accuracy(counts: Tensor) -> float:
    """Return the percent of the pixels whose class is right."""
    right, _, wanted = counts.reshape(3, -1)
    return 100 * float(right.sum() / wanted.sum().clamp_min(1))


def only_most_frequent(counts: Tensor) -> float:
    """Return the mean IoU in percent if every pixel is given the most frequent class, of the sums of `pixels`."""
    wanted = counts.reshape(3, -1)[2]
    classes = int((wanted > 0).sum())  # the others are never predicted
    return 100 * float(wanted.max() / wanted.sum()) / classes if classes else 0.0


def _rows(output: Any) -> Tensor:
    return scores_of(output).movedim(1, -1).flatten(0, -2)  # (B H W, classes)


def images(batch: Any) -> tuple[Tensor, Tensor]:
    """Return images (B, C, H, W) floating point, and the class of each pixel, (B, H, W) int64.

    The masks of a batch may be of any type of whole numbers, and (B, 1, H, W).
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        found, masks = batch
        masks = masks[:, 0] if masks.ndim == 4 and masks.shape[1] == 1 else masks
        whole = not masks.is_floating_point() and masks.dtype != torch.bool
        if found.ndim == 4 and found.is_floating_point() and masks.ndim == 3 and whole:
            return found, masks.long()
    raise DataError("expected images (B, C, H, W) floating point with masks (B, H, W) of whole numbers")


SEGMENTATION = register_task(
    "segmentation", data="images with the class of each pixel", measures="cross entropy; mean IoU, pixel accuracy"
)(
    Task(
        "segmentation",
        cross_entropy,
        pixels,
        (
            Score("mean_iou", "mean IoU", mean_iou, chance=only_most_frequent),
            Score("pixel_accuracy", "pixel accuracy", pixel_accuracy),
        ),
        images,
        logits=_rows,
        smoothed=partial(with_smoothing, cross_entropy),
        ignored=IGNORED,
        samples="images",
    )
)
"""Images with masks (B, H, W), where 255 does not count; the cross entropy of pixels; mean IoU, pixel accuracy."""

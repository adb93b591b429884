"""Classification of images and of texts: the loss, the counts and the scores."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.errors import DataError, UsageError
from prunekit.models.interface import auxiliary, logits
from prunekit.tasks.task import Score, Task, register_task, with_smoothing
from prunekit.tasks.texts import EXTRAS, LABELS, PaddedTexts
from prunekit.utils.tensors import accumulation_dtype, occurrences

Z_95 = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution


def cross_entropy(output: Any, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy of class scores (B, classes), with that of auxiliary heads, if there are any.

    Labels are (B,) int64, or shares (B, classes) of mixed images.
    """
    loss = F.cross_entropy(logits(output), labels, label_smoothing=label_smoothing)
    for weight, head in auxiliary(output):
        loss = loss + weight * F.cross_entropy(head, labels, label_smoothing=label_smoothing)
    return loss


def hits(output: Any, labels: Tensor) -> Tensor:
    """Return the number of right answers, of samples, and of samples of each class, (2 + classes,).

    A mixed image counts as right by the share of the predicted class.
    """
    scores = logits(output)
    predicted, classes = scores.argmax(1), scores.shape[1]  # (B,)
    if labels.ndim == 1:
        right = (predicted == labels).sum()
        frequency = occurrences(labels, classes)
    else:
        wide = labels.to(accumulation_dtype(labels.device))  # sums of shares don't depend on their order
        right, frequency = wide.gather(1, predicted[:, None]).sum(), wide.sum(0)
    return torch.cat([torch.stack([right, torch.full_like(right, len(labels))]), frequency])


def top1(counts: Tensor) -> float:
    """Return the percent of right answers, of the sums of `hits`."""
    return 100 * float(counts[0]) / float(counts[1])


def most_frequent(counts: Tensor) -> float:
    """Return the percent of right answers if the answer is always the most frequent class, of the sums of `hits`."""
    return 100 * float(counts[2:].max()) / float(counts[1])


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a proportion, in percent (Wilson 1927, J. Am. Stat. Assoc. 22:209)."""
    share, z2 = correct / count, Z_95**2
    center = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    # Rounding must not push the ends that are exact, 0 of n and n of n, out of 0..100.
    return 100 * max(0.0, center - half), 100 * min(1.0, center + half)


def _interval(counts: Tensor) -> tuple[float, float]:
    return wilson_interval(int(counts[0]), int(counts[1]))


def texts(batch: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return token ids (B, tokens) and other inputs by the names of the model's arguments, and labels (B,) int64.

    A batch is a mapping with `input_ids`, `labels` or `label`, and more such as `attention_mask`, as tokenizers of
    transformers return it. Labels are no inputs: given them, such a model would compute a loss of its own.
    """
    label = next((name for name in LABELS if isinstance(batch, Mapping) and name in batch), None)
    inputs = {} if label is None else {name: batch[name] for name in batch if name not in (*LABELS, *EXTRAS)}
    if label is None or "input_ids" not in batch or any(tensor.ndim != 2 for tensor in inputs.values()):
        raise DataError("expected a mapping with input_ids (B, tokens), labels (B,), and more by name")
    if batch[label].ndim != 1 or batch[label].is_floating_point():
        raise DataError("expected labels (B,) of whole numbers")
    return inputs, batch[label]


TOP1 = Score("top1", "top-1", top1, _interval, most_frequent)
IMAGE_CLASSIFICATION = register_task(
    "image_classification", data="images with a label each", measures="cross entropy; top-1"
)(
    Task(
        "image_classification",
        cross_entropy,
        hits,
        (TOP1,),
        logits=logits,
        smoothed=partial(with_smoothing, cross_entropy),
        samples="images",
        labeled_images=True,
    )
)
"""Images (B, C, H, W) with labels (B,); the cross entropy; top-1."""


def _unbound(*_: Any) -> Any:
    raise UsageError(
        "data.labels is false, so that the targets are the answers of the dense model, which is not known here: give "
        "the recipe that has it"
    )


def _bound(task: Task, _: nn.Module) -> Task:
    return replace(task, loss=cross_entropy, counts=hits)


NO_LABELS = (
    "no labels are read: the dense model's answers take their place, and agreement is the share of images that get the "
    "same answer as from the dense model"
)
AGREEMENT = Score("agreement", "agreement with the dense model", top1, _interval, most_frequent, note=NO_LABELS)
IMAGE_AGREEMENT = replace(
    IMAGE_CLASSIFICATION,
    loss=_unbound,
    counts=_unbound,
    scores=(AGREEMENT,),
    binding=_bound,
    from_dense=True,
)
"""`IMAGE_CLASSIFICATION` of images without labels: once it is bound, labels are the answers of the dense model."""
TEXT_CLASSIFICATION = register_task(
    "text_classification", data="token ids with a label each, by name", measures="cross entropy; top-1"
)(
    Task(
        "text_classification",
        cross_entropy,
        hits,
        (TOP1,),
        texts,
        logits=logits,
        smoothed=partial(with_smoothing, cross_entropy),
        samples="texts",
        collate=PaddedTexts(),
    )
)
"""Token ids with labels (B,), for models that return logits, or an object with `.logits`; top-1."""

"""What a model returns, compared with what the dense model returns on the same images, summed over batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.calibration import collect
from prunekit.calibration.gradients import Loss
from prunekit.errors import DataError, ModelError, NonFiniteError, UsageError
from prunekit.inputs import blank_padding, count_of, counted_positions
from prunekit.nested import gather
from prunekit.planning import MeasuredPoint
from prunekit.tasks.batches import Batch, Pair

FLAT = 1e-12
"""Variance among images, as a share of the mean square, below which an output says nothing about the images."""


def labeled_alike(batches: Iterable[Pair], loss: Loss | None) -> Iterator[Batch]:
    """The batches, all with labels or all without."""
    first: Batch | None = None
    for inputs, labels in batches:
        batch = Batch(inputs, labels)
        first = first or batch
        if (batch.labels is None) != (first.labels is None):
            raise DataError("sensitivity: expected labels with every batch or with none, got some of each")
        if batch.labels is None and loss is not None:
            raise UsageError("sensitivity: a loss needs labels: expected batches (inputs, labels), got inputs alone")
        yield batch
    if first is None:
        raise DataError("sensitivity: expected at least one batch of samples to measure on, got none")


@dataclass(frozen=True, eq=False)
class Observed:
    """What a model returned, its tensors with a row for each sample, (B, values) each in float64, and class scores."""

    output: Any
    tensors: tuple[Tensor, ...]
    scores: Tensor | None


def observed(model: nn.Module, inputs: tuple[Any, ...], output: Any, where: str) -> Observed:
    """What a model returned on some samples.

    Args:
        where: which model this is, for messages.

    Raises:
        ModelError: there is no tensor to compare.
        NonFiniteError: something is NaN or Inf; names the first layer that gives it.
    """
    samples, device = count_of(inputs), gather(inputs)[0].device
    rows = [t for t in gather(output) if t.is_floating_point() and t.dim() and len(t) == samples]
    if not rows:
        raise ModelError(
            f"sensitivity: expected a model that returns a tensor of floating-point numbers, or several nested in "
            f"tuples, lists and dictionaries, with a row for each sample; got {type(output).__name__} from {where}; "
            "wrap the model so that it returns what its quality is judged by"
        )
    wide = torch.float32 if device.type == "mps" else torch.float64
    counted = counted_positions(model, inputs)
    tensors = tuple(blank_padding(tensor.detach(), counted).reshape(samples, -1).to(wide) for tensor in rows)
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        collect(model, [(inputs,)], device=device, fused=False, progress=False).require_finite()
        raise NonFiniteError(f"sensitivity: the output of {where} is NaN or Inf, and no layer's is before it")
    return Observed(output, tensors, _class_scores(output, samples))


def _class_scores(output: Any, images: int) -> Tensor | None:
    """(B, classes) in float64, where a model returns class scores: a matrix, or something with one in `.logits`."""
    found = getattr(output, "logits", output)
    is_matrix = isinstance(found, Tensor) and found.dim() == 2 and len(found) == images and found.is_floating_point()
    return found.detach().cpu().double() if is_matrix else None


def require_alike(wanted: Observed, found: Observed, where: str) -> None:
    """Checks that outputs can be compared value by value.

    Raises:
        ModelError: they have other shapes.
    """
    shapes = [[tuple(tensor.shape) for tensor in observed.tensors] for observed in (wanted, found)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"sensitivity: {where}: expected outputs of the dense model's shapes {shapes[0]}, got {shapes[1]}; a model "
            "whose outputs depend in number on the samples cannot be compared with itself"
        )


@dataclass
class Spread:
    """Count, mean and sum of squared deviations of each value of the dense outputs over all images.

    Merged as in Chan, Golub & LeVeque 1983.
    """

    count: int = 0
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)

    def add(self, observed: Observed) -> None:
        """Takes in the dense outputs of one batch.

        Raises:
            ModelError: they have another size than those before.
        """
        new = len(observed.tensors[0])
        parts = [(tensor.mean(0), (tensor - tensor.mean(0)).square().sum(0)) for tensor in observed.tensors]
        if self.count and [mean.shape for mean, _ in parts] != [mean.shape for mean in self.means]:
            raise ModelError("sensitivity: expected outputs of one size for every batch")
        known = zip(self.means, self.squares, strict=True) if self.count else ((0 * m, 0 * s) for m, s in parts)
        total = self.count + new
        merged = [
            (mean + (other - mean) * (new / total), square + more + (other - mean).square() * self.count * new / total)
            for (mean, square), (other, more) in zip(known, parts, strict=True)
        ]
        self.count, self.means, self.squares = total, [m for m, _ in merged], [s for _, s in merged]

    def variances(self) -> list[float]:
        """Of each output tensor, mean over its values; 0 where it is the same for all images."""
        found = [
            (float(square.mean()) / self.count, float(mean.square().mean()))
            for mean, square in zip(self.means, self.squares, strict=True)
        ]
        variances = [variance if variance > FLAT * level else 0.0 for variance, level in found]
        if not any(variances):
            raise DataError(
                f"sensitivity: the dense model's output is the same for all {self.count} samples, so there is no "
                "variance to compare errors with; take more, and different, samples"
            )
        return variances


@dataclass
class Sums:
    """Over the images: what one masked model's outputs differ by, and how good they are."""

    images: int = 0
    squares: list[float] = field(default_factory=list)
    kl: float | None = 0.0
    loss: float | None = 0.0
    correct: int | None = 0

    def add(self, found: Observed, wanted: Observed, batch: Batch, loss: Loss | None) -> None:
        """Takes in what the masked model returned on one batch, where the dense one returned `wanted`."""
        pairs = zip(found.tensors, wanted.tensors, strict=True)
        squares = [float((got - want).square().mean(1).sum()) for got, want in pairs]
        self.squares = [a + b for a, b in zip(self.squares or [0.0] * len(squares), squares, strict=True)]
        self.images += batch.samples
        self.kl = _plus(self.kl, _divergence(found.scores, wanted.scores))
        right = None
        if batch.labels is not None and found.scores is not None and batch.labels.dim() == 1:
            right = int((found.scores.argmax(1) == batch.labels.cpu()).sum())
        self.correct = None if right is None or self.correct is None else self.correct + right
        self.loss = _plus(self.loss, _loss(found, batch, loss))

    def point(self, kept: int, variances: list[float]) -> MeasuredPoint:
        """With the error as the mean over output tensors that vary at all."""
        shares = [square / self.images / v for square, v in zip(self.squares, variances, strict=True) if v]
        kl, loss = (None if value is None else value / self.images for value in (self.kl, self.loss))
        top1 = None if self.correct is None else 100 * self.correct / self.images
        return MeasuredPoint(kept, math.fsum(shares) / len(shares), kl, loss, top1)


def _plus(total: float | None, more: float | None) -> float | None:
    return None if total is None or more is None else total + more


def _divergence(found: Tensor | None, wanted: Tensor | None) -> float | None:
    if found is None or wanted is None:
        return None
    return float(F.kl_div(found.log_softmax(1), wanted.log_softmax(1), reduction="sum", log_target=True))


def _loss(found: Observed, batch: Batch, loss: Loss | None) -> float | None:
    """Summed over the images of a batch."""
    labels = batch.labels
    if labels is None:
        return None
    if loss is not None:
        return float(loss(found.output, labels.to(found.tensors[0].device))) * len(labels)
    if found.scores is None or labels.dim() != 1:
        return None
    classes = found.scores.shape[1]
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise DataError(f"sensitivity: expected labels from 0 to {classes - 1}, as many as the model gives scores for")
    return float(F.cross_entropy(found.scores, labels.cpu(), reduction="sum"))

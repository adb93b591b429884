"""Samples: their statistics, copies, and labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunekit.diagnosis.observation import DataSeen
from prunekit.errors import DataError
from prunekit.inputs import described
from prunekit.nested import map_tensors
from prunekit.tasks.batches import Batch, Pair

IGNORED = -100
"""The label that torch's cross entropy leaves out."""


@dataclass(frozen=True)
class Pool:
    """Where the batches are from.

    Attributes:
        more: further data, as `diagnose` takes it, of the same set; looked at for copies and labels alone.
        held_out: data of which no sample may be among those.
        total: how many samples the data set has; None: those that are looked at are all.
    """

    more: Any = ()
    held_out: Any = ()
    total: int | None = None


def batches_of(pairs: Iterable[Pair], where: str) -> list[Batch]:
    """Batches as `diagnose` takes them.

    Raises:
        DataError: labels are no tensor of as many, or some batches have them and others have none.
    """
    found: list[Batch] = []
    for number, (inputs, labels) in enumerate(pairs, 1):
        if labels is not None and not isinstance(labels, Tensor):
            raise DataError(f"{where}, batch {number}: expected labels in one tensor, got {described(labels)}")
        batch = Batch(map_tensors(inputs, torch.Tensor.detach), labels)
        if labels is not None and (not labels.ndim or len(batch.images) != len(labels)):
            raise DataError(
                f"{where}, batch {number}: expected as many labels as inputs, got {tuple(labels.shape)} for "
                f"{tuple(batch.images.shape)}"
            )
        found.append(batch)
    if len({batch.labels is None for batch in found}) > 1:
        raise DataError(f"{where}: expected labels with every batch or with none, got some of each")
    return found


def class_labels(labels: Tensor) -> bool:
    """Whether labels are numbers of classes: integers, (B,) or (B, H, W)."""
    return not labels.is_floating_point() and labels.dtype != torch.bool


def in_range(labels: Tensor, classes: int) -> Tensor:
    """Labels that are no class put into the first one, or a loss would raise; those that it leaves out stay."""
    fits = ((labels >= 0) & (labels < classes)) | (labels == IGNORED)
    return labels.where(fits, 0)


@dataclass
class DataWatch:
    """Takes note of batches as they come."""

    pool: Pool
    classes: int | None = None
    _labels: list[Tensor] = field(default_factory=list)
    _first: dict[bytes, int | None] = field(default_factory=dict)
    _images: int = 0
    _copies: int = 0
    _conflicting: int = 0
    _not_finite: int = 0
    _sums: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Images and labels of one batch."""
        if batch.images.is_floating_point():
            self._measure(batch.images)
        labels = batch.labels
        if labels is not None and class_labels(labels):
            self._labels.append(labels.cpu().flatten())
        for index, key in enumerate(_digests(batch.images)):
            label = int(labels[index]) if labels is not None and class_labels(labels) and labels.ndim == 1 else None
            self._images += 1
            if key in self._first:
                self._copies += 1
                self._conflicting += self._first[key] != label
            else:
                self._first[key] = label

    def _measure(self, images: Tensor) -> None:
        """Adds count, sum and sum of squares of every channel; (B, features) count as one channel."""
        values = images.double().cpu()
        channels = values.transpose(0, 1).flatten(1) if values.ndim > 2 else values.reshape(1, -1)
        finite = channels.isfinite()
        self._not_finite += int((~finite).sum())
        channels = channels.where(finite, 0.0)
        self._sums.append(torch.stack([finite.sum(1).double(), channels.sum(1), channels.square().sum(1)]).numpy())

    def result(self) -> DataSeen:
        """What was seen, further and held-out batches included."""
        measured = self._statistics()
        for batch in batches_of(self.pool.more, "more"):
            self.add(batch)
        held_out = [key for batch in batches_of(self.pool.held_out, "held_out") for key in _digests(batch.images)]
        return DataSeen(
            *measured,
            not_finite=self._not_finite,
            images=self._images,
            total=max(self.pool.total or 0, self._images),
            copies=self._copies,
            conflicting=self._conflicting,
            held_out=len(held_out),
            leaked=sum(key in self._first for key in held_out),
            labels=torch.cat(self._labels).numpy() if self._labels else None,
            classes=self.classes,
        )

    def _statistics(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        if not self._sums or len({sums.shape for sums in self._sums}) > 1:
            return np.zeros(0), np.zeros(0)
        count, total, squares = np.sum(self._sums, axis=0)
        mean = total / np.maximum(count, 1)
        return mean, np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean**2, 0))


def _digests(images: Tensor) -> Sequence[bytes]:
    """What each image is known by: equal for those that are equal bit for bit, and for no others."""
    rows = images.cpu().contiguous()
    return [
        hashlib.blake2b(row.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=16).digest() for row in rows
    ]

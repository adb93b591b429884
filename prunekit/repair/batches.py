"""The calibration images in batches, those to fit on before those that judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from prunekit.inputs import count_of, taken

Inputs = tuple[Any, ...]
"""What a model is called with, see `prunekit.inputs.example`, samples first in every tensor."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some of the calibration images.

    Attributes:
        number: of the batch.
        inputs: of the model.
        share: of the rows that are sampled.
        counted: which positions of the samples are no padding, see `counted_positions`; None: all.
    """

    number: int
    inputs: Inputs
    share: float
    counted: Tensor | None = None


def batches_of(inputs: Inputs, held_out: float, size: int, counted: Tensor | None = None) -> tuple[list[Batch], int]:
    """Batches to fit on, then those of the held-out images; and how many are to fit on.

    Args:
        held_out: share of the images, the last ones, that only judge.
        size: images in a batch, at most.
        counted: which positions of all samples are no padding; None: all.
    """
    total = count_of(inputs)
    split = total - max(1, round(total * held_out))
    parts = [(0, split, 1.0), (split, total, held_out)]
    bounds = [
        (start, min(start + size, last), share / (last - first))
        for first, last, share in parts
        for start in range(first, last, size)
    ]
    found = [
        Batch(i, taken(inputs, slice(a, b)), each * (b - a), None if counted is None else counted[a:b])
        for i, (a, b, each) in enumerate(bounds)
    ]
    return found, sum(a < split for a, _, _ in bounds)

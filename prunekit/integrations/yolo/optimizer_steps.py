"""Epochs of ultralytics' trainer in steps of its optimizer, which takes several batches for one step."""

from __future__ import annotations

import math
from typing import Any

from prunekit.errors import UsageError


def steps_after(trainer: Any, epochs: float) -> int:
    """Return how many steps the optimizer has made after a number of epochs, from the first on.

    The trainer steps once `accumulate` batches have come since the last step, and raises `accumulate` from 1 during its
    warm-up.

    Args:
        trainer: of ultralytics, at the start of its training.
        epochs: also fractions.
    """
    batches = len(trainer.train_loader)
    warmup, nominal = trainer._get_warmup_iterations(batches), trainer.accumulate
    steps, last = 0, -1
    for batch in range(math.floor(epochs * batches)):
        rising = max(1, round(1 + (nominal - 1) * batch / warmup)) if batch <= warmup and warmup else nominal
        if batch - last >= rising:
            steps, last = steps + 1, batch
    return steps


def schedule_of(trainer: Any, begin: float, epochs: float | None) -> tuple[int, int]:
    """Return the steps of the optimizer before a schedule begins, and until it ends.

    Args:
        trainer: of ultralytics, at the start of its training.
        begin: epochs before the schedule begins.
        epochs: that the schedule takes, 0 for one that prunes once; None: half of those that remain.

    Raises:
        UsageError: it does not end within the training.
    """
    total = trainer.epochs
    taken = (total - begin) / 2 if epochs is None else epochs
    if begin + taken > total:
        raise UsageError(
            f"epochs: the schedule begins after {begin:g} epochs and takes {taken:g}, but the training has {total}; "
            "train for more epochs, or give a shorter schedule"
        )
    first, last = steps_after(trainer, begin), steps_after(trainer, begin + taken)
    if taken and last <= first:
        raise UsageError(
            f"epochs: expected at least one step of the optimizer in {taken:g} epochs of {len(trainer.train_loader)} "
            f"batches, of which {trainer.accumulate} make a step (batch=, nbs=); train for more epochs, or set nbs to "
            "the batch size"
        )
    return first, last

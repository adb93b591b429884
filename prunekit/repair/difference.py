"""How far a model's output is from that of the dense one, over batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from prunekit.calibration.collector import first_tensor
from prunekit.errors import DataError, UsageError
from prunekit.repair.batches import Batch

FLAT = 1e-13
"""Variance among samples, as a share of the mean square, that is no more than float32's rounding."""


def difference(dense: nn.Module, model: nn.Module, batches: Iterable[Batch]) -> float:
    """Mean squared difference of the first output tensor, over its variance among samples.

    Args:
        dense, model: in eval mode, what they return has samples first.
        batches: at least one.

    Raises:
        UsageError: the output holds no floating-point tensor, or one of another shape.
        DataError: the dense model's output is the same for all samples, so that nothing can be judged by it.
    """
    squares, count, sums, total = 0.0, 0, torch.zeros(()), torch.zeros(())
    for batch in batches:
        want, got = _output(dense, batch), _output(model, batch)
        if want.shape != got.shape:
            raise UsageError(
                f"repair: expected outputs of one shape, got {tuple(want.shape)} from the dense model and "
                f"{tuple(got.shape)} from the pruned one: their differences cannot be measured"
            )
        squares += float((got - want).square().sum())
        count += len(want)
        sums, total = sums.to(want) + want.sum(0), total.to(want) + want.square().sum(0)
    around = total if count == 1 else total - sums.square() / count
    if float(around.sum()) <= FLAT * float(total.sum()):  # NaN passes: where it came from is found out later
        raise DataError(
            f"calibration: the dense model's output is the same for all {count} images that judge the repair; "
            "expected images that differ, preprocessed as the model wants them"
        )
    return squares / float(around.sum())


def _output(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        found = first_tensor(model(*(tensor.clone() for tensor in batch.inputs)))
    if found is None:
        raise UsageError("repair: the model's output holds no tensor of floating-point numbers to compare")
    return found.double()

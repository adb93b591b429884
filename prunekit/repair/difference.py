"""How far a model's output is from that of the dense one, over batches."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean

import torch
from torch import Tensor, nn

from prunekit.calibration.judging import Judge, Spread
from prunekit.context import same_draws
from prunekit.errors import DataError, UsageError
from prunekit.inputs import count_of
from prunekit.nested import map_tensors
from prunekit.repair.batches import Batch

FLAT = 1e-13
"""Variance among samples, as a share of the mean square, that is no more than float32's rounding."""


def difference(dense: nn.Module, model: nn.Module, batches: Iterable[Batch], judge: Judge) -> float:
    """Mean squared difference of what is compared, each over its variance among samples; the mean of them.

    Of what has positions that may be padding, such as the scores of each token, those that count are the samples.

    Args:
        dense, model: in eval mode.
        batches: at least one.
        judge: what is compared, of the dense model.

    Raises:
        UsageError: nothing can be compared, or something has another shape.
        DataError: the dense model's output is the same for all samples, so that nothing can be judged by it.
    """
    spread, count = Spread(), 0
    for batch in batches:
        want, got = (_values(each, batch, judge) for each in (dense, model))
        other_way = {key for key in judge.weights if _shapes(want, key) != _shapes(got, key)}
        if len(other_way) < len(judge.outputs) + len(judge.weights):  # a layer that is called otherwise under masks
            want, got = ([pair for pair in values if pair[0] not in other_way] for values in (want, got))
        shapes = [[tuple(value.shape) for _, value in values] for values in (want, got)]
        if shapes[0] != shapes[1]:
            first = next((pair for pair in zip(*shapes, strict=False) if pair[0] != pair[1]), (len(want), len(got)))
            raise UsageError(
                f"repair: expected outputs of one shape, got {first[0]} from the dense model and {first[1]} from the "
                "pruned one: their differences cannot be measured"
            )
        for (key, value), (_, other) in zip(want, got, strict=True):
            spread.add(key, value, other)
        count += count_of(batch.inputs)
    shares = list(spread.shares(FLAT))
    if not shares:
        raise DataError(
            f"calibration: the dense model's output is the same for all {count} images that judge the repair; "
            "expected images that differ, preprocessed as the model wants them"
        )
    return mean(shares)


def _values(model: nn.Module, batch: Batch, judge: Judge) -> list[tuple[int | str, Tensor]]:
    with torch.no_grad(), same_draws(model):
        found = judge.values(model, map_tensors(batch.inputs, torch.clone), batch.counted)
    if not found:
        raise UsageError("repair: the model's output holds no tensor of floating-point numbers to compare")
    return found


def _shapes(values: list[tuple[int | str, Tensor]], key: int | str) -> list[torch.Size]:
    return [value.shape for each, value in values if each == key]

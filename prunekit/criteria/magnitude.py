"""Importance from the weights alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prunekit.criteria.registry import Evidence, Scores, criterion
from prunekit.criteria.slices import LabelMean
from prunekit.errors import NonFiniteError


@criterion("l1", needs="weights")
def l1(evidence: Evidence) -> Scores:
    """Mean |w| of a label's slices (Li et al. 2017, "Pruning filters for efficient ConvNets")."""
    return _mean_power(evidence, 1)


@criterion("l2", needs="weights")
def l2(evidence: Evidence) -> Scores:
    """Root mean square of a label's slices (the l2 norm that Li et al. 2017 compare with)."""
    return _mean_power(evidence, 2)


def _mean_power(evidence: Evidence, power: int) -> Scores:
    """Mean over a label's axes of its slice's norm, divided so that the norm does not grow with the slice.

    A slice is everything that carries the label along one axis of a weight: a filter, the columns that read it, and
    behind a flatten all the columns of one channel together. Weights of two or more axes speak; biases and affine
    scales do only for labels that lie on nothing else. A label on no parameter scores +inf: nothing to remove.
    """
    weights = _slices(evidence, power, vectors=False)
    if weights.seen[1:].all():
        return weights.result()
    return weights.result(otherwise=_slices(evidence, power, vectors=True).result())


def _slices(evidence: Evidence, power: int, *, vectors: bool) -> LabelMean:
    found = LabelMean(evidence.channel_map.n_labels)
    for name, weight in evidence.parameters.items():
        if (weight.ndim < 2) != vectors:
            continue
        wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
        labelled = {
            axis: labels
            for axis, labels in enumerate(evidence.channel_map.labels[name])
            if labels is not None and labels.any()
        }
        for axis, sums in _power_sums(wide, power, list(labelled)).items():
            values = sums.numpy() * (weight.shape[axis] / max(weight.numel(), 1))
            if not np.isfinite(values).all():
                raise NonFiniteError(f"parameter {name!r} holds NaN or Inf; importance needs finite weights")
            found.add(labelled[axis], values, exponent=1 / power)
    return found


BLOCK = 1 << 18
"""Entries looked at together: their powers stay in the cache, and need no memory of the weight's size."""


def _power_sums(weight: Tensor, power: int, axes: list[int]) -> dict[int, Tensor]:
    """Sums of |w| or w^2 over all axes but one, float64 (size,), for each of `axes`, in one pass over the weight."""
    sums = {axis: torch.zeros(weight.shape[axis], dtype=torch.float64) for axis in axes}
    rows = max(1, BLOCK * weight.shape[0] // max(weight.numel(), 1))
    for start in range(0, weight.shape[0], rows):
        block = weight[start : start + rows]
        powers = block.abs() if power == 1 else block.square()
        for axis in axes:
            if axis == 0:
                total = powers.sum(list(range(1, weight.ndim))) if weight.ndim > 1 else powers
                sums[0][start : start + rows] = total.cpu().double()
            else:
                # Axes before this one first: they are added up row by row, and leave little for the rest.
                before = powers.sum(list(range(axis))).cpu().double()
                sums[axis] += before.sum(list(range(1, before.ndim))) if before.ndim > 1 else before
    return sums

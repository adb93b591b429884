"""Importance from the weights alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prunekit.criteria.registry import Evidence, Scores, register_criterion
from prunekit.criteria.slices import IntArray, LabelMean, mean_over_slices, require_finite


@register_criterion(
    "l1", needs=("weights",), measures="mean |w|", paper="Li et al. 2017, Pruning filters for efficient ConvNets"
)
def l1(evidence: Evidence) -> Scores:
    """Mean |w| of a label's slices (Li et al. 2017, "Pruning filters for efficient ConvNets")."""
    return _mean_power(evidence, 1)


@register_criterion(
    "l2",
    needs=("weights",),
    measures="root mean square of w",
    paper="Li et al. 2017, Pruning filters for efficient ConvNets",
)
def l2(evidence: Evidence) -> Scores:
    """Root mean square of a label's slices (the l2 norm that Li et al. 2017 compare with)."""
    return _mean_power(evidence, 2)


@register_criterion(
    "lamp", needs=("weights",), measures="w^2 over what ranks above it", paper="Lee et al. 2021, LAMP", comparable=True
)
def lamp(evidence: Evidence) -> Scores:
    """Layer-adaptive magnitude (Lee et al. 2021), carried from weights to channels.

    The square of a label's `l2` over the sum of its own and those that follow it in its group, in ascending order and,
    as in the paper, equal ones by their index: 1 for the last of every group that is not all zeros, so that no such
    group is emptied in a ranking over all of them. Within a group it ranks as `l2` does.
    """
    squares = l2(evidence) ** 2
    result = squares.copy()
    for group in evidence.channel_map.groups:
        result[group.labels] = _share_of_rest(squares[group.labels])
    return result


def _share_of_rest(squares: Scores) -> Scores:
    if not np.isfinite(squares).all():  # on no parameter: nothing to remove, +inf as it is
        return squares
    order = np.argsort(squares, kind="stable")
    rest = np.empty_like(squares)
    rest[order] = squares[order][::-1].cumsum()[::-1]
    return squares / np.where(rest > 0, rest, 1)


def _mean_power(evidence: Evidence, power: int) -> Scores:
    """Mean over a label's axes of its slice's norm, divided so that the norm does not grow with the slice."""

    def measure(found: LabelMean, name: str, weight: Tensor, labeled: dict[int, IntArray]) -> None:
        wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
        for axis, sums in _power_sums(wide, power, list(labeled)).items():
            values = sums.numpy() * (weight.shape[axis] / max(weight.numel(), 1))
            require_finite(name, values)
            found.add(labeled[axis], values, exponent=1 / power)

    return mean_over_slices(evidence, measure)


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

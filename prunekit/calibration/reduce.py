"""From one activation to its per-channel statistics: one pass over it, and a second where that was not exact."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from prunekit.calibration.layer_stats import ARRAYS, FloatArray, LayerStats
from prunekit.calibration.sums import Sums, centered_squares, eager_sums

CANCELLATION = 1e-4
"""Below this share of the second moment a variance taken from raw moments loses more than four digits."""
DEVIATIONS = ARRAYS.index("squared_deviations")
Measure = Callable[[Tensor], Tensor]
"""The first pass: from values to what `statistics` returns."""


def summarize(activation: Tensor, axis: int, measure: Measure | None = None) -> FloatArray:
    """Per-channel statistics of one activation, accumulated in float64 (float32 on MPS, which has no float64).

    Args:
        activation: floating point, any shape; it is only read.
        axis: which axis holds the channels.
        measure: the first pass, if not `measure_eagerly`.

    Returns:
        (arrays, channels) The fields of `LayerStats`.
    """
    values = _channels_second(activation.detach(), axis)
    if values.numel() == 0:
        return LayerStats.empty(values.shape[1]).rows
    rows = (measure or measure_eagerly)(values).cpu().numpy()
    if rows[-1].any():
        doubtful = np.flatnonzero(rows[-1])
        rows[:-1, doubtful] = _measure_twice(values[:, torch.from_numpy(doubtful).to(values.device)])
    return rows[:-1]


def measure_eagerly(values: Tensor) -> Tensor:
    """(arrays + 1, channels) `statistics` of values (samples, channels, positions) or (samples, channels)."""
    return statistics(eager_sums(values), values.numel() // values.shape[1])


def statistics(sums: Sums, count: int) -> Tensor:
    """(arrays + 1, channels) The fields of `LayerStats`, and last whether they need a second look.

    That is where NaN or Inf got into the sums, and where a large mean cost the variance its digits.

    Args:
        sums: in float64.
        count: values per channel.
    """
    total, squares, absolute, zeros, bad, low, high = sums
    finite = count - bad
    mean = total / finite.clamp(min=1)
    deviations = squares - mean * total
    constant = low == high
    doubtful = ~total.isfinite() | (~constant & (deviations < CANCELLATION * squares))
    mean, deviations = torch.where(constant, low, mean), torch.where(constant, 0.0, deviations)
    first_bad = (bad > 0).double()
    return torch.stack((finite, mean, deviations, absolute, low, high, zeros, bad, first_bad, doubtful.double()))


def _measure_twice(values: Tensor) -> FloatArray:
    """(arrays, channels) Finite values alone, and the variance in a second pass around the mean."""
    sums = eager_sums(values, finite_only=True)
    *rows, _ = statistics(sums, values.numel() // values.shape[1]).numpy()
    mean, low, high = (rows[ARRAYS.index(name)] for name in ("mean", "min", "max"))
    centered = centered_squares(values, mean).cpu().double().numpy()
    rows[DEVIATIONS] = np.where(low == high, 0.0, centered)
    return np.stack(rows)


def _channels_second(activation: Tensor, axis: int) -> Tensor:
    """(samples, channels, positions), contiguous; or (samples, channels), where channels lie innermost."""
    channels, last = activation.shape[axis], activation.movedim(axis, -1)
    if channels > 1 and last.is_contiguous():  # Linear, LayerNorm, and images in channels_last memory format
        return last.reshape(-1, channels)
    samples = activation.shape[:axis].numel()
    return activation.reshape(samples, channels, -1 if activation.numel() else 0).contiguous()

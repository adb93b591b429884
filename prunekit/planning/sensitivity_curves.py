"""Sensitivity curves as plain data, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.channel_map import ChannelMap, Keep
from prunekit.channels.labels import Labels
from prunekit.planning.candidates import Scores


@dataclass(frozen=True, eq=False)
class SensitivityCurve:
    """What goes wrong with each number of channels that a group loses.

    Attributes:
        labels: (n,) in the order in which they go.
        errors: (n,) after as many; comparable between groups.
        outputs: over how many outputs of the layers that read the group the errors are summed, each counted as much as
            the errors are.
    """

    labels: Labels
    errors: NDArray[np.float64]
    outputs: float = 1.0

    def error_at(self, kept: int) -> float:
        """Return the error with so many labels kept."""
        gone = self.labels.size - kept
        return float(self.errors[gone - 1]) if gone else 0.0

    def share_at(self, kept: int) -> float:
        """Return the same per output: the share of the variance of what reads the group, on average over its
        outputs.
        """
        return self.error_at(kept) / self.outputs


@dataclass(frozen=True)
class MeasuredPoint:
    """What a model computes with all but some labels of one group masked.

    Attributes:
        kept: how many labels of the group are left.
        error: mean squared difference of the output from the dense one's, as a share of that one's variance.
        kl: Kullback-Leibler divergence of the class probabilities from the dense ones, in nats, mean over images; None
            where the model gives no class scores.
        loss: mean over images; None without labels.
        top1: in percent; None without labels or class scores.
    """

    kept: int
    error: float
    kl: float | None = None
    loss: float | None = None
    top1: float | None = None


POINTS = 8
"""Numbers of kept labels that are measured of each group, at most."""


def kept_counts(size: int) -> tuple[int, ...]:
    """At most `POINTS` numbers of kept labels, from all of them to one; half of them, rounded down, is among them."""
    steps = [size * step // POINTS for step in range(POINTS, 1, -1)]
    return tuple(dict.fromkeys([*(kept for kept in steps if kept > 0), 1]))


def keep_in_group(channel_map: ChannelMap, order: Labels, kept: int) -> Keep:
    """Return the dense model but for one group, of which only the last `kept` labels in the order of removal are
    left.
    """
    keep = np.ones(channel_map.n_labels, dtype=bool)
    keep[order[: order.size - kept]] = False
    return channel_map.completed(keep)


def fewest_within(curve: Sequence[tuple[int, float]], limit: float) -> int:
    """Return the fewest kept labels whose error is within a limit, and so are those of all larger numbers.

    Args:
        curve: (kept, error) from all to few; the first, of all, counts as within.
    """
    last = curve[0][0]
    for kept, error in curve[1:]:
        if error > limit:
            break
        last = kept
    return last


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    """Spearman's rank correlation (1904), (n,) each, ties with their mean rank; None where one side has no order."""
    first, second = _mean_ranks(one), _mean_ranks(other)
    if one.size < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def cumulative_curves(channel_map: ChannelMap, scores: Scores) -> dict[str, SensitivityCurve]:
    """Return what scores say that each group's channels cost together, lowest first, by the group's name.

    Args:
        channel_map: of the model.
        scores: (n_labels,) comparable between groups; a group with labels that score +inf has no curve.
    """
    found = {}
    for group in channel_map.groups:
        order = group.labels[np.argsort(scores[group.labels], kind="stable")]
        if np.isfinite(scores[order]).all():
            found[group.name] = SensitivityCurve(order, np.cumsum(scores[order]))
    return found

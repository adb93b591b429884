"""Sensitivity curves as plain data, and how a budget is spent by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prunekit.channels import ChannelMap
from prunekit.channels.labels import Labels
from prunekit.channels.map import Keep
from prunekit.planning.select import Scores


@dataclass(frozen=True, eq=False)
class SensitivityCurve:
    """What goes wrong with each number of channels that a group loses.

    Attributes:
        labels: (n,) in the order in which they go.
        errors: (n,) after as many; comparable between groups.
    """

    labels: Labels
    errors: NDArray[np.float64]


def marginal_scores(channel_map: ChannelMap, curves: Iterable[SensitivityCurve], keep: Keep | None = None) -> Scores:
    """Scores that make ranking all labels together spend a MAC budget where it costs least: error per MAC saved.

    Each label scores the slope of the lower convex hull of its group's curve over the MACs that one label of the
    group costs. Removing the lowest first is then the greedy, and by convexity the Lagrangian, solution (Everett 1963;
    as in optimal bit allocation, Shoham & Gersho 1988). MACs are linear around `keep`: neighbours' widths multiply.

    Args:
        channel_map: of the model.
        curves: of groups; a label on no curve scores +inf.
        keep: the plan around which MACs are counted; None: the dense model.

    Returns:
        (n_labels,) scores for scope `global`, comparable as they are.
    """
    scores = np.full(channel_map.n_labels, np.inf)
    around = np.ones(channel_map.n_labels, dtype=bool) if keep is None else keep.copy()
    for curve in curves:
        slopes = hull_slopes(curve.errors)
        rank = 1 + 1e-9 * np.arange(slopes.size)  # within a slope the order of the curve holds
        scores[curve.labels] = (slopes + np.finfo(float).tiny) * rank / max(1.0, _macs_each(channel_map, curve, around))
    return scores


def _macs_each(channel_map: ChannelMap, curve: SensitivityCurve, around: Keep) -> float:
    """MACs that a label of a group costs, on average over those that are there."""
    with_all, with_none = around.copy(), around.copy()
    with_all[curve.labels], with_none[curve.labels] = True, False
    all_left, none_left = (channel_map.macs(channel_map.completed(keep)) for keep in (with_all, with_none))
    return (all_left - none_left) / curve.labels.size


def hull_slopes(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n,) slopes of the lower convex hull of the curve through (0, 0), (1, errors[0]), ...: never falling."""
    heights = np.concatenate([[0.0], errors])
    slopes, start = np.zeros(errors.size), 0
    while start < errors.size:
        reached = (heights[start + 1 :] - heights[start]) / np.arange(1, heights.size - start)
        step = int(np.flatnonzero(reached == reached.min())[-1]) + 1
        slopes[start : start + step] = reached.min()
        start += step
    return slopes

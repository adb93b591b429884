"""Sensitivity curves as plain data, and importance for each multiply-accumulate."""

from __future__ import annotations

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


def cumulated(channel_map: ChannelMap, scores: Scores) -> dict[str, SensitivityCurve]:
    """What scores say that each group's channels cost together, lowest first, by the group's name.

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


def per_mac(channel_map: ChannelMap, scores: Scores, keep: Keep | None = None) -> Scores:
    """Scores over the MACs that one label of the group costs, so that ranking all of them saves MACs at least loss.

    Where the scores are what a group's error rises by, and never fall along the order in which its labels go, removing
    the lowest first is the greedy and the Lagrangian solution (Everett 1963; as in optimal bit allocation, Shoham &
    Gersho 1988). MACs are linear around `keep`: neighbours' widths multiply.

    Args:
        channel_map: of the model.
        scores: (n_labels,) comparable between groups.
        keep: the plan around which MACs are counted; None: the dense model.
    """
    result = np.array(scores, dtype=np.float64)
    around = np.ones(channel_map.n_labels, dtype=bool) if keep is None else keep
    for group in channel_map.groups:
        if np.isfinite(result[group.labels]).any():
            result[group.labels] /= max(1.0, _macs_each(channel_map, group.labels, around))
    return result


def _macs_each(channel_map: ChannelMap, labels: Labels, around: Keep) -> float:
    """MACs that a label of a group costs, on average over those that are there."""
    with_all, with_none = around.copy(), around.copy()
    with_all[labels], with_none[labels] = True, False
    all_left, none_left = (channel_map.macs(channel_map.completed(keep)) for keep in (with_all, with_none))
    return (all_left - none_left) / labels.size

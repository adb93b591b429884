"""Sensitivity curves: the error of a model as a function of the channels that a group keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelMap, Keep
from prunekit.planning.candidates import Scores


@dataclass(frozen=True, eq=False)
class SensitivityCurve:
    """The error with each number of channels that a group loses."""

    labels: Labels  # (n,) in the order in which they are removed
    errors: NDArray[np.float64]  # (n,) errors[i] after i + 1 labels; comparable between groups
    # number of outputs of the layers reading the group that the errors are summed over, weighted alike
    outputs: float = 1.0

    def error_at(self, kept: int) -> float:
        """Return the error with this number of labels kept."""
        gone = self.labels.size - kept
        return float(self.errors[gone - 1]) if gone else 0.0

    def share_at(self, kept: int) -> float:
        """Return the error per output: a share of its variance, on average over the layers that read the group."""
        return self.error_at(kept) / self.outputs


@dataclass(frozen=True)
class MeasuredPoint:
    """Change of the output of a model if all but some labels of one group are masked."""

    kept: int  # number of labels of the group that are left
    error: float  # mean squared difference of the output from the dense one's, as a share of that one's variance
    # Kullback-Leibler divergence of the class probabilities from the dense ones, in nats, mean over what is classified;
    # None if the model gives no class scores
    kl: float | None = None
    # mean over samples; None without targets, or where models of the task compute it themselves
    loss: float | None = None
    # every score of the task by name, such as `top1` in percent; empty without targets
    scores: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the values as plain data: `kept`, `error`, `kl`, `loss` and the scores by name."""
        return {"kept": self.kept, "error": self.error, "kl": self.kl, "loss": self.loss, **self.scores}


POINTS = 8
"""The most points that are measured of each group."""


def kept_counts(size: int) -> tuple[int, ...]:
    """Return at most `POINTS` numbers of kept labels, from all to one; half of them, rounded down, is included."""
    steps = [size * step // POINTS for step in range(POINTS, 1, -1)]
    return tuple(dict.fromkeys([*(kept for kept in steps if kept > 0), 1]))


def keep_in_group(channel_map: ChannelMap, order: Labels, kept: int) -> Keep:
    """Return what is kept if one group alone is pruned: bool (n_labels,)."""
    keep = np.ones(channel_map.n_labels, dtype=bool)
    keep[order[: order.size - kept]] = False
    return channel_map.completed(keep)


def fewest_within(curve: Sequence[tuple[int, float]], limit: float) -> int:
    """Return the fewest kept labels such that the error is within a limit for this and every larger number.

    The curve is (kept, error) from all to few; the first counts as within.
    """
    last = curve[0][0]
    for kept, error in curve[1:]:
        if error > limit:
            break
        last = kept
    return last


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    """Return Spearman's rank correlation (1904) of values (n,), ties with their mean rank; None if one is constant."""
    import pandas as pd

    first, second = (pd.Series(values).rank().to_numpy() for values in (one, other))
    if one.size < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def cumulative_curves(channel_map: ChannelMap, scores: Scores) -> dict[str, SensitivityCurve]:
    """Return a curve for each group, by its name: scores summed from the lowest on."""
    found = {}
    for group in channel_map.groups:
        order = group.labels[np.argsort(scores[group.labels], kind="stable")]
        if np.isfinite(scores[order]).all():
            found[group.name] = SensitivityCurve(order, np.cumsum(scores[order]))
    return found

"""What a group's width is worth by itself, whichever of its channels are kept."""

from __future__ import annotations

import numpy as np

from prunekit.channels import ChannelMap
from prunekit.planning.budgets.registry import Countable
from prunekit.planning.costs import cost_model
from prunekit.planning.prices import costs_of_parts
from prunekit.planning.select import Part, Scores


def worth_of_widths(channel_map: ChannelMap, parts: list[Part]) -> Scores:
    """Scores (n_labels,) whose sum grows with the logarithm of each part's width, by the MACs that it takes part in.

    A layer's MACs are its inputs times its outputs, and the logarithm of a product is a sum: so together they stand for
    the mean over layers, weighted by their MACs, of the logarithm of what each keeps of them. Half as many channels
    cost the same wherever they go from, so that no group is given up for another; of a part the first labels go last.
    """
    model = cost_model(channel_map, parts, [Countable(channel_map, parts).terms("macs")])
    whole = np.array([part.labels.size for part in parts])
    weights = costs_of_parts(parts, model, whole)[:, 0] / channel_map.macs()
    scores = np.zeros(channel_map.n_labels)
    for part, weight in zip(parts, weights, strict=True):
        scores[part.labels] = weight * np.log1p(1 / np.arange(1, part.labels.size + 1))
    return scores

"""Networks for a latency table: the dense one, and choices of widths all over the range."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prunekit.channels import ChannelMap
from prunekit.channels.map import Keep
from prunekit.planning.select import Part

LEAST, SPREAD = 0.1, 0.25
"""Mean share of the narrowest networks, and by how much parts differ from a network's mean."""


def sampled(channel_map: ChannelMap, parts: list[Part], number: int, *, seed: int = 0) -> Iterator[Keep]:
    """What so many networks keep: all, then random shares of every part around a mean that is spread evenly.

    Args:
        parts: what may go; which labels of a part makes no difference to time.
    """
    generator = np.random.default_rng(seed)
    means = np.linspace(LEAST + SPREAD / 2, 1.0, max(number - 1, 1))
    yield np.ones(channel_map.n_labels, dtype=bool)
    for mean in generator.permutation(means)[: number - 1]:
        keep = np.ones(channel_map.n_labels, dtype=bool)
        for part in parts:
            wanted = part.labels.size * float(np.clip(mean + generator.uniform(-SPREAD, SPREAD), LEAST, 1.0))
            keep[part.labels[part.at_most(max(wanted, 1)) :]] = False
        yield channel_map.completed(keep)

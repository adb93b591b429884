"""Candidates of a plan: which labels it may remove, in which order, and how many may be kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prunekit.channels.channel_map import ChannelGroup, ChannelMap, Keep
from prunekit.channels.constraints import Removal
from prunekit.channels.labels import Labels
from prunekit.errors import PlanError
from prunekit.settings.prune import PruneSettings
from prunekit.utils.globs import globs, matching

Scores = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class GroupPart:
    """Labels of one channel group that are planned together.

    Attributes:
        labels: from the most to the least important, so that keeping k means `labels[:k]`.
        counts: numbers of labels that may be kept, ascending; the last keeps all.
        channels: how many channels one label stands for; more than 1 where whole convolution groups are coupled.
    """

    labels: Labels
    counts: Labels
    channels: int

    def at_most(self, wanted: float) -> int:
        """Return the largest allowed count of at most `wanted`; the smallest count if there is none."""
        index = int(np.searchsorted(self.counts, wanted + 1e-9, side="right")) - 1
        return int(self.counts[max(index, 0)])

    def at_least(self, wanted: int) -> int:
        """Return the smallest allowed count of at least `wanted`."""
        return int(self.counts[np.searchsorted(self.counts, wanted)])


@dataclass(frozen=True, eq=False)
class PlanBounds:
    """Two plans that bound another one, as in a step of a schedule: bool (n_labels,) each, None for no bound.

    Attributes:
        most: labels that may be kept.
        least: labels that must be kept; all of them are in `most`.
    """

    most: Keep | None = None
    least: Keep | None = None


UNBOUNDED = PlanBounds()


def free_parts(
    channel_map: ChannelMap, scores: Scores, settings: PruneSettings, bounds: PlanBounds = UNBOUNDED
) -> list[GroupPart]:
    """Return the parts of a model that a plan may prune, with exclusions and ratios applied.

    A part is ordered by scores, but labels that `bounds` requires come first, and those that it forbids come last.

    Raises:
        PlanError: a glob matches no module path.
    """
    excluded = labels_matching(channel_map, settings.ignore, "ignore")
    ratio = np.ones(channel_map.n_labels) * np.nan
    for pattern, share in settings.ratios.items():
        ratio[labels_matching(channel_map, [pattern], "ratios")] = share
    parts = []
    for group, *needed in zip(channel_map.groups, channel_map.steps, channel_map.least, strict=True):
        free = group.labels[~excluded[group.labels]]
        channels, unit = channels_per_label(channel_map, group), _unit(channel_map, group, settings)
        for share in np.unique(ratio[free]):
            labels = free[np.isnan(ratio[free]) if np.isnan(share) else ratio[free] == share]
            order = labels[np.lexsort((labels, -scores[labels]))]
            part = GroupPart(order, _allowed(labels.size, unit or channels, settings, *needed), channels)
            if not np.isnan(share):
                wanted = labels.size * (1 if _kind(channel_map, group) else share)
                part = GroupPart(order, np.array([part.at_most(wanted)]), channels)
            parts.append(_bounded(part, bounds))
    return parts


def _bounded(part: GroupPart, bounds: PlanBounds) -> GroupPart:
    none, every = np.zeros(part.labels.size, dtype=bool), np.ones(part.labels.size, dtype=bool)
    least = none if bounds.least is None else bounds.least[part.labels]
    most = every if bounds.most is None else bounds.most[part.labels]
    order = part.labels[np.lexsort((~most, ~least))]  # stable: the order among equals stays
    low, high = np.count_nonzero(least), np.count_nonzero(most)
    counts = part.counts[(part.counts >= low) & (part.counts <= high)]
    return GroupPart(order, counts if counts.size else np.array([high]), part.channels)


def _kind(channel_map: ChannelMap, group: ChannelGroup) -> Removal:
    """Return which kind of channels a group holds; a ratio applies to whole heads alone."""
    for kind in reversed(range(2, channel_map.joint.shape[1])):
        inside = channel_map.joint[:, 1:kind].any(axis=1)
        if np.isin(group.labels, channel_map.joint[inside, kind]).any():
            return Removal(kind - 1)
    return Removal.HEADS


def _unit(channel_map: ChannelMap, group: ChannelGroup, settings: PruneSettings) -> int | None:
    """Return what counts of heads, or of positions in heads, are multiplied by for rounding; None for other labels.

    Positions are rounded on their own, and heads as much as the smallest allowed number of positions requires. Of
    query heads there may be any number for each head of keys then, as these make a rounded width already.
    """
    if _kind(channel_map, group):
        return 1 if _kind(channel_map, group) == Removal.POSITIONS else settings.round_to
    of_heads = np.isin(channel_map.joint[:, 1], group.labels)
    sizes = [_sizes_of(channel_map, column[of_heads]) for column in channel_map.joint.T[2:]]
    if not of_heads.any():
        return None
    if sizes[0]:
        return int(np.gcd.reduce(np.concatenate([_allowed(size, 1, settings) for size in sizes[0]])))
    return max(1, channels_per_label(channel_map, group) // max(sizes[1]))


def _sizes_of(channel_map: ChannelMap, labels: Labels) -> list[int]:
    """Return the sizes of the groups that labels are in."""
    return [channel_map.groups[index].labels.size for index in np.unique(channel_map.group_of[labels[labels > 0]])]


def _allowed(size: int, channels: int, settings: PruneSettings, step: int = 1, least: int = 1) -> Labels:
    """Return allowed numbers of labels; `step` and `least` are those that the model itself needs."""
    counts = np.arange(1, size + 1)
    fits = (counts * channels % settings.round_to == 0) & (counts * channels >= settings.min_channels)
    allowed: Labels = counts[(fits & (counts % step == 0) & (counts >= least)) | (counts == size)]
    return allowed


def channels_per_label(channel_map: ChannelMap, group: ChannelGroup) -> int:
    """Return how many channels of its producer are removed with one label of a group."""
    name, axis = next((slot for slot in group.slots if slot[1] == 0), group.slots[0])
    on_axis = channel_map.labels[name][axis]
    assert on_axis is not None
    carried = sum(int(np.isin(labels, group.labels).sum()) for labels in channel_map.deciding(on_axis))
    return max(1, carried // group.labels.size)


def labels_matching(channel_map: ChannelMap, patterns: Iterable[str], key: str) -> NDArray[np.bool_]:
    """Return which labels are output channels of modules whose path matches one of the globs: bool (n_labels,).

    Raises:
        PlanError: a pattern matches no module path; the message gives near spellings.
    """
    result = np.zeros(channel_map.n_labels, dtype=bool)
    paths = {path for path, _, _ in channel_map.activations} | {n.rpartition(".")[0] for n in channel_map.labels}
    paths.discard("")
    outputs = _outputs(channel_map)
    for pattern in globs(patterns, key):
        found = set(matching(pattern, paths, key, PlanError))
        for path, labels in outputs:
            if path in found:
                for deciding in channel_map.deciding(labels):
                    result[deciding] = True
    result[0] = False
    return result


def _outputs(channel_map: ChannelMap) -> list[tuple[str, Labels]]:
    """Return module paths with the labels of their outputs; of modules never called, those of their weights' rows."""
    called = [(path, labels) for (path, kind, _), labels in channel_map.activations.items() if kind == "output"]
    paths = {path for path, _ in called}
    owned = [(name.rpartition(".")[0], axes[0]) for name, axes in channel_map.labels.items() if axes]
    return called + [(path, rows) for path, rows in owned if rows is not None and path not in paths]

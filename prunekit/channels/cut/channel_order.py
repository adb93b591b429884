"""Channels of a model in another order: the same function, with the entries of its tensors in other places."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from prunekit.channels.cut.slicing import take
from prunekit.channels.labels import Labels
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.hooks.model_copy import named_tensors, with_tensors


def with_channel_order(model: nn.Module, channel_map: ChannelMap, source: Labels) -> nn.Module:
    """Return a copy of a model in which channels have changed places in all of its tensors.

    Whether it computes the same is not known from the labels alone, as neighbors may matter, for example in a GroupNorm
    or behind a view: compare its outputs with the model's.
    """
    moved = {}
    for name, tensor in named_tensors(model):
        result = tensor.detach()
        for axis, labels in enumerate(channel_map.labels.get(name, ())):
            if labels is not None and not np.array_equal(source[labels], labels):
                index = torch.from_numpy(_places(labels, source)).to(result.device)
                result = take(result, axis, index)
        moved[name] = result.clone()
    return with_tensors(model, moved)


def _places(labels: Labels, source: Labels) -> Labels:
    """Return for each position of an axis the one whose entries it gets: of a label's several, the same of the other's.

    Labels that are not as often on the axis as their source stay.
    """
    order = np.argsort(labels, kind="stable")
    ascending = labels[order]
    first = np.searchsorted(ascending, labels)
    occurrence = np.empty_like(order)
    occurrence[order] = np.arange(order.size) - np.searchsorted(ascending, ascending)
    wanted = source[labels]
    counts = np.bincount(labels, minlength=source.size)
    same = counts[wanted] == counts[labels]
    begin = np.where(same, np.searchsorted(ascending, wanted), first)
    found: Labels = order[begin + occurrence]
    return found

"""Orders of channels in which N:M keeps more: which neighbors along the inputs of layers share a group of M.

Pool & Yu 2021, "Channel permutations for N:M sparsity".
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelGroup
from prunekit.planning.patterns.pattern import PatternLayer
from prunekit.planning.plan import Plan

WORK = 2e8
"""Values that are compared in one sweep over all pairs of groups, about; of more rows, the largest stand for all."""
SWEEPS = 8
"""How often all pairs are looked at, at most."""


def group_orders(
    layers: Sequence[PatternLayer], weights: Mapping[str, Tensor], plan: Plan, kept_of: tuple[int, int]
) -> dict[str, Labels]:
    """Return for channel groups, by name, which label each of their kept labels gives its place to, (n_labels,) each.

    Channels change places only within their group, where every layer that reads some of the group reads nothing else.
    """
    found = {}
    for group in plan.channel_map.groups:
        labels = group.labels[plan.keep[group.labels]]
        columns = _columns(group, labels, layers, weights, plan)
        if columns is None or len(labels) <= kept_of[1]:
            continue
        order = best_order(columns, kept_of)
        if not torch.equal(order, torch.arange(len(order))):
            source = np.arange(plan.channel_map.n_labels)
            source[labels] = labels[order.numpy()]
            found[group.name] = source
    return found


def _columns(
    group: ChannelGroup, labels: Labels, layers: Sequence[PatternLayer], weights: Mapping[str, Tensor], plan: Plan
) -> Tensor | None:
    """Return the sizes of all weights that read a group's kept channels, (rows, channels); None if some read others."""
    found = []
    for layer in layers:
        axis = layer.layer.axes[1]
        on = plan.channel_map.labels[layer.weight][axis]
        if on is None or not np.isin(on, group.labels).any():
            continue
        read = on[layer.columns.numpy()]
        if not np.array_equal(read, labels):  # others too, or in another order, or several times
            return None
        sizes = layer.matrix(weights[layer.weight].detach()).abs().double()  # (o, i, taps)
        found.append(sizes.movedim(1, 2).flatten(0, 1).cpu())
    return torch.cat(found) if found else None


def kept_size(sizes: Tensor, kept_of: tuple[int, int]) -> Tensor:
    """Return the sum of the N largest of each M neighbors in the last axis."""
    kept, of = kept_of
    return _kept(sizes.view(*sizes.shape[:-1], -1, of), kept).sum(-1)


def best_order(columns: Tensor, kept_of: tuple[int, int]) -> Tensor:
    """Return the order of columns (rows, n) in which N:M keeps most: pairs change places while that keeps more."""
    _, of = kept_of
    count = columns.shape[1]
    most = max(16, int(WORK / (count * count * of)))
    if len(columns) > most:
        columns = columns[columns.sum(1).topk(most).indices]
    order = torch.arange(count)
    for _ in range(SWEEPS):
        gained = False
        for group in range(count // of - 1):
            gained |= _swap_with_later(columns, order, group, kept_of)
        if not gained:
            break
    return order


def _swap_with_later(columns: Tensor, order: Tensor, group: int, kept_of: tuple[int, int]) -> bool:
    """Swap a column of a group with the column of a later one that gains most, in place; return whether any gains."""
    kept, of = kept_of
    now = columns[:, order].view(len(columns), -1, of)
    own, later = now[:, group], now[:, group + 1 :]  # (rows, of), (rows, g, of)
    before = _kept(own, kept)[:, None] + _kept(later, kept)
    best, where = 1e-9 * float(columns.sum()), None
    for i in range(of):
        for j in range(of):
            mine = own[:, None].expand_as(later).clone()
            mine[..., i] = later[..., j]
            theirs = later.clone()
            theirs[..., j] = own[:, i, None]
            gains = (_kept(mine, kept) + _kept(theirs, kept) - before).sum(0)
            at = int(gains.argmax())
            if float(gains[at]) > best:
                best, where = float(gains[at]), (i, j, at)
    if where is None:
        return False
    mine_at, theirs_at, later_group = where
    one, other = group * of + mine_at, (group + 1 + later_group) * of + theirs_at
    order[[one, other]] = order[[other, one]]
    return True


def _kept(values: Tensor, kept: int) -> Tensor:
    """Return the sum of the largest values along the last axis."""
    found: Tensor = values.topk(kept, dim=-1).values.sum(-1)
    return found

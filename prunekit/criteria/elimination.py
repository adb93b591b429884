"""In which order the channels of a group go, and what each costs, from what their consumers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.calibration.patch_stats import LayerMoments, PatchStats
from prunekit.channels import ChannelGroup, ChannelMap
from prunekit.channels.copying import named_tensors
from prunekit.channels.labels import Labels
from prunekit.criteria.slices import FloatArray, IntArray

RIDGE = 1e-3
"""Added to the diagonal of a Gram matrix, as a share of its mean: dead channels have nothing there."""


@dataclass(frozen=True, eq=False)
class Consumer:
    """A layer that reads channels of a group.

    Attributes:
        gram: (d + 1, d + 1) mean products of the columns it reads and of a constant.
        weight: (o, d) in units of the end of its chain, each output over its standard deviation there.
        labels: (C,) of its input channels; d is C times the columns of each.
    """

    gram: Tensor
    weight: Tensor
    labels: IntArray


@dataclass(frozen=True, eq=False)
class Elimination:
    """Labels of a group in the order in which they go, and the error after each.

    Attributes:
        labels: (n,), the first goes first.
        errors: (n,) summed over all consumers' outputs, each over its variance: after removing as many, with all that
            is left fitted anew.
    """

    labels: Labels
    errors: FloatArray


def eliminate(labels: Labels, consumers: Sequence[Consumer]) -> Elimination:
    """Removes labels one by one, always the one that costs least when the others take over what they can.

    Optimal brain surgeon (Hassibi & Stork 1993) for whole groups of columns, as SparseGPT (Frantar & Alistarh 2023)
    does it for single ones: removing the columns c of a layer costs tr(W_c [(G^-1)_cc]^-1 W_c^T), and W and G^-1
    are updated for the next; the constant never goes. Costs of several consumers are added up.

    Args:
        labels: (n,) of one group.
        consumers: all that read them.
    """
    states = [_State(consumer, labels) for consumer in consumers]
    left, order, errors, total = np.ones(labels.size, dtype=bool), [], [], 0.0
    for _ in range(labels.size):
        costs = np.where(left, sum(state.costs() for state in states), np.inf)
        chosen = int(np.argmin(costs))
        total += max(0.0, float(costs[chosen]))
        for state in states:
            state.remove(chosen)
        left[chosen] = False
        order.append(chosen)
        errors.append(total)
    return Elimination(labels[order], np.array(errors))


class _State:
    """One consumer while channels go."""

    def __init__(self, consumer: Consumer, labels: Labels) -> None:
        gram = consumer.gram.double()
        columns = len(gram) - 1
        taps = columns // len(consumer.labels)
        ridge = torch.full((columns + 1,), RIDGE * float(gram.diagonal()[:-1].mean()) or 1.0, dtype=torch.float64)
        ridge[-1] = 0
        self._inverse = torch.linalg.inv(gram + torch.diag(ridge.to(gram.device)))
        constant = consumer.weight.new_zeros(len(consumer.weight), 1)
        self._weight = torch.cat([consumer.weight, constant], 1).double()
        every = np.arange(columns).reshape(-1, taps)
        self._columns = [torch.from_numpy(every[consumer.labels == label].reshape(-1)) for label in labels]
        self._left = [columns.numel() > 0 for columns in self._columns]

    def costs(self) -> FloatArray:
        """(n,) cost of removing each label now."""
        costs = np.zeros(len(self._columns))
        for size in {c.numel() for c, left in zip(self._columns, self._left, strict=True) if left}:
            which = [i for i, c in enumerate(self._columns) if self._left[i] and c.numel() == size]
            columns = torch.stack([self._columns[i] for i in which]).to(self._inverse.device)  # (n, size)
            blocks = self._inverse[columns[:, :, None], columns[:, None, :]]
            weights = self._weight[:, columns].transpose(0, 1)  # (n, o, size)
            solved = torch.linalg.solve(blocks, weights.transpose(1, 2))
            costs[which] = (solved.transpose(1, 2) * weights).sum((1, 2)).cpu().numpy()
        return costs

    def remove(self, index: int) -> None:
        """Removes a label's columns; the others take over."""
        if not self._left[index]:
            return
        columns = self._columns[index].to(self._inverse.device)
        update = torch.linalg.solve(self._inverse[columns][:, columns], self._inverse[columns])
        self._weight -= self._weight[:, columns] @ update
        self._inverse -= self._inverse[:, columns] @ update
        self._weight[:, columns] = 0
        self._left[index] = False


def consumers_of(group: ChannelGroup, model: nn.Module, channel_map: ChannelMap, stats: PatchStats) -> list[Consumer]:
    """The layers that read a group's channels: their weights carry its labels on the input side.

    Args:
        group: of `channel_map`.
        model: the dense model.
        stats: of that model.
    """
    tensors, modules = dict(named_tensors(model)), dict(model.named_modules())
    found: list[Consumer] = []
    for moments in stats.layers:
        labels = channel_map.labels.get(moments.layer.weight, (None, None))[1]
        if labels is not None and np.isin(labels, group.labels).any():
            found += _by_group(moments, tensors, modules, labels)
    return found


def _by_group(
    moments: LayerMoments, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module], labels: Labels
) -> Iterable[Consumer]:
    layer = moments.layer
    weight = tensors[layer.weight].detach().double().flatten(2) if layer.reading.kernel else None
    if weight is None:
        weight = tensors[layer.weight].detach().double()[:, :, None]
    scale = moments.variance.clamp(min=1e-12 * float(moments.variance.max()) or 1.0).rsqrt()
    if layer.norm is not None:
        norm = modules[layer.norm]
        factor = (norm.running_var.double() + norm.eps).rsqrt()  # type: ignore[operator]
        scale = scale * (factor if norm.weight is None else factor * norm.weight.detach().double())  # type: ignore[operator]
    weight = weight * scale[:, None, None]
    for matrix, rows in zip(moments.grams, weight.chunk(len(moments.grams)), strict=True):
        if moments.taps == 1:  # without the taps' own statistics each of them is a layer of its own
            rows = rows.transpose(1, 2).flatten(0, 1)[:, :, None]
        yield Consumer(matrix, rows.flatten(1), labels)


def eliminations(model: nn.Module, channel_map: ChannelMap, stats: PatchStats) -> dict[str, Elimination]:
    """The order of removal and its errors for every channel group that some layer reads, by the group's name.

    Args:
        model: the dense model; only read.
        channel_map: of that model.
        stats: of that model, from `calibration.collect_patches`.
    """
    found = {}
    for group in channel_map.groups:
        consumers = consumers_of(group, model, channel_map, stats)
        if consumers:
            found[group.name] = eliminate(group.labels, consumers)
    return found

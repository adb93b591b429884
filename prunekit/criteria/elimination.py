"""Elimination: channels of a group are removed one after another, always the one that adds least output error."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.channel_map import ChannelGroup, ChannelMap
from prunekit.channels.cut.model_copy import named_tensors
from prunekit.channels.labels import Labels
from prunekit.criteria.criterion import Evidence, Scores, register_criterion
from prunekit.statistics.layer_stats import FloatArray, IntArray
from prunekit.statistics.layers.output_error import relative_scale, with_ridge
from prunekit.statistics.layers.patch_moments import LayerMoments, PatchStats
from prunekit.statistics.layers.patches import solve_positive
from prunekit.utils.progress import tracked

TRUST = 0.5
"""Exponent of layers' gains: those of the repaired network lie between the measured ones and 1, as repair corrects
in later layers what earlier ones got wrong."""
GONE = 0.25
"""Share of a matrix's columns that may be removed before the matrix is made smaller."""
WIDE = 2**31
"""Bytes of the matrices of all layers that read a group; where they would take more, they are in float32."""
PART = 2**24
"""Values of a weight that are in float64 at a time, before its rows are made fewer."""
AT_ONCE = 64
"""One of so many remaining labels is removed at a time; of wide groups several, as one by one takes too long."""


@dataclass(frozen=True, eq=False)
class LayerObjective:
    """The output error of a layer that reads channels of a group, as a quadratic function of its weight.

    Attributes:
        gram: (d + 1, d + 1) mean products of the columns it reads and of a constant.
        weight: (o, d) in units of the end of its chain, each output over its standard deviation there, or times the
            gain of a norm over channels that reads it, see `RowNorm`; weighted by how much an error of this layer
            changes the model's output, see `TRUST`.
        labels: (C,) of its input channels; d is C times the columns of each.
        biased: whether a bias, its own or that of a norm, makes up for the mean of what is removed.
    """

    gram: Tensor
    weight: Tensor
    labels: IntArray
    biased: bool = True


@dataclass(frozen=True, eq=False)
class Elimination:
    """The labels of a group in the order in which they are removed, and the error after each.

    Attributes:
        labels: (n,), the first is removed first.
        errors: (n,) after removing as many, with all that is left fitted again: summed over the outputs of all layers
            that read them, each over its variance and weighted as in `LayerObjective`.
        outputs: over how many outputs they are summed, each counted as its layer's gain counts.
    """

    labels: Labels
    errors: FloatArray
    outputs: float = 1.0


@register_criterion(
    "elimination",
    needs=("weights", "patches"),
    measures="output error that it adds, with the rest fitted again, as channels are removed one after another",
    paper="Hassibi & Stork 1993, OBS, by channels; Frantar & Alistarh 2023, SparseGPT",
    comparable=True,
)
def elimination(evidence: Evidence) -> Scores:
    """Return the error that each label adds: the slope of the lower convex hull of its group's curve.

    So scores never fall along the order of removal, and ranking all of them removes along the curves of all groups at
    once, at equal slopes. Labels of groups that no layer reads score +inf.
    """
    assert evidence.patches is not None
    scores = np.full(evidence.channel_map.n_labels, np.inf)
    for order in eliminations(evidence.modules[""], evidence.channel_map, evidence.patches).values():
        slopes = hull_slopes(order.errors)
        rank = 1 + 1e-9 * np.arange(slopes.size)  # within a slope the order of the curve holds
        scores[order.labels] = (slopes + np.finfo(float).tiny) * rank
    return scores


def hull_slopes(errors: FloatArray) -> FloatArray:
    """Return the slopes of the lower convex hull of the curve through (0, 0), (1, errors[0]), ...: (n,), ascending."""
    heights = np.concatenate([[0.0], errors])
    slopes, start = np.zeros(errors.size), 0
    while start < errors.size:
        reached = (heights[start + 1 :] - heights[start]) / np.arange(1, heights.size - start)
        step = int(np.flatnonzero(reached == reached.min())[-1]) + 1
        slopes[start : start + step] = reached.min()
        start += step
    return slopes


def eliminations(
    model: nn.Module, channel_map: ChannelMap, stats: PatchStats, groups: Iterable[ChannelGroup] | None = None
) -> dict[str, Elimination]:
    """Return the order of removal and its errors for every channel group that some layer reads, by the group's name.

    What was found before is taken from the statistics, where the same channels are read by the same layers.

    Args:
        model: the dense model that the statistics are of; only read.
        channel_map: of that model.
        stats: from `collect_patches`.
        groups: of the map; None: all.
    """
    found = {}
    for group in tracked(channel_map.groups if groups is None else groups, "elimination", unit="group"):
        key = _read_columns(group, channel_map, stats)
        if key not in stats.computed:
            objectives = layer_objectives(group, model, channel_map, stats)
            order = eliminate(group.labels, objectives) if objectives else None
            places = None if order is None else np.searchsorted(group.labels, order.labels)
            stats.computed[key] = None if order is None else (places, order.errors)
            stats.memory.release()
        if stats.computed[key] is not None:
            places, errors = stats.computed[key]
            outputs = weighted_output_count(group, channel_map, stats)
            found[group.name] = Elimination(group.labels[places], errors, outputs)
    return found


def _read_columns(group: ChannelGroup, channel_map: ChannelMap, stats: PatchStats) -> Hashable:
    """Return which of a group's channels each layer reads where, whatever their labels are."""
    found = []
    for moments, labels in _layers_reading(group, channel_map, stats):
        at = np.searchsorted(group.labels, labels).clip(max=group.labels.size - 1)
        places = np.where(group.labels[at] == labels, at, -1)
        found.append((moments.layer.weight, moments.layer.call, places.astype(np.int32).tobytes()))
    return "elimination", group.labels.size, tuple(found)


def layer_objectives(
    group: ChannelGroup, model: nn.Module, channel_map: ChannelMap, stats: PatchStats
) -> list[LayerObjective]:
    """Return the objectives of the layers that read a group's channels: its labels are on their weights' inputs."""
    tensors, modules = dict(named_tensors(model)), dict(model.named_modules())
    read = _layers_reading(group, channel_map, stats)
    found = [found for moments, labels in read for found in _by_group(moments, tensors, modules, labels)]
    alike: dict[Hashable, list[LayerObjective]] = {}
    for one in found:
        alike.setdefault((id(one.gram), one.biased, one.labels.tobytes()), []).append(one)
    return [_together(some) for some in alike.values()]


def _together(alike: Sequence[LayerObjective]) -> LayerObjective:
    """Return the objective of layers that read the same, with as many outputs as columns at most.

    Errors are sums of w G w^T over outputs w: they stay the same for the triangle of a QR decomposition.
    """
    return replace(alike[0], weight=_shortened(one.weight for one in alike))


def _shortened(parts: Iterable[Tensor]) -> Tensor:
    """Return rows in parts as one matrix W, or the triangle R with R^T R = W^T W where it has fewer rows."""
    found: Tensor | None = None
    for part in parts:
        found = part if found is None else torch.cat([found, part])
        if len(found) > found.shape[1]:
            found = torch.linalg.qr(found, mode="r").R
    assert found is not None
    return found


def _layers_reading(
    group: ChannelGroup, channel_map: ChannelMap, stats: PatchStats
) -> Iterator[tuple[LayerMoments, Labels]]:
    """Yield the layers that read channels of a group, with the labels on their input channels."""
    for moments in stats.layers:
        labels = channel_map.labels.get(moments.layer.weight, (None, None))[moments.layer.axes[1]]
        for deciding in [] if labels is None else channel_map.deciding(labels):
            if np.isin(deciding, group.labels).any():
                yield moments, deciding


def unread_stacks(channel_map: ChannelMap, stats: PatchStats) -> tuple[str, ...]:
    """Return notes on stacks of matrices, such as experts, with channels that no layer with moments reads.

    Their labels score +inf, so that all other channels go before them.
    """
    stacks = sorted(
        {
            name
            for group in channel_map.groups
            if not any(_layers_reading(group, channel_map, stats))
            for name, axis in group.slots
            if len(channel_map.shapes[name]) == 3 and axis > 0
        }
    )
    if not stacks:
        return ()
    return (
        f"elimination: channels of {', '.join(stacks)} are not ranked, as no convolution or linear layer reads them, "
        "and stay until all others are gone; criterion='l2' or another one ranks all channels, and whole experts",
    )


def _by_group(
    moments: LayerMoments, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module], labels: Labels
) -> Iterable[LayerObjective]:
    layer = moments.layer
    weight = layer.matrix(tensors[layer.weight].detach())
    weight = weight.flatten(2) if weight.dim() > 2 else weight[:, :, None]
    scale = relative_scale(moments, modules) * moments.output_gain ** (TRUST / 2)
    biased, groups = layer.bias is not None or layer.norm is not None, len(moments.grams)
    for matrix, rows, factors in zip(moments.grams, weight.chunk(groups), scale.chunk(groups), strict=True):
        step = max(1, PART // rows[0].numel())
        parts = (
            some.to(by) * by[:, None, None]
            for some, by in zip(torch.split(rows, step), torch.split(factors, step), strict=True)
        )
        if moments.taps == 1:  # without the taps' own statistics each of them is a layer of its own
            parts = (some.transpose(1, 2).flatten(0, 1)[:, :, None] for some in parts)
        yield LayerObjective(matrix, _shortened(some.flatten(1) for some in parts), labels, biased)


def weighted_output_count(group: ChannelGroup, channel_map: ChannelMap, stats: PatchStats) -> float:
    """Return over how many outputs the errors of a group are summed: those of its readers, weighted by their gains."""
    reading = [moments for moments, _ in _layers_reading(group, channel_map, stats)]
    return float(sum(moments.outputs * moments.output_gain**TRUST for moments in reading))


def eliminate(labels: Labels, objectives: Sequence[LayerObjective]) -> Elimination:
    """Remove labels one by one, always the one that costs least once the others make up for it.

    Of wide groups several are removed at once, see `AT_ONCE`; their cost together is spread evenly over them.

    Optimal brain surgeon (Hassibi & Stork 1993) for whole groups of columns, as SparseGPT (Frantar & Alistarh 2023)
    does it for single ones: removing the columns c of a layer costs tr(W_c [(G^-1)_cc]^-1 W_c^T), and W and G^-1
    are updated for the next. The constant is never removed; a layer without a bias has none. Costs of several layers
    are added up.

    Args:
        labels: (n,) of one group.
        objectives: of all layers that read them.
    """
    wide = sum(_state_bytes(one.weight.shape[0], len(one.gram)) for one in objectives) > WIDE
    states = [_ObjectiveState(one, labels, torch.float32 if wide else torch.float64) for one in objectives]
    left, order, errors, total = np.arange(labels.size), list[int](), list[float](), 0.0
    while left.size:
        costs = sum(state.costs(left) for state in states)
        count = max(1, left.size // AT_ONCE)
        chosen = left[np.argsort(costs, kind="stable")[:count]]
        cost = max(0.0, sum(state.remove(chosen) for state in states))
        errors += [total + cost * (i + 1) / count for i in range(count)]
        total += cost
        order += chosen.tolist()
        left = np.setdiff1d(left, chosen)
    return Elimination(labels[order], np.array(errors))


class _ObjectiveState:
    """The objective of one layer while its channels are removed, in `kind` once its matrix is inverted in float64."""

    def __init__(self, objective: LayerObjective, labels: Labels, kind: torch.dtype = torch.float64) -> None:
        columns = len(objective.gram) - 1
        size = columns + objective.biased
        gram = with_ridge(objective.gram.double())[:size, :size]
        every = torch.arange(columns, device=gram.device).reshape(len(objective.labels), -1)
        self._inverse = _inverse(gram).to(kind)
        constant = objective.weight.new_zeros(len(objective.weight), size - columns)
        self._weight = torch.cat([objective.weight, constant], 1).to(kind)
        read = [every[torch.from_numpy(objective.labels == label)].reshape(-1) for label in labels]
        self._sizes = np.array([found.numel() for found in read])
        self._columns = {
            int(size): torch.stack([found for found in read if found.numel() == size])
            for size in np.unique(self._sizes)
        }
        self._place = np.array([np.count_nonzero(self._sizes[:i] == size) for i, size in enumerate(self._sizes)])
        self._gone = torch.zeros(size, dtype=torch.bool, device=gram.device)

    def costs(self, left: IntArray) -> FloatArray:
        """Return the cost of removing each of these labels alone, (len(left),)."""
        costs = np.zeros(left.size)
        for which, columns in self._columns_of(left):  # (n, size)
            size = columns.shape[1]
            if size:
                if size == 1:  # a division each; whole columns are summed, as picking them takes longer
                    found = torch.linalg.vector_norm(self._weight, dim=0).square() / self._inverse.diagonal()
                    costs[which] = found[columns[:, 0]].cpu().numpy()
                    continue
                weights = self._weight[:, columns].transpose(0, 1)  # (n, o, size)
                blocks = self._inverse[columns[:, :, None], columns[:, None, :]]
                solved = solve_positive(blocks, weights.mT @ weights)  # far fewer right sides than outputs
                costs[which] = solved.diagonal(dim1=1, dim2=2).sum(1).cpu().numpy()
        return costs

    def _columns_of(self, chosen: IntArray) -> Iterator[tuple[IntArray, Tensor]]:
        """Yield which of some labels have as many columns, and these, (n, size), size by size."""
        for size, columns in self._columns.items():
            which = np.flatnonzero(self._sizes[chosen] == size)
            if which.size:
                yield which, columns[torch.from_numpy(self._place[chosen[which]]).to(columns.device)]

    def remove(self, chosen: IntArray) -> float:
        """Remove the columns of some labels at once, let the others make up for them, and return the cost."""
        columns = torch.cat([found.flatten() for _, found in self._columns_of(chosen)])
        if not columns.numel():
            return 0.0
        weights, block = self._weight[:, columns], self._inverse[columns][:, columns]
        solved = solve_positive(block, torch.cat([weights.T, self._inverse[columns]], 1))
        own, update = torch.split(solved, [len(weights), self._inverse.shape[1]], 1)
        cost = float((own.T * weights).sum())
        self._weight.addmm_(weights, update, alpha=-1)  # in place: they are large, and this is done hundreds of times
        self._inverse.addmm_(self._inverse[:, columns], update, alpha=-1)
        self._gone[columns] = True
        if int(self._gone.sum()) > GONE * len(self._gone):
            self._forget()
        return cost

    def _forget(self) -> None:
        """Drop the columns that were removed: nothing needs them again, and products over them take time."""
        left = (~self._gone).nonzero().flatten()
        places = (~self._gone).cumsum(0) - 1
        self._inverse = self._inverse.index_select(0, left).index_select(1, left)
        self._weight = self._weight.index_select(1, left)
        self._columns = {size: places[found] for size, found in self._columns.items()}
        self._gone = torch.zeros(len(left), dtype=torch.bool, device=left.device)


def most_state_bytes(channel_map: ChannelMap) -> int:
    """Return the memory that the order of elimination takes at most, for the group that most layers read.

    Layers of one module that read the same channels, as those of queries, keys and values do, count as one.
    """
    group_of = np.full(channel_map.n_labels, -1)
    for index, group in enumerate(channel_map.groups):
        group_of[group.labels] = index
    found: dict[Hashable, tuple[set[int], int, int]] = {}
    for name, axes in channel_map.labels.items():
        if len(axes) > 1 and axes[1] is not None:
            outputs, *columns = channel_map.shapes[name]
            for read in channel_map.deciding(axes[1]):
                key = name.rpartition(".")[0].rpartition(".")[0], read.tobytes()
                before = found.get(key, (set[int](), 0, 0))[1]
                found[key] = set(group_of[read].tolist()) - {-1}, before + outputs, math.prod(columns)
    totals = dict.fromkeys(range(len(channel_map.groups)), 0)
    for groups, outputs, columns_read in found.values():
        for index in groups:
            totals[index] += _state_bytes(min(outputs, columns_read), columns_read + 1)
    most = max(totals.values(), default=0)
    return most // 2 if most > WIDE else most


def _state_bytes(outputs: int, columns: int) -> int:
    """Return the bytes of one layer's matrices in float64: its weight and the inverse."""
    return 8 * columns * (outputs + columns)


def _inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a symmetric matrix that is positive definite up to rounding errors."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    inverse: Tensor = torch.linalg.inv(matrix) if int(failed) else torch.cholesky_inverse(factor)
    return inverse

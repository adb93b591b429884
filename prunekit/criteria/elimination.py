"""Elimination: channels of a group are removed one after another, always the one that adds least output error.

A layer computes W x, and G is the mean of x x^T over the samples, with a ridge. When the columns c of W are removed and
all others are fitted again by least squares, the mean squared error of the outputs grows by

    cost(c) = tr(H_cc^-1 P_cc)              with H = G^-1 and P = W^T W,

and what is left is a problem of the same form, whose H and P follow from the old ones (optimal brain surgeon):

    S = H_cc^-1 H_c                         (k, d)  how the other columns take over the k removed ones
    Q = P_c - P_cc S / 2                    (k, d)
    H  becomes  H - H_c^T S                 rows and columns c are 0 from now on
    P  becomes  P - Q^T S - S^T Q

W itself is never fitted: the blocks of H and P on the diagonal are all that costs need.

    labels     a  a  b  b  c  c  1          one label has two columns here, as of a kernel with two taps; the last
    H, P     [ aa ....             ]        column is the constant, which stays. cost(b) reads the block bb of both;
             [ .. bb ....          ]        removing b changes all other blocks
             [ .. .. cc ....       ]

Several layers may read a group: each has its own H and P, costs are added up, and all remove the same label.

Whole experts are channels of the sum that a mixture makes of them: the column of one is what it adds to the rows that
are routed to it (the saliency of REAP, Lasby et al. 2025, without gates), and no expert makes up for another.

Changing both d x d matrices after every removal would take nearly all the time. So their changes wait as rows H_c, S
and Q until there are `PENDING`, and until then only the blocks on the diagonal and the rows c are brought up to date.

1. H = `_inverse` - H_c^T S, and P = M + M^T with M = `_halves` - Q^T S, summed over the rows that wait.
2. `_blocks` are the blocks of these H and P, rows that wait included.
3. No column is asked for once it is gone, so that it may be dropped from all matrices.
4. Costs add up: their sum is the error of the layer without all removed columns, the others fitted to the dense output.
   It is an error on the samples of the fit, and larger on others: `held_out_growth` tells by how much.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.channel_map import ChannelGroup, ChannelMap
from prunekit.criteria.criterion import Evidence, Scores, register_criterion
from prunekit.distributed.shared_work import owned, shared_values, wait_for_workers
from prunekit.hooks.model_copy import named_tensors
from prunekit.statistics.gram_matrices import LayerMoments, PatchStats
from prunekit.statistics.layer_errors import few_rows, predicted_columns, relative_scale, ridge_of
from prunekit.statistics.layer_stats import FloatArray, IntArray
from prunekit.statistics.patches import mean_products, solve_positive
from prunekit.utils.progress import tracked

TRUST = 0.5
"""Exponent of layers' gains: those of the repaired network lie between the measured ones and 1, as repair corrects
in later layers what earlier ones got wrong."""
GONE = 0.25
"""Share of a matrix's columns that may be removed before the matrix is made smaller."""
WIDE = 2**29
"""Bytes of the matrices of all layers that read a group; where they would take more, they are in float32."""
PENDING = 64
"""Columns that are removed before the matrices change: until then only what is asked for is computed."""
PART = 2**24
"""Values of a weight that are scaled at a time."""
CHECKED = 7
"""Numbers of removals, evenly spaced, after which errors are computed on held-out samples."""
AT_ONCE = 64
"""One of so many remaining labels is removed at a time; of wide groups several, as one by one takes too long."""


@dataclass(frozen=True, eq=False)
class LayerObjective:
    """The output error of a layer that reads channels of a group, as a quadratic function of its weight."""

    gram: Tensor  # (d + 1, d + 1) mean products of the columns it reads and of a constant
    # (d, d) float64, W^T W of its weight in units of the end of its chain, each output over its standard deviation
    # there, or times the gain of a norm over channels that reads it, see `RowNorm`; weighted by how much an error of
    # this layer changes the model's output, see `TRUST`
    products: Tensor
    labels: IntArray  # (C,) of its input channels; d is C times the columns of each
    biased: bool = True  # whether a bias, its own or that of a norm, makes up for the mean of what is removed
    # parts of (N, d + 1), rows that `gram` has the mean products of, but for a ridge, where they are fewer than columns
    # and each label has one; `products` are then the weight itself, (outputs, d)
    read: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class Elimination:
    """The labels of a group in the order in which they are removed, and the error after each."""

    labels: Labels  # (n,), the first is removed first
    # (n,) after removing as many, with all that is left fitted again: summed over the outputs of all layers that read
    # them, each over its variance and weighted as in `LayerObjective`
    errors: FloatArray
    outputs: float = 1.0  # over how many outputs they are summed, each counted as its layer's gain counts


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
    model: nn.Module,
    channel_map: ChannelMap,
    stats: PatchStats,
    groups: Iterable[ChannelGroup] | None = None,
    most: Mapping[str, int] | None = None,
) -> dict[str, Elimination]:
    """Return the order of removal and its errors for every channel group that some layer reads, by the group's name.

    `most` is how many labels of each group are removed, as in `eliminate`. What was found before is taken from the
    statistics, where the same channels are read by the same layers. Processes that share the work divide the groups
    among them.
    """
    groups, known, found = channel_map.groups if groups is None else list(groups), stats.computed, {}
    counts = [None if most is None else most[group.name] for group in groups]
    keys = [(_read_columns(group, channel_map, stats), count) for group, count in zip(groups, counts, strict=True)]
    rest = [
        place
        for place, key in enumerate(keys)
        if key not in known or (stats.parts and known[key] and ("growth", key) not in known)
    ]
    costs = [sum(len(one.grams[0]) ** 3.0 for one, *_ in _layers_reading(groups[i], channel_map, stats)) for i in rest]
    own = dict[Hashable, Any]()
    for place in tracked([rest[i] for i in owned(costs)], "elimination", unit="group"):
        group, key = groups[place], keys[place]
        order = known[key] if key in known else _ordered(group, model, channel_map, stats, counts[place])
        own[key] = order
        if stats.parts and order is not None:
            parts = [layer_objectives(group, model, channel_map, part) for part in stats.parts]
            growth = held_out_growth(Elimination(group.labels[order[0]], order[1]), *parts)
            own["growth", key] = np.maximum.accumulate(order[1] * growth)
        stats.memory.release()
        for each in stats.parts:
            each.memory.release()
    wait_for_workers()  # as long as the largest group takes
    for part in shared_values(own):
        known.update(part)
    for group, key in zip(groups, keys, strict=True):
        if known[key] is not None:
            places, errors = known[key]
            errors = known["growth", key] if stats.parts else errors
            found[group.name] = Elimination(
                group.labels[places], errors, weighted_output_count(group, channel_map, stats)
            )
    return found


def _ordered(
    group: ChannelGroup, model: nn.Module, channel_map: ChannelMap, stats: PatchStats, most: int | None
) -> tuple[IntArray, FloatArray] | None:
    """Return the places of a group's labels in the order in which they are removed, and its errors."""
    objectives = layer_objectives(group, model, channel_map, stats)
    if not objectives:
        return None
    order = eliminate(group.labels, objectives, most)
    return np.searchsorted(group.labels, order.labels), order.errors


def _read_columns(group: ChannelGroup, channel_map: ChannelMap, stats: PatchStats) -> Hashable:
    """Return a key of the columns at which each layer reads which of a group's channels; it names no labels."""
    found = []
    for moments, axis, labels in _layers_reading(group, channel_map, stats):
        at = np.searchsorted(group.labels, labels).clip(max=group.labels.size - 1)
        places = np.where(group.labels[at] == labels, at, -1)
        found.append((moments.layer.weight, moments.layer.call, axis, places.astype(np.int32).tobytes()))
    return "elimination", group.labels.size, tuple(found)


def layer_objectives(
    group: ChannelGroup, model: nn.Module, channel_map: ChannelMap, stats: PatchStats
) -> list[LayerObjective]:
    """Return the objectives of the layers that read a group's channels, or whose stacks have a matrix for each."""
    tensors, modules = dict(named_tensors(model)), dict(model.named_modules())
    read = _layers_reading(group, channel_map, stats)
    found = [
        found
        for moments, axis, labels in read
        for found in (_by_group if axis == moments.layer.axes[1] else _by_matrix)(moments, tensors, modules, labels)
    ]
    alike: dict[Hashable, LayerObjective] = {}
    for one in found:  # errors are sums of w G w^T over outputs w, so that products of layers that read the same add up
        key = id(one.gram), one.biased, one.labels.tobytes(), bool(one.read)
        if (same := alike.get(key)) is not None:
            first, second = same.products, one.products
            one = replace(one, products=torch.cat([first, second]) if one.read else first + second)
        alike[key] = one
    return list(alike.values())


def _layers_reading(
    group: ChannelGroup, channel_map: ChannelMap, stats: PatchStats
) -> Iterator[tuple[LayerMoments, int, Labels]]:
    """Yield the layers that read channels of a group, with the axis of their input channels and the labels on it.

    Of experts in stacks it is the last stack of each module, whose outputs are summed, and axis 0.
    """
    last = {one.layer.weight.rpartition(".")[0]: one for one in stats.layers if one.layer.stack}
    own = np.zeros(channel_map.n_labels, dtype=bool)
    own[group.labels] = True
    for moments in stats.layers:
        summed = last.get(moments.layer.weight.rpartition(".")[0]) is moments
        for axis in (0, moments.layer.axes[1]) if summed else (moments.layer.axes[1],):
            labels = channel_map.labels.get(moments.layer.weight, (None,) * (axis + 1))[axis]
            for deciding in [] if labels is None else channel_map.deciding(labels):
                if own[deciding].any():
                    yield moments, axis, deciding


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
        "and stay until all others are gone; criterion='l2' or another one ranks all channels",
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
        kind = torch.promote_types(rows.dtype, torch.float32)
        parts = (
            some.to(by.device, kind) * by.to(kind)[:, None, None]
            for some, by in zip(torch.split(rows, step), torch.split(factors, step), strict=True)
        )
        few = 2 * sum(map(len, moments.read)) + len(rows) <= 2 * len(labels)
        if moments.read and few and len(np.unique(labels)) == len(labels):
            yield LayerObjective(matrix, torch.cat([*parts]).flatten(1), labels, biased, moments.read)
            continue
        if moments.taps == 1:  # without the taps' own statistics each of them is a layer of its own
            parts = (some.transpose(1, 2).flatten(0, 1)[:, :, None] for some in parts)
        products = (mean_products(some, some).mul_(len(some)) for some in (part.flatten(1) for part in parts))
        yield LayerObjective(matrix, reduce(Tensor.add_, products), labels, biased)


def _by_matrix(
    moments: LayerMoments, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module], labels: Labels
) -> Iterable[LayerObjective]:
    """Yield the objective of whole matrices of a stack: a column for each, with the mean square of what it adds."""
    matrices = moments.layer.matrix(tensors[moments.layer.weight].detach()).chunk(moments.layer.stack)
    scale = relative_scale(moments, modules) * moments.output_gain ** (TRUST / 2)
    parts = zip(moments.grams, matrices, scale.chunk(moments.layer.stack), strict=True)
    added = [(rows.to(by) @ gram[:-1, :-1] * rows.to(by)).sum(1) @ by.square() for gram, rows, by in parts]
    yield LayerObjective(torch.stack([*added, scale.new_ones(())]).diag(), torch.eye(len(added)).to(scale), labels)


def weighted_output_count(group: ChannelGroup, channel_map: ChannelMap, stats: PatchStats) -> float:
    """Return over how many outputs the errors of a group are summed: those of its readers, weighted by their gains."""
    reading = [moments for moments, _, _ in _layers_reading(group, channel_map, stats)]
    return float(sum(moments.outputs * moments.output_gain**TRUST for moments in reading))


def eliminate(labels: Labels, objectives: Sequence[LayerObjective], most: int | None = None) -> Elimination:
    """Remove labels one by one, always the one that costs least once the others make up for it.

    Of wide groups several are removed at once, see `AT_ONCE`; their cost together is spread evenly over them. Those
    that are left after `most` come last, with errors of +inf.

    Optimal brain surgeon (Hassibi & Stork 1993) for whole groups of columns, as SparseGPT (Frantar & Alistarh 2023)
    does it for single ones; see the head of this module.
    """
    kind = torch.float32 if sum(_state_bytes(len(one.gram)) for one in objectives) > WIDE else torch.float64
    alike: dict[Hashable, list[LayerObjective]] = {}
    for one in [one for one in objectives if not one.read]:
        key = one.labels.tobytes(), one.biased, one.gram.device, bytes(_seen(one).cpu().numpy())
        alike.setdefault(key, []).append(one)
    states: list[_ObjectiveStates | _FewRowsState] = [_ObjectiveStates(same, labels, kind) for same in alike.values()]
    states += [_FewRowsState(one, labels, kind) for one in objectives if one.read]
    left, order, errors, total = np.arange(labels.size), list[int](), list[float](), 0.0
    while left.size > (0 if most is None else labels.size - most):
        costs = sum(state.costs(left) for state in states)
        count = max(1, left.size // AT_ONCE)
        chosen = left[np.argsort(costs, kind="stable")[:count]]
        cost = max(0.0, sum(state.remove(chosen) for state in states))
        errors += [total + cost * (i + 1) / count for i in range(count)]
        total += cost
        order += chosen.tolist()
        left = np.setdiff1d(left, chosen)
    return Elimination(labels[order + left.tolist()], np.array(errors + [np.inf] * left.size))


def held_out_growth(order: Elimination, fitted: Sequence[LayerObjective], held: Sequence[LayerObjective]) -> FloatArray:
    """Return by what factor errors on held-out samples exceed those on samples of the fit, (n,), at least 1.

    A fit of many columns to few samples is better on these than on others: hundreds of pooled features predict each
    other exactly on as many images. So late layers, which have few positions, would seem to lose nothing. The factor
    is computed after `CHECKED` numbers of removals, and interpolated between them.
    """
    count = order.labels.size
    steps = np.unique(np.linspace(0, count, CHECKED + 2)[1:-1].round().clip(1))
    growth = []
    for step in steps.astype(int):
        errors = np.zeros(2)
        for one, other in zip(fitted, held, strict=True):
            gone = torch.from_numpy(np.isin(one.labels, order.labels[:step])).to(one.gram.device)
            gone = gone.repeat_interleave(one.products.shape[1] // len(gone))
            products, (left, lost) = one.products[gone][:, gone], (by.nonzero().flatten() for by in (~gone, gone))
            left = torch.cat([left, left.new_tensor([len(gone)])])  # with the constant
            own = one.gram.double()
            factors = predicted_columns(own, ~gone, biased=one.biased)[left]
            weighted = factors @ products
            for place, gram in enumerate([own, other.gram]):
                rows = gram[left].double()
                errors[place] += float((gram[lost][:, lost].double() * products).sum())
                errors[place] += float((weighted * (rows[:, left] @ factors - 2 * rows[:, lost])).sum())
        growth.append(max(1.0, errors[1] / errors[0]) if errors[0] > 0 else 1.0)
    found: FloatArray = np.interp(np.arange(1, count + 1), steps, growth)
    return found


def _seen(objective: LayerObjective) -> Tensor:
    """Return which columns are not always zero, as those of taps that only ever read padding are."""
    return objective.gram.diagonal()[:-1] != 0


class _ObjectiveStates:
    """H and P of layers that read a group alike, while its channels are removed, see the head of this module.

    The layers are the first axis of all matrices, n: a step for each of them alone would be too small for a processor.
    """

    def __init__(self, objectives: Sequence[LayerObjective], labels: Labels, kind: torch.dtype) -> None:
        first, seen, rest = objectives[0], _seen(objectives[0]), len(objectives)
        kept = torch.cat([seen, seen.new_ones(int(first.biased))]).nonzero().flatten()  # others change no column
        size, columns = len(kept), len(kept) - first.biased
        self._inverse = first.gram.new_empty(rest, size, size, dtype=kind)  # (n, d, d) H without the changes that wait
        # (n, d, d) half of P likewise, which need not be symmetric, so that a change is one product instead of two; the
        # constant has no weight
        self._halves = self._inverse.new_zeros(rest, size, size)
        for place, one in enumerate(objectives):
            every = bool(seen.all())
            self._inverse[place] = _inverse(partial(_raised, one.gram, None if every else kept, size, columns))
            self._halves[place, :columns, :columns] = one.products if every else one.products[seen][:, seen]
        self._halves /= 2
        taps, places = (by.reshape(len(first.labels), -1) for by in (seen, seen.cumsum(0) - 1))
        own = [torch.from_numpy(first.labels == label).to(seen.device) for label in labels]
        read = [places[which][taps[which]] for which in own]
        # how many columns each label has; `_place` is its row in `_columns` and `_blocks`
        self._sizes = np.array([found.numel() for found in read])
        self._columns = {  # by the number of columns of a label: (labels, columns) where they are
            int(size): torch.stack([found for found in read if found.numel() == size])
            for size in np.unique(self._sizes)
            if size
        }
        self._place = np.array([np.count_nonzero(self._sizes[:i] == size) for i, size in enumerate(self._sizes)])
        self._gone = torch.zeros(size, dtype=torch.bool, device=seen.device)  # (d,)
        self._pending, self._rows = 0, self._inverse.new_empty(3, 1, 0, 0)  # (3, n, PENDING, d): H_c, S, Q that wait
        self._update()  # makes `_blocks`: by the number of columns of a label, (n, labels, columns, columns)

    def costs(self, left: IntArray) -> FloatArray:
        """Return the cost of removing each of these labels alone, (len(left),), in all layers."""
        costs = np.zeros(left.size)
        for size, which, places in self._places(left):
            inverse, products = self._blocks[size]
            if size == 1:
                costs[which] = (products / inverse).sum(0)[:, 0, 0].cpu().numpy()[places]
                continue
            some = torch.from_numpy(places).to(inverse.device)
            solved = solve_positive(inverse[:, some], products[:, some])
            costs[which] = solved.diagonal(dim1=2, dim2=3).sum((0, 2)).cpu().numpy()
        return costs

    def _places(self, chosen: IntArray) -> Iterator[tuple[int, IntArray, IntArray]]:
        """Yield how many columns some labels have, which of `chosen` these are, and their places among all of them."""
        for size in self._columns:
            which = np.flatnonzero(self._sizes[chosen] == size)
            if which.size:
                yield size, which, self._place[chosen[which]]

    def remove(self, chosen: IntArray) -> float:
        """Remove the columns c of some labels at once, let the others make up for them, and return the cost."""
        found = [self._columns[size][places].flatten() for size, _, places in self._places(chosen)]
        if not found:
            return 0.0
        columns = torch.cat(found)
        if self._pending + len(columns) > self._rows.shape[2]:
            self._update(len(columns))  # which may drop columns, so that others have new places
            columns = torch.cat([self._columns[size][places].flatten() for size, _, places in self._places(chosen)])
        start, end = self._pending, self._pending + len(columns)
        before, shares, halves = self._rows[:, :, :start]
        picked = shares[..., columns].mT  # (n, k, pending)
        inverse = torch.baddbmm(self._inverse[:, columns], picked, before, alpha=-1)  # (n, k, d) H_c, with all changes
        products = self._halves[:, columns] + self._halves.index_select(2, columns).mT
        products.baddbmm_(picked, halves, alpha=-1).baddbmm_(halves[..., columns].mT, shares, alpha=-1)  # (n, k, d) P_c
        solved = solve_positive(inverse[..., columns], torch.cat([products[..., columns], inverse], 2))
        own, share = torch.split(solved, [len(columns), inverse.shape[2]], 2)  # H_cc^-1 P_cc, and S
        half = torch.baddbmm(products, products[..., columns], share, alpha=-0.5)
        for rows, new in zip(self._rows, (inverse, share, half), strict=True):
            rows[:, start:end] = new
        self._pending = end
        for size, every in self._columns.items():
            one, two, three = (rows[..., every].permute(0, 2, 3, 1).flatten(0, 1) for rows in (inverse, share, half))
            blocks = [matrices.flatten(0, 1) for matrices in self._blocks[size]]  # (n labels, size, size)
            blocks[0].baddbmm_(one, two.mT, alpha=-1)
            blocks[1].baddbmm_(three, two.mT, alpha=-1).baddbmm_(two, three.mT, alpha=-1)
        self._gone[columns] = True
        return float(own.diagonal(dim1=1, dim2=2).sum())

    def _update(self, room: int = 0) -> None:
        """Bring both matrices up to date, without columns that are gone where they are many, and make room for rows."""
        if self._pending:
            before, shares, halves = self._rows[:, :, : self._pending]
            self._inverse.baddbmm_(before.mT, shares, alpha=-1)
            self._halves.baddbmm_(halves.mT, shares, alpha=-1)
            self._pending = 0
        if int(self._gone.sum()) > GONE * len(self._gone):
            self._forget()
        count, size, _ = self._inverse.shape
        self._rows = self._inverse.new_empty(3, count, max(PENDING, room), size)
        self._blocks = {}
        for size, every in self._columns.items():
            inverse, half = (by[:, every[:, :, None], every[:, None, :]] for by in (self._inverse, self._halves))
            self._blocks[size] = inverse, half + half.mT

    def _forget(self) -> None:
        """Drop the columns that were removed: nothing needs them again, and products over them take time."""
        left = (~self._gone).nonzero().flatten()
        places = (~self._gone).cumsum(0) - 1
        self._inverse = self._inverse.index_select(1, left).index_select(2, left)
        self._halves = self._halves.index_select(1, left).index_select(2, left)
        self._columns = {size: places[found].clamp(min=0) for size, found in self._columns.items()}
        self._gone = torch.zeros(len(left), dtype=torch.bool, device=left.device)


class _FewRowsState:
    """H and P of a layer whose few rows make neither of them, as removals need only some rows of both.

    With the rows X (N, d) and K = X X^T + r, see `FewRows`:

        H = (1 - X^T V) / r   with V = K^-1 X                    P = W^T W

    Removing c takes V_c S from V as it takes W_c S from W: 4 N + 2 outputs products for each of the d columns, not 4 d.
    """

    def __init__(self, one: LayerObjective, labels: Labels, kind: torch.dtype) -> None:
        rows, _, self._ridge = few_rows(one.read, one.gram, biased=one.biased)
        solved = solve_positive(rows.products(self._ridge), rows.read)
        self._inverse = (1 - torch.linalg.vecdot(rows.read, solved, dim=0)) / self._ridge  # (d,) the diagonal of H
        self._read, self._both = rows.read.to(kind), torch.cat([solved.to(kind), one.products.to(kind)])  # X; V and W
        self._place = np.full(labels.size, -1)  # the column of each label
        _, own, columns = np.intersect1d(labels, one.labels, return_indices=True)
        self._place[own] = columns

    def costs(self, left: IntArray) -> FloatArray:
        """Return the cost of removing each of these labels alone, (len(left),)."""
        places = self._place[left]
        weight = self._both[len(self._read) :]
        found = (torch.linalg.vecdot(weight, weight, dim=0) / self._inverse).cpu().numpy()
        costs: FloatArray = np.where(places < 0, 0.0, found[places])
        return costs

    def remove(self, chosen: IntArray) -> float:
        """Remove the columns c of some labels at once, let the others make up for them, and return the cost."""
        columns = torch.from_numpy(self._place[chosen]).to(self._read.device)
        columns, count = columns[columns >= 0], len(self._read)
        own = self._both[:, columns]
        inverse = self._read[:, columns].T @ self._both[:count] / -self._ridge  # (k, d) H_c
        inverse[torch.arange(len(columns)), columns] += 1 / self._ridge
        solved = solve_positive(inverse[:, columns], torch.cat([own[count:].T @ own[count:], inverse], 1))
        products, share = solved[:, : len(columns)], solved[:, len(columns) :]  # H_cc^-1 P_cc, and S
        self._both.addmm_(own, share, alpha=-1)
        self._inverse -= (inverse * share).sum(0)
        return float(products.trace())


def most_state_bytes(channel_map: ChannelMap) -> int:
    """Return the memory that the order of elimination takes at most, for the group that most layers read.

    Layers of one module that read the same channels, as those of queries, keys and values do, count as one.
    """
    found: dict[Hashable, tuple[set[int], int]] = {}
    for name, axes in channel_map.labels.items():
        if len(axes) > 1 and axes[1] is not None:
            columns = math.prod(channel_map.shapes[name][1:])
            for read in channel_map.deciding(axes[1]):
                key = name.rpartition(".")[0].rpartition(".")[0], read.tobytes()
                found[key] = set(channel_map.group_of[read].tolist()) - {-1}, columns
    totals = dict.fromkeys(range(len(channel_map.groups)), 0)
    for groups, columns in found.values():
        for index in groups:
            totals[index] += _state_bytes(columns + 1)
    most = max(totals.values(), default=0)
    return most // 2 + (most if most <= WIDE else most // 2)  # with the objectives, which are in float64


def _state_bytes(columns: int) -> int:
    """Return the bytes of one layer's matrices in float64: the products of its weight and the inverse."""
    return 16 * columns**2


def _raised(gram: Tensor, kept: Tensor | None, size: int, columns: int) -> Tensor:
    """Return a copy in float64 of some rows and columns of a Gram matrix, or of the first, with the ridge of all."""
    whole = gram.double()
    found = whole[:size, :size].clone() if kept is None else whole[kept][:, kept]
    found.diagonal()[:columns] += ridge_of(whole)
    return found


def _inverse(make: Callable[[], Tensor]) -> Tensor:
    """Return the inverse of a symmetric matrix that is positive definite up to rounding errors.

    It takes the memory of the matrix that is made: an MLP of 7,168 channels has one of 400 MB.
    """
    found = make()
    failed = torch.empty((), dtype=torch.int32, device=found.device)
    torch.linalg.cholesky_ex(found, out=(found, failed))
    inverse: Tensor = torch.linalg.inv(make()) if int(failed) else torch.cholesky_inverse(found, out=found)
    return inverse

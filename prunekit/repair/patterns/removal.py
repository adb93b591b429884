"""Removal orders: in which order the weights of each output go, if the others take over each time.

Optimal brain surgeon (Hassibi & Stork 1993) for each output by itself, as in Frantar & Alistarh 2022, "Optimal Brain
Compression", here for several weights at a time, and for blocks that several outputs share.

The kept weights of each output are fitted by least squares in float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.planning.patterns.pattern import Pattern
from prunekit.statistics.patches import solve_positive

AT_ONCE = 16
"""One of so many remaining units of an output is removed at a time; of short rows one by one."""
CHUNK_BYTES = 2**27
"""Memory of the inverses of some outputs at a time."""
GONE = 0.1
"""Share of the columns that may be removed before the inverses are made smaller."""


@dataclass(frozen=True, eq=False)
class RemovalOrder:
    """The order in which units of weights are removed, for each row of outputs that share their zeros."""

    units: Tensor  # (r, n) which unit goes, the first first: an index of (inputs', taps') of `Pattern.units`, flattened
    costs: Tensor  # (r, n) squared error that it adds, never less than the one before

    def scores(self, units: int) -> Tensor:
        """Return the cost of each of that many units, (r, units); infinite for those that are never removed."""
        whole = self.costs.new_full((len(self.costs), units), torch.inf)
        return whole.scatter_(1, self.units, self.costs)


def removal_order(
    inverse: Tensor,
    weight: Tensor,
    scale: Tensor,
    pattern: Pattern,
    shape: tuple[int, int, int],
    at_once: int = AT_ONCE,
) -> RemovalOrder:
    """Return the order of removal of all units, or for N:M of as many as each group of M loses.

    `inverse` (d, d) or (o, d, d) is the inverse of the Gram matrix of the columns, of each output if they differ; a
    constant column may be last, and stays. `weight` (o, d) is fitted, input after input, the taps of each together;
    `shape` is (outputs, inputs, taps).
    """
    outputs, inputs, taps = shape
    columns = pattern_columns(pattern, inputs, taps).to(weight.device)  # (units, columns of each)
    rows = weight.view(outputs // pattern.outputs, pattern.outputs, -1)
    scales = scale.view(rows.shape[:2])
    kind = torch.float32 if weight.device.type == "cpu" else weight.dtype
    each = max(1, CHUNK_BYTES // (inverse.shape[-1] ** 2 * 8))
    found = []
    for start in range(0, len(rows), each):
        some = slice(start, start + each)
        inverses = inverse if inverse.dim() == 2 else inverse[some]  # blocks of several outputs share one Gram matrix
        state = _Rows(inverses.to(kind), rows[some].to(kind), scales[some].to(kind), columns)
        found.append(state.remove_all(pattern, inputs, taps, at_once))
    units, costs = (torch.cat([part[i] for part in found]) for i in (0, 1))
    return RemovalOrder(units, costs.double().cummax(1).values)


def pattern_columns(pattern: Pattern, inputs: int, taps: int) -> Tensor:
    """Return the columns of each unit of an output's weights, (units, columns), in the order of `Pattern.units`."""
    every = torch.arange(inputs * taps).view(inputs // pattern.inputs, pattern.inputs, taps)
    if pattern.whole_kernels:
        return every.flatten(1)
    return every.transpose(1, 2).flatten(0, 1)


class _Rows:
    """Rows of outputs while their weights are removed."""

    def __init__(self, inverse: Tensor, weight: Tensor, scale: Tensor, columns: Tensor) -> None:
        # inverse (d, d) or (r, d, d), weight (r, b, d) of b outputs that share zeros, scale (r, b), columns (units, c)
        rows, width = len(weight), weight.shape[2]
        self._inverse = inverse.expand(rows, width, width).clone()
        self._weight = weight * scale[:, :, None]
        self._units = torch.arange(len(columns), device=weight.device).expand(rows, -1)  # place -> unit
        self._columns = columns.expand(rows, -1, -1)  # place -> where its columns are now
        self._gone = torch.zeros_like(self._units, dtype=torch.bool)
        self._constants = width - columns.numel()

    def remove_all(self, pattern: Pattern, inputs: int, taps: int, at_once: int) -> tuple[Tensor, Tensor]:
        """Return units and costs, (r, n) each."""
        total = left = self._gone.shape[1]
        groups, budget = None, None
        if pattern.kept_of is not None:
            kept, of = pattern.kept_of
            groups = torch.arange(inputs * taps).view(inputs, taps) % taps + torch.arange(inputs)[:, None] // of * taps
            groups = groups.flatten().to(self._weight.device).expand(len(self._units), -1)
            budget = torch.full((len(self._units), inputs // of * taps), of - kept, device=self._weight.device)
            left = total * (of - kept) // of
        units, costs = [], []
        while left:
            count = max(1, left // at_once)
            picked = self._cheapest(count, groups, budget)
            units.append(self._units.gather(1, picked))
            costs.append(self._remove(picked)[:, None].expand(-1, picked.shape[1]) / picked.shape[1])
            if budget is not None and groups is not None:
                budget.scatter_add_(1, groups.gather(1, units[-1]), -torch.ones_like(picked))
            left -= picked.shape[1]
            if left and int(self._gone[0].sum()) > GONE * self._gone.shape[1]:
                self._forget()
        return torch.cat(units, 1), torch.cat(costs, 1)

    def _cheapest(self, count: int, groups: Tensor | None, budget: Tensor | None) -> Tensor:
        """Return the places of the units that add least error alone, (r, count): of each group one at most."""
        costs = self._costs().masked_fill(self._gone, torch.inf)
        if groups is None or budget is None:
            return costs.topk(count, 1, largest=False).indices
        of = groups.gather(1, self._units)
        costs = costs.masked_fill(budget.gather(1, of) <= 0, torch.inf)
        least = costs.new_full(budget.shape, torch.inf).scatter_reduce_(1, of, costs, "amin")
        places = torch.arange(costs.shape[1], device=costs.device).expand_as(costs)
        equal = places.masked_fill(costs > least.gather(1, of), costs.shape[1])
        first = torch.full_like(budget, costs.shape[1]).scatter_reduce_(1, of, equal, "amin")
        costs = costs.masked_fill(places != first.gather(1, of), torch.inf)
        open_groups = int((budget > 0).sum(1).min())
        return costs.topk(min(count, open_groups), 1, largest=False).indices

    def _costs(self) -> Tensor:
        """Return the error that each unit would add alone, (r, places)."""
        rows, places, size = self._columns.shape
        flat = self._columns.reshape(rows, 1, -1).expand(-1, self._weight.shape[1], -1)
        weights = self._weight.gather(2, flat).view(rows, -1, places, size)
        if size == 1:
            diagonal = self._inverse.diagonal(dim1=1, dim2=2).gather(1, self._columns[:, :, 0])
            return weights[..., 0].square().sum(1) / diagonal.clamp(min=torch.finfo(diagonal.dtype).tiny)
        which = torch.arange(rows, device=self._columns.device)[:, None, None, None]
        blocks = self._inverse[which, self._columns[:, :, :, None], self._columns[:, :, None, :]]
        blocks = torch.where(
            self._gone[:, :, None, None], torch.eye(size, dtype=blocks.dtype, device=blocks.device), blocks
        )
        solved = solve_positive(blocks, weights.permute(0, 2, 3, 1))
        costs: Tensor = (solved * weights.permute(0, 2, 3, 1)).sum((2, 3))
        return costs

    def _remove(self, picked: Tensor) -> Tensor:
        """Remove units, (r, count) places, let the others take over, and return the error that this adds, (r,)."""
        rows, size = len(picked), self._columns.shape[2]
        columns = self._columns.gather(1, picked[:, :, None].expand(-1, -1, size)).flatten(1)  # (r, k)
        across = self._inverse[torch.arange(rows, device=columns.device)[:, None], columns]  # (r, k, d)
        block = across.gather(2, columns[:, None].expand(-1, columns.shape[1], -1))
        weights = self._weight.gather(2, columns[:, None].expand(-1, self._weight.shape[1], -1))
        both = solve_positive(block, torch.cat([across, weights.transpose(1, 2)], 2))
        solved, own = torch.split(both, [across.shape[2], weights.shape[1]], 2)  # (r, k, d), (r, k, o)
        weighted = own * weights.transpose(1, 2)
        cost: Tensor = weighted.sum((1, 2)).clamp(min=0)
        self._weight.baddbmm_(weights, solved, alpha=-1)
        self._inverse.baddbmm_(across.transpose(1, 2), solved, alpha=-1)
        self._gone = self._gone.scatter(1, picked, torch.ones_like(picked, dtype=torch.bool))
        return cost

    def _forget(self) -> None:
        """Drop what was removed: every row has lost as much."""
        rows, size = len(self._gone), self._columns.shape[2]
        places = (~self._gone).nonzero()[:, 1].view(rows, -1)
        columns = self._columns.gather(1, places[:, :, None].expand(-1, -1, size))
        used = self._gone.new_zeros(rows, self._inverse.shape[1])
        used.scatter_(1, columns.flatten(1), True)
        used[:, used.shape[1] - self._constants :] = True
        kept = used.nonzero()[:, 1].view(rows, -1)
        now = used.cumsum(1) - 1
        self._columns = now.gather(1, columns.flatten(1)).view(columns.shape)
        self._units, self._gone = self._units.gather(1, places), torch.zeros_like(places, dtype=torch.bool)
        width = kept.shape[1]
        across = self._inverse[torch.arange(rows, device=kept.device)[:, None], kept]
        self._inverse = across.gather(2, kept[:, None].expand(-1, width, -1))
        self._weight = self._weight.gather(2, kept[:, None].expand(-1, self._weight.shape[1], -1))


ENTRIES = 2**20
"""Entries of the matrices that are factored at a time: 8 MiB."""
HELD = 2**25
"""Entries of factors up to which they are held for the next solution: 256 MiB."""
FACTORED = 2e11
"""Multiply-accumulates up to which each output's own matrix is factored; beyond, conjugate gradients take less time."""
STEPS = 60
"""Conjugate gradient steps at most."""
TOLERANCE = 1e-8
"""Share of the first residual's size at which they end."""


class MaskedLeastSquares:
    """Solutions W (o, d) of least squares that are 0 where `keep` is False.

    They minimize tr(W gram W^T) / 2 - tr(W R^T).
    """

    def __init__(self, gram: Tensor, keep: Tensor) -> None:
        self._gram, self._keep = gram, keep
        counts = keep.sum(1)
        self._exact = len(keep) * int(counts.max()) ** 3 / 3 <= FACTORED
        self._batches = _batches(counts) if self._exact else []
        self._factors: list[Tensor] | None = None
        if sum(len(rows) * most**2 for rows, most in self._batches) <= HELD:
            self._factors = [self._factor(rows, most) for rows, most in self._batches]

    def solve(self, right: Tensor, start: Tensor) -> Tensor:
        """Return the weights (o, d) for a right-hand side R (o, d); conjugate gradients begin at `start`."""
        if not self._exact:
            return _conjugate_gradients(self._gram, right, self._keep, start)
        found = torch.zeros_like(right)
        for i, (rows, most) in enumerate(self._batches):
            places, there = self._places(rows, most)
            factor = self._factor(rows, most) if self._factors is None else self._factors[i]
            wanted = torch.where(there, right[rows].gather(1, places), 0.0)
            solved = torch.cholesky_solve(wanted[:, :, None], factor)[:, :, 0]
            found[rows] = torch.zeros_like(found[rows]).scatter_(1, places, torch.where(there, solved, 0.0))
        return found

    def _places(self, rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the kept columns of some rows, (r, most), and which of these are kept: others pad."""
        places = self._keep[rows].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        return places, self._keep[rows].gather(1, places)

    def _factor(self, rows: Tensor, most: int) -> Tensor:
        """Return the Cholesky factors of the kept part of each row's matrix, padded by an identity, (r, most, most)."""
        places, there = self._places(rows, most)
        parts = [self._gram.index_select(0, one).index_select(1, one) for one in places]
        matrix = torch.where(there[:, :, None] & there[:, None, :], torch.stack(parts), 0.0)
        matrix.diagonal(dim1=1, dim2=2).add_((~there).to(matrix.dtype))
        factor: Tensor = torch.linalg.cholesky(matrix)
        return factor


def _batches(counts: Tensor) -> list[tuple[Tensor, int]]:
    """Return rows that are factored together, those with about as many kept weights, and the most that one keeps."""
    order, start, found = counts.argsort(descending=True), 0, []
    while start < len(order):
        most = max(1, int(counts[order[start]]))
        rows = order[start : start + max(1, ENTRIES // most**2)]
        found.append((rows, most))
        start += len(rows)
    return found


def grouped_masked_least_squares(gram: Tensor, right: Tensor, keep: Tensor) -> Tensor:
    """Solve as `MaskedLeastSquares` does for many small groups at once: (g, d, d), (g, o, d), (g, o, d)."""
    both = keep[..., :, None] & keep[..., None, :]  # (g, o, d, d)
    matrix = torch.where(both, gram[:, None], 0.0)
    matrix.diagonal(dim1=-2, dim2=-1).add_((~keep).to(gram.dtype))
    found = torch.cholesky_solve(torch.where(keep, right, 0.0)[..., None], torch.linalg.cholesky(matrix))
    return torch.where(keep, found[..., 0], 0.0)


def _conjugate_gradients(gram: Tensor, right: Tensor, keep: Tensor, start: Tensor) -> Tensor:
    """Return an approximate solution for all rows at once, preconditioned by the diagonal (Meng et al. 2024, ALPS)."""
    inverse = 1 / gram.diagonal()
    found = torch.where(keep, start, 0.0)
    left = torch.where(keep, right - found @ gram, 0.0)
    better = left * inverse
    direction, size = better, (left * better).sum(1, keepdim=True)
    first = size.clamp(min=torch.finfo(gram.dtype).tiny)
    for _ in range(STEPS):
        product = torch.where(keep, direction @ gram, 0.0)
        curvature = (direction * product).sum(1, keepdim=True)
        step = torch.where(curvature > 0, size / curvature, 0.0)
        found, left = found + step * direction, left - step * product
        better = left * inverse
        before, size = size, (left * better).sum(1, keepdim=True)
        if bool((size <= TOLERANCE**2 * first).all()):
            break
        direction = better + torch.where(before > 0, size / before, 0.0) * direction
    return found

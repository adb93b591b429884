"""Least squares and other fits of one layer's weights to the dense outputs: pure functions over sampled rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prunekit.distributed.shared_work import own_entries, shared_count, shared_mean, shared_rows, shared_sum
from prunekit.repair.repair_report import SAME, LayerRepair
from prunekit.statistics.patches import FewRows, apply_weight, gram, mean_products, product, with_constant
from prunekit.statistics.reductions import VarianceSum

RIDGES = (1, 10, 100)
"""Multiples of the ridge that are tried in turn; the one with the least error on held-out rows is used."""
MORE_RIDGES = (1000, 10000)
"""Multiples that are tried as long as the largest so far is the best: few rows hardly determine the weights."""
CHOOSING = 128
"""Outputs, evenly spaced ones, whose errors choose the ridge: twice as many are solved for at most."""
MOST = 10
"""Factor of a row over the usual one, at most: a position that is almost zero must not decide by itself."""
EXACT_RANK = 2048
"""Columns up to which the rank of a singular matrix comes from its eigenvalues, which take longer beyond."""
SINGULAR = 1e-12
"""Share of the largest eigenvalue up to which one counts as 0."""
NEGLIGIBLE = 1e-10
"""Error, as a share of the variance, below which a layer counts as equal to the dense one."""
FLAT = 1e-6
"""Share of the norm's largest factor below which an output does not determine its weights."""
MOST_GROUPS = 32
"""Convolutions with more groups, such as depthwise ones, are fitted in batches of small matrices."""
CHUNK = 2**22
"""Values of a float64 block of rows at a time, at most: 32 MiB."""


@dataclass(frozen=True, eq=False)
class FitProblem:
    """A fit of one layer at N sampled rows: its kept inputs, the end of its chain, and the target there.

    The chain is `scale * output + offset`, for a BatchNorm in eval mode and a sum with a shortcut.
    """

    inputs: Tensor  # (N, d) kept columns of the layer's inputs
    now: Tensor  # (N, o) the end of the chain with the present weights, in the type of products
    wanted: Tensor  # (N, o) the same in the dense network, in that type
    scale: Tensor  # (o,) derivative of the chain, float64
    fitted: int  # number of rows to fit on; the rest are held out
    rectified: bool = False  # whether only the positive part of it is used
    biased: bool = True  # whether there is a bias to write to, its own or the norm's
    # (N,) float64 factors of rows that count differently, in the inputs and both ends already; None: rows count alike
    factors: Tensor | None = None

    def weighted(self, factors: Tensor) -> FitProblem:
        """Return the fit in which rows count by the squares of factors, (N,), which are cut at `MOST` usual ones."""
        factors = factors.clamp(max=MOST * float(shared_rows(factors).median()))
        factors = factors / shared_mean(factors.square().mean(), len(factors)).sqrt()
        by_row = factors[:, None]
        inputs = self.inputs * by_row.to(self.inputs.dtype)
        now, wanted = (end * by_row.to(end.dtype) for end in (self.now, self.wanted))
        return replace(self, inputs=inputs, now=now, wanted=wanted, factors=factors)

    def columns(self) -> Tensor:
        """Return the inputs, with a constant last where there is a bias, (N, d + 1)."""
        if not self.biased:
            return self.inputs
        inputs = with_constant(self.inputs)
        if self.factors is not None:
            inputs[:, -1] = self.factors.to(inputs.dtype)
        return inputs

    def error(self) -> float:
        """Return the mean squared error of the next layers' input over held-out rows."""
        return mean_squared_error(self.now[self.fitted :], self.wanted[self.fitted :], rectified=self.rectified)


@dataclass(frozen=True, eq=False)
class WeightChange:
    """A change of a layer's weights, (o, d), and of its bias before the norm, (o,), with figures of the fit."""

    weight: Tensor
    bias: Tensor
    columns: int = 0
    rank: int = 0
    ridge: float = 0.0

    def error(self, problem: FitProblem) -> float:
        """Return the error after the change, see `FitProblem.error`."""
        judging = slice(problem.fitted, None)
        constant = self.bias if problem.factors is None else problem.factors[judging, None] * self.bias
        change = product(problem.inputs[judging], self.weight.T) + constant.to(problem.now)
        end = problem.now[judging] + problem.scale.to(problem.now) * change
        return mean_squared_error(end, problem.wanted[judging], rectified=problem.rectified)


def best_of(problem: FitProblem, change: WeightChange) -> tuple[WeightChange | None, float, float]:
    """Return the change if it lowers the error on held-out rows, else None; and the error before and after."""
    before, after = problem.error(), change.error(problem)
    better = after < before
    return (change if better else None), before, after if better else before


def determined(scale: Tensor) -> Tensor:
    """Return bool, True for outputs whose factor in the norm is large enough to determine their weights."""
    return scale.abs() > FLAT * scale.abs().max()


def bias_compensation(problem: FitProblem) -> WeightChange:
    """Make the mean of every output that of the dense network.

    Nagel et al. 2019, "Data-free quantization through weight equalization and bias correction", section 4.2, with
    means from data.
    """
    missing = shared_mean((problem.wanted - problem.now)[: problem.fitted].mean(0), problem.fitted) / problem.scale
    return WeightChange(missing.new_zeros(len(missing), problem.inputs.shape[1]), missing)


def moment_matching(problem: FitProblem, weight: Tensor) -> WeightChange:
    """Make mean and variance of every output those of the dense network on the same images.

    As in Finkelstein et al. 2019, "Fighting quantization bias with bias", and unlike BatchNorm's own recalibration:
    statistics of augmented training data are not those of the images at hand, and the dense network was trained with
    the former. `weight` (o, d) are the kept weights.
    """
    outputs = apply_weight(problem.inputs[: problem.fitted], weight.T) * problem.scale
    # The target of the layer itself: without offsets and summands.
    around = problem.wanted[: problem.fitted] - (problem.now[: problem.fitted] - outputs)
    return matched(problem, weight, *_mean_and_deviation(around))


def matched(problem: FitProblem, weight: Tensor, mean: Tensor, deviation: Tensor) -> WeightChange:
    """Give every output a mean and a standard deviation, (o,) each, without offsets and summands."""
    outputs = apply_weight(problem.inputs[: problem.fitted], weight.T) * problem.scale
    own, spread = _mean_and_deviation(outputs)
    factor = (deviation / spread).nan_to_num(1.0, 1.0, 1.0)
    return WeightChange((factor - 1)[:, None] * weight, (mean - factor * own) / problem.scale)


def variance_of(values: Tensor) -> VarianceSum:
    """Return mean and variance of (N, o) values over the rows of all processes."""
    found = VarianceSum()
    if len(values):
        found.add_rows(values.double())
    found.share(values.new_zeros(values.shape[1], dtype=torch.float64))
    return found


def _mean_and_deviation(values: Tensor) -> tuple[Tensor, Tensor]:
    found = variance_of(values)
    return found.mean, found.variance().sqrt()


def least_squares(problem: FitProblem, ridge: float, rectified_steps: int = 0) -> WeightChange:
    """Fit kept weights and bias to the dense outputs by least squares, with the present inputs.

    Luo et al. 2017, "ThiNet", and He et al. 2017, "Channel pruning for accelerating very deep neural networks", here
    for whole filters, with a constant column and a ridge that pulls toward the present weights. Behind a ReLU,
    outputs below a negative target count as met: a majorization of the error after the ReLU, as in the nonlinear case
    of Zhang et al. 2016, "Accelerating very deep convolutional networks". Each further step is kept if the error on
    held-out rows falls, and that error of `CHOOSING` outputs also chooses among `RIDGES` and `MORE_RIDGES`: each is
    tried if the one before it lowers the error.

    With fewer independent rows than columns the ridge is raised tenfold until the matrix can be factored. With fewer
    rows than columns it is the matrix of products of rows.
    """
    inputs = problem.columns()
    fitted, judging = slice(problem.fitted), slice(problem.fitted, None)
    read, rows, columns = inputs[fitted], shared_count(problem.fitted), problem.inputs.shape[1]
    few, unit = None, 1.0
    if rows < columns:
        all_read = shared_rows(read)
        few = FewRows.of(all_read[:, :columns], all_read[:, columns:])
        moments = shared_sum(few.products(columns=own_entries()))
        if mean := float(moments.diagonal().mean()):  # the ridge is a share of that of columns
            unit = float(all_read[:, :columns].square().mean(dtype=torch.float64)) / mean
        del all_read
    else:
        moments = shared_mean(mean_products(read, read), len(read))
    scale, every = problem.scale.to(problem.now), slice(None)
    some = slice(None, None, max(1, len(scale) // CHOOSING))

    def correlations(wanted: Tensor) -> Tensor:
        missing = (wanted - problem.now[fitted]).div_(scale).to(inputs.dtype)
        return shared_mean(mean_products(read, missing), len(read)) if few is None else shared_rows(missing)

    def solution(right: Tensor, factor: Tensor) -> Tensor:
        return torch.cholesky_solve(right, factor) if few is None else few.weights(right, factor)

    def end(found: Tensor, some: slice, outputs: slice = every) -> Tensor:
        return product(inputs[some], found).mul_(scale[outputs]).add_(problem.now[some, outputs])

    def error(found: Tensor, outputs: slice = every) -> float:
        got, wanted = end(found, judging, outputs), problem.wanted[judging, outputs]
        return mean_squared_error(got, wanted, rectified=problem.rectified)

    right = correlations(problem.wanted[fitted])
    biased = problem.biased and few is None
    rank = min(rows, _rank(moments) + (problem.biased > biased))
    raised = ridge if few is None else 10 * unit * ridge  # as `_factored` does for products of columns

    def solved(factor: float) -> tuple[float, _Solver]:
        solver = _factored(moments, raised * factor, rows, rank, biased)
        return error(solution(right[:, some], solver.factor), some), solver

    solver = _with_best_ridge(solved)
    found = solution(right, solver.factor)
    momentum, ahead = 1.0, found
    for _ in range(rectified_steps if problem.rectified else 0):
        reached = end(ahead, fitted).clamp(max=0)
        target = torch.where(problem.wanted[fitted] < 0, reached, problem.wanted[fitted])
        again = solution(correlations(target), solver.factor)
        if error(again) >= error(found):
            break
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = again + (momentum - 1) / following * (again - found)
        found, momentum = again, following
    bias = found[-1] if problem.biased else found.new_zeros(found.shape[1])
    return WeightChange(found[:columns].T, bias, columns, solver.rank, solver.ridge / unit)


def substitution(kept: Tensor, dense: Tensor, weight: Tensor, index: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Fit the dense inputs as a linear function of the kept channels, and return weights that include it.

    For layers whose patches are too wide for a Gram matrix: this one is over channels only, C x C. As the 1x1 layer of
    He et al. 2017, folded into the weights; the constant is that of the interior, where no tap is padding.
    `kept` (N, k) and `dense` (N, C) are the inputs in the running and in the dense model, `weight` (o, C, taps) is that
    of the dense layer. The result is weights (o, k, taps), and the change of the bias, (o,).
    """
    target = dense.double()
    identity = torch.zeros(kept.shape[1], target.shape[1], dtype=torch.float64, device=kept.device)
    identity[torch.arange(len(index)), index] = 1
    moments, rows = shared_mean(gram(kept), len(kept)), shared_count(len(kept))
    solver = _factored(moments, ridge, rows, min(rows, _rank(moments)), biased=True)
    missing = target - kept.double() @ identity
    right = shared_mean(with_constant(kept.double()).T @ missing / len(kept), len(kept))
    found = torch.cholesky_solve(right, solver.factor)
    mixing = found[:-1] + identity  # (k, C)
    return torch.einsum("kc,oct->okt", mixing, weight), torch.einsum("c,oct->o", found[-1], weight)


@dataclass(frozen=True, eq=False)
class _Solver:
    factor: Tensor
    rank: int
    ridge: float


def _with_best_ridge(solved: Callable[[float], tuple[float, _Solver]]) -> _Solver:
    """Return the solver with the ridge from which on larger ones have a larger error."""
    least, best = solved(RIDGES[0])
    for factor in (*RIDGES[1:], *MORE_RIDGES):
        error, solver = solved(factor)
        if not error < least:
            break
        least, best = error, solver
    return best


def _factored(moments: Tensor, ridge: float, rows: int, rank: int, biased: bool) -> _Solver:
    """Return the Cholesky factor of the Gram matrix with a ridge on all but the constant column."""
    if rows < len(moments):
        ridge *= 10
    while True:
        _, factor, failed = _damped(moments, ridge, biased=biased)
        if not int(failed):
            return _Solver(factor, rank, ridge)
        ridge *= 10


def _damped(gram: Tensor, ridge: float, *, biased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return Gram matrices (..., d, d) with a ridge, their Cholesky factors, and a number above 0 for failed ones."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    mean = diagonal[..., : diagonal.shape[-1] - biased].mean(-1, keepdim=True)
    pull = (ridge * torch.where(mean > 0, mean, 1.0)).expand_as(diagonal).clone()  # of dead inputs any value does
    if biased:
        pull[..., -1] = 0
    found = gram.clone()
    found.diagonal(dim1=-2, dim2=-1).add_(pull)
    return found, *torch.linalg.cholesky_ex(found)


def _rank(moments: Tensor) -> int:
    """Return the rank of a Gram matrix; for a large one that lacks some, the number of columns that are not dead."""
    least = moments.clone()
    least.diagonal().sub_(SINGULAR * float(moments.trace()))  # more than that share of the largest eigenvalue
    if not int(torch.linalg.cholesky_ex(least).info):  # all eigenvalues are larger, and this takes a tenth of the time
        return len(moments)
    if len(moments) > EXACT_RANK:
        return int((moments.diagonal() > 0).sum())
    values = torch.linalg.eigvalsh(moments)
    return int((values > SINGULAR * float(values[-1])).sum())


@dataclass(frozen=True, eq=False)
class GroupedProblem:
    """A fit of some groups of one layer at N sampled rows; all float64, and with an axis for groups first.

    Attributes as of `FitProblem`: inputs (g, N, d), now and wanted (g, N, o), and scale (g, o), which is 0 where it
    does not determine the weights.
    """

    inputs: Tensor
    now: Tensor
    wanted: Tensor
    scale: Tensor
    fitted: int
    rectified: bool
    biased: bool

    def columns(self) -> Tensor:
        """Return the inputs, with a constant last where there is a bias, (g, N, d)."""
        if not self.biased:
            return self.inputs
        return torch.cat([self.inputs, self.inputs.new_ones(*self.inputs.shape[:2], 1)], 2)

    def error(self, now: Tensor) -> Tensor:
        """Return the mean squared error of the next layers' input over held-out rows, (g,)."""
        held_out = now[:, self.fitted :], self.wanted[:, self.fitted :]
        squares = _squared_errors(*held_out, rectified=self.rectified)
        return shared_mean(squares.mean((1, 2)), squares.shape[1])


@dataclass(frozen=True, eq=False)
class GroupedChange:
    """Changes of weights (g, o, d) and biases (g, o), 0 for groups that do not improve."""

    weight: Tensor
    bias: Tensor
    before: Tensor  # (g,) error on held-out rows
    after: Tensor  # (g,) the same with the change
    spread: Tensor  # (g,) variance of the dense outputs
    wins: Tensor  # (g,) True for groups that improve


def grouped_least_squares(problem: GroupedProblem, ridge: float, rectified_steps: int = 0) -> GroupedChange:
    """Fit each group by itself as `least_squares` does, each with its own ridge and its own number of steps."""
    inputs, scale = problem.columns(), problem.scale[:, None]
    rows, inverse = slice(problem.fitted), torch.where(scale == 0, 0.0, 1 / scale)
    reading = inputs[:, rows].transpose(1, 2)  # (g, d, N)
    moments = shared_mean((reading @ inputs[:, rows] / problem.fitted).nan_to_num(0.0, 0.0, 0.0), problem.fitted)

    def solve(wanted: Tensor, factor: Tensor) -> Tensor:
        missing = ((wanted - problem.now) * inverse)[:, rows]
        return torch.cholesky_solve(shared_mean(reading @ missing / problem.fitted, problem.fitted), factor)

    def end(found: Tensor) -> Tensor:
        return problem.now + scale * (inputs @ found)

    spread = variance_of(problem.wanted.transpose(0, 1).flatten(1)).variance().view(len(scale), -1).mean(1)
    before = problem.error(problem.now)
    factors = torch.stack([ridged(moments, ridge * multiple, biased=problem.biased)[1] for multiple in RIDGES])
    trials = torch.stack([solve(problem.wanted, factor) for factor in factors])
    errors, best = torch.stack([problem.error(end(trial)) for trial in trials]).min(0)
    every = torch.arange(len(best), device=best.device)
    found, factor = trials[best, every], factors[best, every]
    for _ in range(rectified_steps if problem.rectified else 0):
        again = solve(torch.where(problem.wanted < 0, end(found).clamp(max=0), problem.wanted), factor)
        error = problem.error(end(again))
        wins = error < errors
        if not bool(wins.any()):
            break
        found, errors = torch.where(wins[:, None, None], again, found), torch.where(wins, error, errors)
    wins = (errors < before) & (before > NEGLIGIBLE * spread)
    found = torch.where(wins[:, None, None], found, 0.0).transpose(1, 2)
    bias = found[:, :, -1] if problem.biased else torch.zeros_like(problem.scale)
    weight = found[:, :, : problem.inputs.shape[2]]
    return GroupedChange(weight, bias, before, torch.where(wins, errors, before), spread, wins)


def ridged(gram: Tensor, ridge: float, *, biased: bool) -> tuple[Tensor, Tensor]:
    """Return Gram matrices (..., d, d) with a share of the mean diagonal added, and their Cholesky factors.

    More is added where they cannot be factored.
    """
    found, factor, info = _damped(gram, ridge, biased=biased)
    failed = (info > 0)[..., None, None]
    if not bool(failed.any()):
        return found, factor
    more, other = ridged(gram, 10 * ridge, biased=biased)
    return torch.where(failed, more, found), torch.where(failed, other, factor)


def chunks(groups: int, rows: int, columns: int, values: int = CHUNK) -> Iterator[slice]:
    """Return slices of groups whose rows make a block of at most `values` values."""
    size = max(1, values // (rows * (columns + 1)))
    return (slice(start, min(start + size, groups)) for start in range(0, groups, size))


def grouped_report(name: str, parts: list[GroupedChange]) -> LayerRepair:
    """Return one report for many groups."""
    before, after, spread, wins = (
        torch.cat([getattr(part, field) for part in parts]) for field in ("before", "after", "spread", "wins")
    )
    spread = spread.clamp(min=torch.finfo(torch.float64).tiny)
    if bool((before <= NEGLIGIBLE * spread).all()):
        return LayerRepair(name, note=SAME)
    note = f"{int(wins.sum())} of {len(wins)} groups" if bool(wins.any()) else "patch is no better on held-out images"
    columns = parts[0].weight.shape[2]
    applied = "patch" if bool(wins.any()) else ""
    total = float(spread.sum())
    return LayerRepair(name, applied, float(before.sum()) / total, float(after.sum()) / total, columns, note=note)


def mean_squared_error(got: Tensor, wanted: Tensor, *, rectified: bool) -> float:
    """Return the mean squared error, of the positive parts where a ReLU follows."""
    return float(shared_mean(_squared_errors(got, wanted, rectified=rectified).mean(dtype=torch.float64), len(got)))


def _squared_errors(got: Tensor, wanted: Tensor, *, rectified: bool) -> Tensor:
    if rectified:
        got, wanted = got.clamp(min=0), wanted.clamp(min=0)
    return (got - wanted).square()

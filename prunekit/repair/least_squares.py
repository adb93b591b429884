"""Fits of one layer's weights to what the dense layer computes: pure functions over sampled rows.

Least squares for convolutions of many small groups, depthwise ones above all: each group has few unknowns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.repair.repair_report import SAME, LayerRepair
from prunekit.statistics.layers.patches import apply_weight, gram, mean_products, with_constant

RIDGES = (1, 10, 100)
"""Multiples of the ridge that are tried: the error on held-out rows chooses."""
EXACT_RANK = 2048
"""Columns up to which a Gram matrix's rank is taken from its eigenvalues: beyond, they take longer than the fit."""

NEGLIGIBLE = 1e-10
"""Error, as a share of the variance, below which a layer computes what the dense one does."""
FLAT = 1e-6
"""Outputs whose factor in the norm is below this share of the largest one's say nothing about their weights."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One layer at N sampled rows: the kept inputs, what comes out at the end of its chain, and what should.

    The chain is `scale * output + whatever follows`: a BatchNorm in eval mode, and a sum with a shortcut.

    Attributes:
        inputs: (N, d) kept columns of what the layer reads.
        now: (N, o) the end of the chain with the weights as they are, float64.
        wanted: (N, o) what the dense network has there, float64.
        scale: (o,) derivative of the chain, float64.
        fitted: number of rows to fit on; the rest judge.
        rectified: whether only the positive part of it is used.
        biased: whether there is a bias to write to, its own or the norm's.
    """

    inputs: Tensor
    now: Tensor
    wanted: Tensor
    scale: Tensor
    fitted: int
    rectified: bool = False
    biased: bool = True

    def error(self) -> float:
        """Return the mean squared error over held-out rows of what the next layers see."""
        return _error(self.now[self.fitted :], self.wanted[self.fitted :], rectified=self.rectified)


def _error(got: Tensor, wanted: Tensor, *, rectified: bool) -> float:
    if rectified:
        got, wanted = got.clamp(min=0), wanted.clamp(min=0)
    return float((got - wanted).square().mean())


@dataclass(frozen=True, eq=False)
class Change:
    """A change of a layer's weights, (o, d), and of its bias before the norm, (o,); and how it was found."""

    weight: Tensor
    bias: Tensor
    columns: int = 0
    rank: int = 0
    ridge: float = 0.0

    def error(self, problem: Problem) -> float:
        """Error after the change, see `Problem.error`."""
        judging = slice(problem.fitted, None)
        end = problem.now[judging] + problem.scale * (apply_weight(problem.inputs[judging], self.weight.T) + self.bias)
        return _error(end, problem.wanted[judging], rectified=problem.rectified)


def bias_compensation(problem: Problem) -> Change:
    """Make the mean of every output that of the dense network.

    Nagel et al. 2019, "Data-free quantization through weight equalization and bias correction", section 4.2, with
    means from data.
    """
    missing = (problem.wanted - problem.now)[: problem.fitted].mean(0) / problem.scale
    return Change(missing.new_zeros(len(missing), problem.inputs.shape[1]), missing)


def moment_matching(problem: Problem, weight: Tensor) -> Change:
    """Make mean and variance of every output those of the dense network on the same images.

    As in Finkelstein et al. 2019, "Fighting quantization bias with bias", and unlike BatchNorm's own recalibration:
    statistics of augmented training data are not those of the images at hand, and the dense network was trained with
    the former.

    Args:
        weight: (o, d) the kept weights.
    """
    outputs = apply_weight(problem.inputs[: problem.fitted], weight.T) * problem.scale
    # What the layer itself should give, with whatever is added to it taken off.
    around = problem.wanted[: problem.fitted] - (problem.now[: problem.fitted] - outputs)
    return matched(problem, weight, around.mean(0), around.std(0))


def matched(problem: Problem, weight: Tensor, mean: Tensor, deviation: Tensor) -> Change:
    """Give every output a mean and a standard deviation, (o,) each, counted without what is added to it."""
    outputs = apply_weight(problem.inputs[: problem.fitted], weight.T) * problem.scale
    factor = (deviation / outputs.std(0)).nan_to_num(1.0, 1.0, 1.0)
    return Change((factor - 1)[:, None] * weight, (mean - factor * outputs.mean(0)) / problem.scale)


def least_squares(problem: Problem, ridge: float, rectified_steps: int = 0) -> Change:
    """Return the kept weights and bias that give the dense outputs with the least squared error, from the inputs as
    they are.

    Luo et al. 2017, "ThiNet", and He et al. 2017, "Channel pruning for accelerating very deep neural networks", here
    for whole filters, with a constant column and a ridge that pulls toward the weights as they are. Behind a ReLU the
    targets that are negative anyway may be missed from below: a majorization of the error after the ReLU, as the
    nonlinear case of Zhang et al. 2016, "Accelerating very deep convolutional networks". Each further step is kept if
    the error on held-out rows falls, and they choose among `RIDGES`.

    Where there are fewer independent rows than columns the ridge is raised tenfold until the matrix can be factored.
    """
    inputs = with_constant(problem.inputs) if problem.biased else problem.inputs
    fitted, judging = slice(problem.fitted), slice(problem.fitted, None)
    moments = mean_products(inputs[fitted], inputs[fitted])

    def correlations(wanted: Tensor) -> Tensor:
        return mean_products(inputs[fitted], ((wanted - problem.now[fitted]) / problem.scale).to(inputs.dtype))

    def end(found: Tensor, rows: slice) -> Tensor:
        return problem.now[rows] + problem.scale * apply_weight(inputs[rows], found)

    def error(found: Tensor) -> float:
        return _error(end(found, judging), problem.wanted[judging], rectified=problem.rectified)

    right, rank = correlations(problem.wanted[fitted]), min(problem.fitted, _rank(moments))
    solvers = (_factored(moments, ridge * factor, problem.fitted, rank, problem.biased) for factor in RIDGES)
    trials = (
        (torch.cholesky_solve(right, solver.factor), solver) for solver in solvers
    )  # each as large as the moments
    found, solver = min(trials, key=lambda trial: error(trial[0]))
    momentum, ahead = 1.0, found
    for _ in range(rectified_steps if problem.rectified else 0):
        reached = end(ahead, slice(problem.fitted)).clamp(max=0)
        target = torch.where(problem.wanted[fitted] < 0, reached, problem.wanted[fitted])
        again = torch.cholesky_solve(correlations(target), solver.factor)
        if error(again) >= error(found):
            break
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = again + (momentum - 1) / following * (again - found)
        found, momentum = again, following
    return _change(found, problem, solver)


def _change(found: Tensor, problem: Problem, solver: _Solver) -> Change:
    columns = problem.inputs.shape[1]
    bias = found[-1] if problem.biased else found.new_zeros(found.shape[1])
    return Change(found[:columns].T, bias, columns, solver.rank, solver.ridge)


@dataclass(frozen=True, eq=False)
class _Solver:
    factor: Tensor
    rank: int
    ridge: float


def _factored(moments: Tensor, ridge: float, rows: int, rank: int, biased: bool) -> _Solver:
    """Return the cholesky factor of the Gram matrix with its ridge, which is not on the constant column."""
    diagonal = moments.diagonal()
    mean = float(diagonal[: len(diagonal) - biased].mean()) or 1.0  # all inputs dead: anything does
    if rows < len(moments):
        ridge *= 10
    while True:
        pull = torch.full_like(diagonal, ridge * mean)
        if biased:
            pull[-1] = 0
        damped = moments.clone()
        damped.diagonal().add_(pull)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            return _Solver(factor, rank, ridge)
        ridge *= 10


def _rank(moments: Tensor) -> int:
    """Return the rank of a Gram matrix; of a large one an upper bound, the number of columns that are not dead."""
    if len(moments) > EXACT_RANK:
        return int((moments.diagonal() > 0).sum())
    values = torch.linalg.eigvalsh(moments)
    return int((values > 1e-12 * float(values[-1])).sum())


def substitution(kept: Tensor, dense: Tensor, weight: Tensor, index: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """New weights in which kept channels stand in for all: the dense inputs as a linear function of the kept ones.

    For layers whose patches are too many for a Gram matrix: theirs is over channels only, C x C. As the 1x1 layer of
    He et al. 2017, folded into the weights; the constant is that of the interior, where no tap is padding.

    Args:
        kept: (N, k) kept channels of the input, as the running model has them.
        dense: (N, C) all channels, as the dense model has them.
        weight: (o, C, taps) of the dense layer.
        index: (k,) which are kept.
        ridge: pull toward the identity.

    Returns:
        (o, k, taps) weights and (o,) change of the bias.
    """
    target = dense.double()
    identity = torch.zeros(kept.shape[1], target.shape[1], dtype=torch.float64, device=kept.device)
    identity[torch.arange(len(index)), index] = 1
    moments = gram(kept)
    solver = _factored(moments, ridge, len(kept), min(len(kept), _rank(moments)), biased=True)
    missing = target - kept.double() @ identity
    found = torch.cholesky_solve(with_constant(kept.double()).T @ missing / len(kept), solver.factor)
    mixing = found[:-1] + identity  # (k, C)
    return torch.einsum("kc,oct->okt", mixing, weight), torch.einsum("c,oct->o", found[-1], weight)


def best_of(problem: Problem, change: Change) -> tuple[Change | None, float, float]:
    """Return the change if it lowers the error on held-out rows, else None; and the error before and after."""
    before, after = problem.error(), change.error(problem)
    better = after < before
    return (change if better else None), before, after if better else before


MOST_GROUPS = 32
"""Convolutions of more groups are fitted all groups at once, in batches of small matrices."""
CHUNK = 2**22
"""Values of a float64 block of rows at a time, at most: 32 MiB."""


@dataclass(frozen=True, eq=False)
class GroupedProblem:
    """Some groups of one layer at N sampled rows, as `fits.Problem` has it for one; all float64.

    Attributes:
        inputs: (g, N, d) kept columns of what each group reads.
        now: (g, N, o) the end of the chain with the weights as they are.
        wanted: (g, N, o) what the dense network has there.
        scale: (g, o) derivative of the chain; 0 where it says nothing about the weights.
        fitted: number of rows to fit on; the rest judge.
        rectified: whether only the positive part of it is used.
        biased: whether there is a bias to write to.
    """

    inputs: Tensor
    now: Tensor
    wanted: Tensor
    scale: Tensor
    fitted: int
    rectified: bool
    biased: bool

    def error(self, now: Tensor) -> Tensor:
        """(g,) mean squared error over held-out rows of what the next layers see."""
        got, wanted = now[:, self.fitted :], self.wanted[:, self.fitted :]
        if self.rectified:
            got, wanted = got.clamp(min=0), wanted.clamp(min=0)
        return (got - wanted).square().mean((1, 2))


@dataclass(frozen=True, eq=False)
class GroupedChange:
    """Changes of weights (g, o, d) and biases (g, o), 0 where a group is no better for them.

    Attributes:
        before, after: (g,) error on held-out rows.
        spread: (g,) variance of the dense outputs.
        wins: (g,) which are better.
    """

    weight: Tensor
    bias: Tensor
    before: Tensor
    after: Tensor
    spread: Tensor
    wins: Tensor


def grouped_least_squares(problem: GroupedProblem, ridge: float, rectified_steps: int = 0) -> GroupedChange:
    """As `fits.least_squares`, for each group by itself: its own ridge, its own steps, and its own verdict."""
    inputs, scale = problem.inputs, problem.scale[:, None]
    if problem.biased:
        inputs = torch.cat([inputs, inputs.new_ones(*inputs.shape[:2], 1)], 2)
    rows, inverse = slice(problem.fitted), torch.where(scale == 0, 0.0, 1 / scale)
    reading = inputs[:, rows].transpose(1, 2)  # (g, d, N)
    moments = (reading @ inputs[:, rows] / problem.fitted).nan_to_num(0.0, 0.0, 0.0)

    def solve(wanted: Tensor, factor: Tensor) -> Tensor:
        missing = ((wanted - problem.now) * inverse)[:, rows]
        return torch.cholesky_solve(reading @ missing / problem.fitted, factor)

    def end(found: Tensor) -> Tensor:
        return problem.now + scale * (inputs @ found)

    before, spread = problem.error(problem.now), problem.wanted.var(1).mean(1)
    factors = torch.stack([_factored_grouped(moments, ridge * multiple, problem.biased) for multiple in RIDGES])
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


def _factored_grouped(moments: Tensor, ridge: float, biased: bool) -> Tensor:
    """(g, d, d) Cholesky factors with a ridge that is not on the constant; dead groups have a matrix of ones there."""
    diagonal = moments.diagonal(dim1=1, dim2=2)
    mean = diagonal[:, : diagonal.shape[1] - biased].mean(1, keepdim=True)
    pull = (ridge * torch.where(mean > 0, mean, 1.0)).expand_as(diagonal).clone()
    if biased:
        pull[:, -1] = 0
    factor, failed = torch.linalg.cholesky_ex(moments + torch.diag_embed(pull))
    if not bool(failed.any()):
        return factor  # type: ignore[no-any-return]
    found: Tensor = torch.where((failed > 0)[:, None, None], _factored_grouped(moments, 10 * ridge, biased), factor)
    return found


def chunks(groups: int, rows: int, columns: int, values: int = CHUNK) -> Iterator[slice]:
    """Return groups at a time whose rows make one block of so many values."""
    size = max(1, values // (rows * (columns + 1)))
    return (slice(start, min(start + size, groups)) for start in range(0, groups, size))


def grouped_report(name: str, parts: list[GroupedChange]) -> LayerRepair:
    """Return one line for many groups."""
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

"""Least squares for convolutions of many small groups, depthwise ones above all: each group has few unknowns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.repair.fits import NEGLIGIBLE, RIDGES
from prunekit.repair.report import SAME, LayerRepair

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
    factors = torch.stack([_factored(moments, ridge * multiple, problem.biased) for multiple in RIDGES])
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


def _factored(moments: Tensor, ridge: float, biased: bool) -> Tensor:
    """(g, d, d) Cholesky factors with a ridge that is not on the constant; dead groups have a matrix of ones there."""
    diagonal = moments.diagonal(dim1=1, dim2=2)
    mean = diagonal[:, : diagonal.shape[1] - biased].mean(1, keepdim=True)
    pull = (ridge * torch.where(mean > 0, mean, 1.0)).expand_as(diagonal).clone()
    if biased:
        pull[:, -1] = 0
    factor, failed = torch.linalg.cholesky_ex(moments + torch.diag_embed(pull))
    if not bool(failed.any()):
        return factor  # type: ignore[no-any-return]
    found: Tensor = torch.where((failed > 0)[:, None, None], _factored(moments, 10 * ridge, biased), factor)
    return found


def chunks(groups: int, rows: int, columns: int, values: int = CHUNK) -> Iterator[slice]:
    """Groups at a time whose rows make one block of so many values."""
    size = max(1, values // (rows * (columns + 1)))
    return (slice(start, min(start + size, groups)) for start in range(0, groups, size))


def grouped_report(name: str, parts: list[GroupedChange]) -> LayerRepair:
    """One line for many groups."""
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

"""The problem of one group of a layer: which of its weights go, and the fit of those that are kept.

In wide groups zeros are chosen column by column, as in Frantar & Alistarh 2023, "SparseGPT: massive language models can
be accurately pruned in one-shot"; many small groups, such as those of a depthwise convolution, are solved at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.planning.patterns.pattern import Pattern, highest
from prunekit.repair.least_squares import FitProblem, GroupedProblem, mean_squared_error, ridged
from prunekit.repair.patterns.removal import (
    MaskedLeastSquares,
    grouped_masked_least_squares,
    pattern_columns,
    removal_order,
)
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.patches import apply_weight, mean_products, with_constant

BLOCK = 128
"""Columns whose zeros are chosen together, about."""


def column_by_column(
    gram: Tensor, weight: Tensor, scale: Tensor, pattern: Pattern, shape: tuple[int, int, int], zeros: float
) -> tuple[Tensor, Tensor]:
    """Return a mask (o, i * taps), and the weights (o, d) after the kept ones have taken over for the removed.

    Within each block of columns those units go whose weights, squared, are least over the diagonal of the inverse of
    the Gram matrix of all later columns. `gram` (d, d) is positive definite, in float64; a constant column may be last,
    and stays. `weight` (o, d) has input after input, the taps of each together; `shape` is (outputs, inputs, taps).
    """
    outputs, inputs, taps = shape
    order, unit = _order(pattern, inputs, taps)
    columns = torch.cat([order, torch.arange(len(order), len(gram))]).to(gram.device)
    inverse = torch.linalg.inv(gram[columns][:, columns])
    factor = torch.linalg.cholesky((inverse + inverse.T) / 2).T  # upper: row j is what column j leaves to later ones
    weight = weight[:, columns].clone()
    keep = torch.ones(outputs, len(order), dtype=torch.bool, device=gram.device)
    step = max(unit, BLOCK // unit * unit)
    for start in range(0, len(order), step):
        end = min(start + step, len(order))
        errors = torch.zeros(outputs, end - start, dtype=weight.dtype, device=gram.device)
        chosen_at = unit if pattern.kept_of is not None else end - start
        for at in range(start, end):
            if (at - start) % chosen_at == 0:
                some = slice(at, at + chosen_at)
                losses = (weight[:, some] * scale[:, None] / factor.diagonal()[some]).square()
                keep[:, some] = _kept(pattern, losses, zeros, unit)
            errors[:, at - start] = torch.where(keep[:, at], 0.0, weight[:, at]) / factor[at, at]
            weight[:, at:end] -= errors[:, at - start, None] * factor[at, at:end]
        weight[:, end:] -= errors @ factor[start:end, end:]
    mask, found = torch.empty_like(keep), torch.empty_like(weight)
    mask[:, order], found[:, columns] = keep, weight
    found[:, : len(order)].masked_fill_(~mask, 0)
    return mask, found


def _order(pattern: Pattern, inputs: int, taps: int) -> tuple[Tensor, int]:
    """Return an order of the columns that puts those of a unit, or of a group of M, side by side; and their number."""
    if pattern.kept_of is not None:
        of = pattern.kept_of[1]
        return torch.arange(inputs * taps).view(inputs // of, of, taps).transpose(1, 2).flatten(), of
    columns = pattern_columns(pattern, inputs, taps)
    return columns.flatten(), columns.shape[1]


def _kept(pattern: Pattern, losses: Tensor, zeros: float, unit: int) -> Tensor:
    """Return which columns of a block are kept, (o, columns)."""
    if pattern.kept_of is not None:
        return pattern.mask(losses[:, :, None], zeros)[:, :, 0]
    outputs, columns = losses.shape
    units = losses.view(outputs // pattern.outputs, pattern.outputs, columns // unit, unit).sum((1, 3))
    return highest(units, zeros).repeat_interleave(pattern.outputs, 0).repeat_interleave(unit, 1)


RIDGES = (1, 10)
"""Multiples of the ridge that are tried; the one with the least error on held-out rows is used."""
UNSEEN = 1e-6
"""By how much the errors count of outputs whose norm has no factor, as a share of the largest."""

Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class ZerosProblem:
    """The choice of zeros in a group of a layer, or in several with an axis for them first, and the fit of the rest."""

    fit: FitProblem | GroupedProblem  # the layer's inputs, and what is wanted at the end of its chain
    inputs: Tensor  # (..., N, d) of the fit, with a constant last if there is a bias
    gram: Tensor  # (..., d, d) of the rows to fit on, float64
    present: Tensor  # (..., o, d) weights; the constant's are 0, as the present bias is part of the chain
    fitted: bool  # whether weights are fitted to what is wanted; else to what they compute now
    settings: RepairSettings  # of the fit

    @property
    def columns(self) -> int:
        """Number of columns without the constant."""
        return self.gram.shape[-1] - self.fit.biased

    def sizes(self, *, by_input: bool) -> Tensor:
        """Return the size of each weight, (outputs, columns), perhaps times the norm of its input (Sun et al. 2023)."""
        sizes = self.present[..., : self.columns].abs()
        if by_input:
            sizes = sizes * self.gram.diagonal(dim1=-2, dim2=-1)[..., None, : self.columns].sqrt()
        return sizes.flatten(0, -2)

    def _optimum(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the Gram matrix with a ridge, its factor, and the weights (..., o, d) that fit best, all kept."""
        gram, factor = ridged(self.gram, self.settings.ridge, biased=self.fit.biased)
        if not self.fitted:
            return gram, factor, self.present
        right = self.present @ gram + self._missing(self.fit.wanted)
        return gram, factor, torch.cholesky_solve(right.mT, factor).mT

    def _missing(self, target: Tensor) -> Tensor:
        """Return the mean products (..., o, d) of the inputs and what the present weights miss of a target."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class GroupProblem(ZerosProblem):
    """The choice of zeros in one group of a layer, and the fit of what is kept."""

    fit: FitProblem
    usable: Tensor  # bool (o,), whether the norm's factor determines an output's weights; the fit is about these

    @classmethod
    def of(
        cls, fit: FitProblem, present: Tensor, usable: Tensor, settings: RepairSettings, *, fitted: bool
    ) -> GroupProblem:
        """Return the problem of a fit and the present weights, (o, d) without a constant."""
        inputs = with_constant(fit.inputs) if fit.biased else fit.inputs
        rows = inputs[: fit.fitted]
        if fit.biased:
            present = torch.cat([present, present.new_zeros(len(present), 1)], 1)
        return cls(fit, inputs, mean_products(rows, rows), present, fitted and bool(usable.any()), settings, usable)

    @property
    def importance(self) -> Tensor:
        """By how much the errors of each output count, (o,)."""
        found = torch.zeros(len(self.present), dtype=torch.float64, device=self.gram.device)
        found[self.usable] = self.fit.scale.abs()
        return found.clamp(min=UNSEEN * float(found.max()) or 1.0)

    @property
    def spread(self) -> float:
        """Variance of what is wanted."""
        return float(self.fit.wanted.var(0).mean()) if self.usable.any() else 0.0

    def removal_costs(self, pattern: Pattern, shape: Shape) -> Tensor:
        """Return what the removal of each unit costs, (o', units), see `RemovalOrder.scores`."""
        _, factor, weight = self._optimum()
        inverse = torch.cholesky_inverse(factor)
        units = shape[1] // pattern.inputs * (1 if pattern.whole_kernels else shape[2])
        if shape[0] % pattern.outputs:  # a block over outputs of several groups
            losses = (weight[:, : self.columns] * self.importance[:, None]).square() / inverse.diagonal()[
                : self.columns
            ]
            return losses
        return removal_order(inverse, weight, self.importance, pattern, shape).scores(units)

    def column_by_column(self, pattern: Pattern, shape: Shape, share: float) -> Tensor:
        """Return the mask (o, i * taps) by the order of SparseGPT."""
        gram, _, weight = self._optimum()
        return column_by_column(gram, weight, self.importance, pattern, shape, share)[0]

    def zeroed(self, mask: Tensor) -> tuple[Tensor, float]:
        """Return the present weights (o, d) with zeros, and their error on held-out rows."""
        found = torch.where(self._whole(mask), self.present, 0.0)
        return found, self._error(found)

    def solved(self, mask: Tensor) -> tuple[Tensor, float]:
        """Return the weights (o, d) that fit best with zeros, and their error on held-out rows.

        By the best ridge; behind a ReLU, outputs below a negative target count as met in further steps.
        """
        keep, rows = self._whole(mask), slice(self.fit.fitted)
        found, error = self.zeroed(mask)
        best, missing, solver = float("inf"), self._missing(self.fit.wanted[rows]), None
        for multiple in RIDGES if self.fitted else RIDGES[:1]:
            tried, _ = ridged(self.gram, self.settings.ridge * multiple, biased=self.fit.biased)
            trial = MaskedLeastSquares(tried, keep)
            weight = trial.solve(self.present @ tried + missing, found)
            if (error_now := self._error(weight)) < best:
                gram, solver, found, error, best = tried, trial, weight, error_now, error_now
        if solver is None:  # NaN or Inf
            return found, error
        momentum, ahead = 1.0, found
        for _ in range(self.settings.rectified_steps if self.fitted and self.fit.rectified else 0):
            reached = self._end(ahead, rows).clamp(max=0)
            target = torch.where(self.fit.wanted[rows] < 0, reached, self.fit.wanted[rows])
            again = solver.solve(self.present @ gram + self._missing(target), found)
            if (error_now := self._error(again)) >= error:
                break
            following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
            ahead = again + (momentum - 1) / following * (again - found)
            found, error, momentum = again, error_now, following
        return found, error

    def _missing(self, target: Tensor) -> Tensor:
        """Return the mean products (o, d) of the inputs and what the present weights miss of a target (N, usable)."""
        missing = torch.zeros_like(self.present)
        if self.fitted:
            rows = slice(self.fit.fitted)
            gap = (target[rows] - self.fit.now[rows]) / self.fit.scale
            missing[self.usable] = mean_products(self.inputs[rows], gap.to(self.inputs.dtype)).T
        return missing

    def _whole(self, mask: Tensor) -> Tensor:
        """Return a mask with the constant, which changes only in a fit."""
        return torch.cat([mask, mask.new_full((len(mask), 1), self.fitted)], 1) if self.fit.biased else mask

    def _end(self, weight: Tensor, rows: slice) -> Tensor:
        change = (weight - self.present)[self.usable]
        return self.fit.now[rows] + self.fit.scale * apply_weight(self.inputs[rows], change.T)

    def _error(self, weight: Tensor) -> float:
        rows = slice(self.fit.fitted, None)
        if not self.usable.any():
            return 0.0
        return mean_squared_error(self._end(weight, rows), self.fit.wanted[rows], rectified=self.fit.rectified)


@dataclass(frozen=True, eq=False)
class SmallGroups(ZerosProblem):
    """The choice of zeros in some groups of a layer, (g, ...), and the fit of what is kept; all float64."""

    fit: GroupedProblem

    @classmethod
    def of(cls, fit: GroupedProblem, present: Tensor, settings: RepairSettings, *, fitted: bool) -> SmallGroups:
        """Return the problem of a fit and the present weights, (g, o, d) without constants."""
        inputs = fit.columns()
        rows = inputs[:, : fit.fitted]
        gram = (rows.transpose(1, 2) @ rows / fit.fitted).nan_to_num(0.0, 0.0, 0.0)
        if fit.biased:
            present = torch.cat([present, present.new_zeros(*present.shape[:2], 1)], 2)
        return cls(fit, inputs, gram, present, fitted, settings)

    def removal_costs(self, pattern: Pattern, shape: Shape) -> Tensor:
        """Return what the removal of each unit costs, (g * o, units); for a pattern within single outputs."""
        _, factor, weight = self._optimum()
        inverse = torch.cholesky_inverse(factor).repeat_interleave(weight.shape[1], 0)
        units = shape[1] // pattern.inputs * (1 if pattern.whole_kernels else shape[2])
        sizes = len(inverse), shape[1], shape[2]
        return removal_order(inverse, weight.flatten(0, 1), self._importance(), pattern, sizes).scores(units)

    def losses(self) -> Tensor:
        """Return what the removal of each weight alone costs, (g * o, columns)."""
        _, factor, weight = self._optimum()
        inverse = torch.cholesky_inverse(factor).diagonal(dim1=1, dim2=2)[:, None]
        losses = (weight.square() / inverse)[..., : self.columns].flatten(0, 1)
        return losses * self._importance()[:, None].square()

    def solved(self, mask: Tensor, *, compensated: bool) -> tuple[Tensor, Tensor, tuple[float, float, float]]:
        """Return changes of weights (g * o, columns) and biases (g * o,) that make zeros of a mask (g, o, columns).

        Also the sums over groups of the error on held-out rows with the zeros alone, with the fit, and of the spread.
        """
        constant = mask.new_full((*mask.shape[:2], 1), self.fitted)
        keep = torch.cat([mask, constant], 2) if self.fit.biased else mask
        found = torch.where(keep, self.present, 0.0)
        before = error = self._error(found)
        if compensated:
            found, error = self._solved(keep)
        change = (found - self.present).flatten(0, 1)
        bias = change[:, -1] if self.fit.biased else change.new_zeros(len(change))
        spread = self.fit.wanted.var(1).mean(1)
        return change[:, : self.columns], bias, (float(before.sum()), float(error.sum()), float(spread.sum()))

    def _solved(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best weights of each group, (g, o, d), and their errors, (g,)."""
        wanted, trials = self.fit.wanted, []
        missing = self._missing(wanted)
        for multiple in RIDGES if self.fitted else RIDGES[:1]:
            gram, _ = ridged(self.gram, self.settings.ridge * multiple, biased=self.fit.biased)
            trials.append((grouped_masked_least_squares(gram, self.present @ gram + missing, keep), gram))
        errors = torch.stack([self._error(weight) for weight, _ in trials])
        best, every = errors.argmin(0), torch.arange(len(keep), device=keep.device)
        found = torch.stack([weight for weight, _ in trials])[best, every]
        gram, error = torch.stack([gram for _, gram in trials])[best, every], errors.amin(0)
        for _ in range(self.settings.rectified_steps if self.fitted and self.fit.rectified else 0):
            target = torch.where(wanted < 0, self._end(found).clamp(max=0), wanted)
            again = grouped_masked_least_squares(gram, self.present @ gram + self._missing(target), keep)
            error_now = self._error(again)
            wins = error_now < error
            if not bool(wins.any()):
                break
            found, error = torch.where(wins[:, None, None], again, found), torch.where(wins, error_now, error)
        return found, error

    def _importance(self) -> Tensor:
        """Return by how much the errors of each output count, (g * o,)."""
        found = self.fit.scale.abs().flatten()
        return found.clamp(min=UNSEEN * float(found.max()) or 1.0)

    def _missing(self, target: Tensor) -> Tensor:
        """Return the mean products (g, o, d) of the inputs and what the present weights miss of a target (g, N, o)."""
        if not self.fitted:
            return torch.zeros_like(self.present)
        rows, scale = slice(self.fit.fitted), self.fit.scale[:, None]
        missing = ((target - self.fit.now) * torch.where(scale == 0, 0.0, 1 / scale))[:, rows]
        return missing.transpose(1, 2) @ self.inputs[:, rows] / self.fit.fitted

    def _end(self, weight: Tensor) -> Tensor:
        return self.fit.now + self.fit.scale[:, None] * (self.inputs @ (weight - self.present).transpose(1, 2))

    def _error(self, weight: Tensor) -> Tensor:
        return self.fit.error(self._end(weight))

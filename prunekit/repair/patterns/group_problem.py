"""The problem of one group of a layer: which of its weights go, and the fit of those that are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.planning.patterns.pattern import Pattern
from prunekit.repair.least_squares import FitProblem, mean_squared_error
from prunekit.repair.patterns.column_order import column_by_column
from prunekit.repair.patterns.masked_fit import MaskedLeastSquares, with_ridge
from prunekit.repair.patterns.removal import removal_order
from prunekit.settings.calibration import RepairSettings
from prunekit.statistics.patches import apply_weight, mean_products, with_constant

RIDGES = (1, 10)
"""Multiples of the ridge that are tried; the one with the least error on held-out rows is used."""
UNSEEN = 1e-6
"""By how much the errors count of outputs whose norm has no factor, as a share of the largest."""

Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class GroupProblem:
    """The choice of zeros in one group of a layer, and the fit of what is kept.

    Attributes:
        fit: the layer's inputs, and what is wanted at the end of its chain.
        inputs: (N, d) of the fit, with a constant last if there is a bias.
        gram: (d, d) of the rows to fit on, float64.
        present: (o, d) weights; the constant's are 0, as the present bias is part of the chain.
        usable: bool (o,), whether the norm's factor determines an output's weights; the fit is about these.
        fitted: whether weights are fitted to what is wanted; else to what they compute now.
        settings: of the fit.
    """

    fit: FitProblem
    inputs: Tensor
    gram: Tensor
    present: Tensor
    usable: Tensor
    fitted: bool
    settings: RepairSettings

    @classmethod
    def of(
        cls, fit: FitProblem, present: Tensor, usable: Tensor, settings: RepairSettings, *, fitted: bool
    ) -> GroupProblem:
        """Return the problem of a fit and the present weights, (o, d) without a constant."""
        inputs = with_constant(fit.inputs) if fit.biased else fit.inputs
        rows = inputs[: fit.fitted]
        if fit.biased:
            present = torch.cat([present, present.new_zeros(len(present), 1)], 1)
        return cls(fit, inputs, mean_products(rows, rows), present, usable, fitted and bool(usable.any()), settings)

    @property
    def columns(self) -> int:
        """Number of columns without the constant."""
        return len(self.gram) - self.fit.biased

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
        gram, weight = self._optimum()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        units = shape[1] // pattern.inputs * (1 if pattern.whole_kernels else shape[2])
        if shape[0] % pattern.outputs:  # a block over outputs of several groups
            losses = (weight[:, : self.columns] * self.importance[:, None]).square() / inverse.diagonal()[
                : self.columns
            ]
            return losses
        return removal_order(inverse, weight, self.importance, pattern, shape).scores(units)

    def column_by_column(self, pattern: Pattern, shape: Shape, share: float) -> Tensor:
        """Return the mask (o, i * taps) by the order of SparseGPT."""
        gram, weight = self._optimum()
        return column_by_column(gram, weight, self.importance, pattern, shape, share)[0]

    def sizes(self, *, by_input: bool) -> Tensor:
        """Return the size of each weight, (o, i * taps), if asked for times the norm of its input (Sun et al. 2023)."""
        sizes = self.present[:, : self.columns].abs()
        return sizes * self.gram.diagonal()[: self.columns].sqrt() if by_input else sizes

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
            ridged = with_ridge(self.gram, self.settings.ridge * multiple, biased=self.fit.biased)
            trial = MaskedLeastSquares(ridged, keep)
            weight = trial.solve(self.present @ ridged + missing, found)
            if (error_now := self._error(weight)) < best:
                gram, solver, found, error, best = ridged, trial, weight, error_now, error_now
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

    def _optimum(self) -> tuple[Tensor, Tensor]:
        """Return the Gram matrix with a ridge, and the weights (o, d) that fit best if all are kept."""
        gram = with_ridge(self.gram, self.settings.ridge, biased=self.fit.biased)
        if not self.fitted:
            return gram, self.present
        right = self.present @ gram + self._missing(self.fit.wanted[: self.fit.fitted])
        return gram, torch.cholesky_solve(right.T, torch.linalg.cholesky(gram)).T

    def _missing(self, target: Tensor) -> Tensor:
        """Return the mean products (o, d) of the inputs and what the present weights miss of a target (N, usable)."""
        missing = torch.zeros_like(self.present)
        if self.fitted:
            rows = slice(self.fit.fitted)
            gap = (target - self.fit.now[rows]) / self.fit.scale
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

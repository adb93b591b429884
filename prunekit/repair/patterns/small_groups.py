"""Zeros in many small groups of a layer at once, such as those of a depthwise convolution, and the fit of the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.planning.patterns.pattern import Pattern
from prunekit.repair.least_squares import GroupedProblem
from prunekit.repair.patterns.group_problem import RIDGES, UNSEEN, Shape
from prunekit.repair.patterns.masked_fit import grouped_masked_least_squares, with_ridge
from prunekit.repair.patterns.removal import removal_order
from prunekit.settings.calibration import RepairSettings


@dataclass(frozen=True, eq=False)
class SmallGroups:
    """The choice of zeros in some groups of a layer, and the fit of what is kept; all float64.

    Attributes:
        fit: of the groups.
        inputs: (g, N, d) with a constant last if there is a bias.
        gram: (g, d, d) of the rows to fit on.
        present: (g, o, d) weights; the constants' are 0.
        fitted: whether weights are fitted to what is wanted; else to what they compute now.
        settings: of the fit.
    """

    fit: GroupedProblem
    inputs: Tensor
    gram: Tensor
    present: Tensor
    fitted: bool
    settings: RepairSettings

    @classmethod
    def of(cls, fit: GroupedProblem, present: Tensor, settings: RepairSettings, *, fitted: bool) -> SmallGroups:
        """Return the problem of a fit and the present weights, (g, o, d) without constants."""
        inputs = fit.columns()
        rows = inputs[:, : fit.fitted]
        gram = (rows.transpose(1, 2) @ rows / fit.fitted).nan_to_num(0.0, 0.0, 0.0)
        if fit.biased:
            present = torch.cat([present, present.new_zeros(*present.shape[:2], 1)], 2)
        return cls(fit, inputs, gram, present, fitted, settings)

    @property
    def columns(self) -> int:
        """Number of columns without the constant."""
        return self.gram.shape[-1] - self.fit.biased

    def sizes(self, *, by_input: bool) -> Tensor:
        """Return the size of each weight, (g * o, columns), if asked for times the norm of its input."""
        sizes = self.present[..., : self.columns].abs()
        if by_input:
            sizes = sizes * self.gram.diagonal(dim1=1, dim2=2)[:, None, : self.columns].sqrt()
        return sizes.flatten(0, 1)

    def removal_costs(self, pattern: Pattern, shape: Shape) -> Tensor:
        """Return what the removal of each unit costs, (g * o, units); for a pattern within single outputs."""
        gram, weight = self._optimum()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram)).repeat_interleave(weight.shape[1], 0)
        units = shape[1] // pattern.inputs * (1 if pattern.whole_kernels else shape[2])
        sizes = len(inverse), shape[1], shape[2]
        return removal_order(inverse, weight.flatten(0, 1), self._importance(), pattern, sizes).scores(units)

    def losses(self) -> Tensor:
        """Return what the removal of each weight alone costs, (g * o, columns)."""
        gram, weight = self._optimum()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram)).diagonal(dim1=1, dim2=2)[:, None]
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
            found, error = self._solved(keep, found)
        change = (found - self.present).flatten(0, 1)
        bias = change[:, -1] if self.fit.biased else change.new_zeros(len(change))
        spread = self.fit.wanted.var(1).mean(1)
        return change[:, : self.columns], bias, (float(before.sum()), float(error.sum()), float(spread.sum()))

    def _solved(self, keep: Tensor, zeroed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best weights of each group, (g, o, d), and their errors, (g,)."""
        wanted = self.fit.wanted
        trials = []
        for multiple in RIDGES if self.fitted else RIDGES[:1]:
            gram = with_ridge(self.gram, self.settings.ridge * multiple, biased=self.fit.biased)
            trials.append((grouped_masked_least_squares(gram, self._right(gram, wanted), keep), gram))
        errors = torch.stack([self._error(weight) for weight, _ in trials])
        best, every = errors.argmin(0), torch.arange(len(keep), device=keep.device)
        found = torch.stack([weight for weight, _ in trials])[best, every]
        gram, error = torch.stack([gram for _, gram in trials])[best, every], errors.amin(0)
        for _ in range(self.settings.rectified_steps if self.fitted and self.fit.rectified else 0):
            target = torch.where(wanted < 0, self._end(found).clamp(max=0), wanted)
            again = grouped_masked_least_squares(gram, self._right(gram, target), keep)
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

    def _optimum(self) -> tuple[Tensor, Tensor]:
        gram = with_ridge(self.gram, self.settings.ridge, biased=self.fit.biased)
        if not self.fitted:
            return gram, self.present
        right = self._right(gram, self.fit.wanted).transpose(1, 2)
        return gram, torch.cholesky_solve(right, torch.linalg.cholesky(gram)).transpose(1, 2)

    def _right(self, gram: Tensor, target: Tensor) -> Tensor:
        right = self.present @ gram
        if not self.fitted:
            return right
        rows, scale = slice(self.fit.fitted), self.fit.scale[:, None]
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        missing = ((target - self.fit.now) * inverse)[:, rows]
        return right + missing.transpose(1, 2) @ self.inputs[:, rows] / self.fit.fitted

    def _end(self, weight: Tensor) -> Tensor:
        return self.fit.now + self.fit.scale[:, None] * (self.inputs @ (weight - self.present).transpose(1, 2))

    def _error(self, weight: Tensor) -> Tensor:
        return self.fit.error(self._end(weight))

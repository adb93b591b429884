"""Gauss-Newton steps on two layers at once: one that a ReLU follows, and the one that alone reads what it lets through.

Pure functions over sampled rows; all of a row's positions of the first layer are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prunekit.calibration.patches import products, with_constant

INNER = 6
"""Conjugate gradient steps within each Gauss-Newton step."""
DAMPING = 0.1
"""Levenberg-Marquardt damping, as a share of the curvature: of what the rows hardly determine less is changed."""
RIDGE = 1e-3
"""Of the Gram matrices that precondition, as a share of their mean diagonal."""
SHARED = 0.1
"""Added to how channels act together on what reads them, as a share of the mean: some are read by nothing."""
FRACTIONS = (1.0, 0.5, 0.25)
"""Of a step that are tried in turn until the error falls."""

Weights = tuple[Tensor, Tensor]
"""Of the first layer (d + 1, k), and of the second (taps * k + 1, o); constants last, in units of the chains' ends."""


@dataclass(frozen=True, eq=False)
class Pair:
    """N rows of the second layer, each of which reads the first at so many positions.

    Attributes:
        inputs: (N * taps, d + 1) what the first reads at each of them, a constant last.
        there: (N * taps, 1) 0 where the second reads padding, else 1.
        rest: (N, o) what is added to the end of the second's chain.
        wanted: (N, o) what the dense network has there.
        fitted: number of rows to fit on; the rest judge.
        rectified: whether only the positive part of it is used.
    """

    inputs: Tensor
    there: Tensor
    rest: Tensor
    wanted: Tensor
    fitted: int
    rectified: bool = False

    def split(self) -> tuple[Pair, Pair]:
        """The rows to fit on, and those that judge."""
        taps = len(self.inputs) // len(self.rest)
        parts = []
        for rows in (slice(self.fitted), slice(self.fitted, None)):
            wide = slice(*(None if end is None else end * taps for end in (rows.start, rows.stop)))
            values = (self.inputs[wide], self.there[wide], self.rest[rows], self.wanted[rows])
            parts.append(Pair(*values, len(values[-1]), self.rectified))
        return parts[0], parts[1]


class Linearised:
    """Two layers as they are at some weights, and linear around them: a ReLU lets through what it does now.

    Of targets that are negative behind a ReLU only what is above zero counts: a majorisation of the error after it, as
    in `fits.least_squares`.
    """

    def __init__(self, pair: Pair, weights: Weights) -> None:
        self.pair, self.weights = pair, weights
        hidden = pair.inputs @ weights[0]
        self.active = (hidden > 0) * pair.there
        self.hidden = with_constant((hidden * self.active).view(len(pair.rest), -1))
        end = pair.rest + self.hidden @ weights[1]
        self.counted = (pair.wanted > 0) | (end > 0) if pair.rectified else torch.ones_like(end, dtype=torch.bool)
        wanted = pair.wanted.clamp(min=0) if pair.rectified else pair.wanted
        self.missing = (wanted - end) * self.counted
        seen = end.clamp(min=0) if pair.rectified else end
        self.error = float((seen - wanted).square().mean())
        self.bound = float(self.missing.square().mean())

    def change(self, step: Weights) -> Tensor:
        """(N, o) what a step changes at the end, to first order."""
        through = ((self.pair.inputs @ step[0]) * self.active).view(len(self.pair.rest), -1)
        return (through @ self.weights[1][:-1] + self.hidden @ step[1]) * self.counted

    def gradient(self, values: Tensor) -> Weights:
        """The transpose of `change`, a mean over rows."""
        values = values * self.counted / len(values)
        back = (values @ self.weights[1][:-1].T).view(len(self.active), -1) * self.active
        return (back.T @ self.pair.inputs).T, (values.T @ self.hidden).T


def gauss_newton(pair: Pair, weights: Weights, steps: int) -> tuple[Weights, float, float]:
    """Fits both layers to the wanted outputs, by steps each of which is a least-squares problem of its own.

    Levenberg 1944, Marquardt 1963; each is solved by conjugate gradients, preconditioned by Kronecker factors of the
    curvature (Martens & Grosse 2015). What is fitted is a block's output, as in Li et al. 2021, "BRECQ", without
    gradient descent. A step is kept if the error falls, on the rows to fit on and on held-out ones.

    Returns:
        The weights, and the mean squared error on held-out rows before and after.
    """
    fitting, judging = pair.split()
    some = fitting.inputs[:: len(fitting.inputs) // len(fitting.rest)]  # one of each row's positions is enough
    factor, now = _factor(products(some, some)), Linearised(fitting, weights)
    before = after = Linearised(judging, weights).error
    for _ in range(steps):
        step = _step(now, factor)
        trials = (Linearised(fitting, _moved(now.weights, step, share)) for share in FRACTIONS)
        better = next((trial for trial in trials if trial.bound < now.bound), None)
        judged = after if better is None else Linearised(judging, better.weights).error
        if better is None or judged >= after:
            break
        now, after = better, judged
    return now.weights, before, after


def _moved(weights: Weights, step: Weights, share: float) -> Weights:
    return weights[0] + share * step[0], weights[1] + share * step[1]


def _factor(matrix: Tensor) -> Tensor:
    """Cholesky factor of a Gram matrix with its ridge; the constant's, the last, has none."""
    pull = torch.full_like(matrix[0], RIDGE * (float(matrix.diagonal()[:-1].mean()) or 1.0))
    pull[-1] = torch.finfo(matrix.dtype).eps
    factor: Tensor = torch.linalg.cholesky(matrix + torch.diag(pull))
    return factor


def _step(now: Linearised, inputs: Tensor) -> Weights:
    """The damped Gauss-Newton step."""
    taps, width = len(now.pair.inputs) // len(now.pair.rest), now.active.shape[1]
    read = now.weights[1][:-1].double().view(taps, width, -1)
    together = torch.einsum("tko,tlo->kl", read, read) * float(now.active.double().mean())
    together.diagonal().add_(SHARED * float(together.diagonal().mean()) or 1.0)
    channels, hidden = torch.linalg.cholesky(together), _factor(products(now.hidden, now.hidden))

    def solved(gradient: Weights) -> Weights:
        first = torch.cholesky_solve(torch.cholesky_solve(gradient[0].double(), inputs).T.contiguous(), channels).T
        return first.to(gradient[0]), torch.cholesky_solve(gradient[1].double(), hidden).to(gradient[1])

    def curvature(step: Weights) -> Weights:
        first = inputs @ (inputs.T @ step[0].double()) @ together
        second = hidden @ (hidden.T @ step[1].double())
        damping = DAMPING * first.to(step[0]), DAMPING * second.to(step[1])
        return _moved(now.gradient(now.change(step)), damping, 1.0)

    return conjugate_gradients(curvature, now.gradient(now.missing), solved, INNER)


def conjugate_gradients(
    times: Callable[[Weights], Weights], right: Weights, solved: Callable[[Weights], Weights], steps: int
) -> Weights:
    """Solves a symmetric positive definite system, from 0 (Hestenes & Stiefel 1952).

    Args:
        times: the matrix.
        right: what its product with the solution is to be.
        solved: an approximate inverse of the matrix.
        steps: at most so many.
    """
    found: Weights = (torch.zeros_like(right[0]), torch.zeros_like(right[1]))
    left, direction = right, solved(right)
    size = first = _dot(left, direction)
    for _ in range(steps):
        if not size > torch.finfo(right[0].dtype).eps ** 2 * first:
            break
        product = times(direction)
        share = size / _dot(direction, product)
        found, left = _moved(found, direction, share), _moved(left, product, -share)
        better = solved(left)
        size, before = _dot(left, better), size
        direction = _moved(better, direction, size / before)
    return found


def _dot(one: Weights, other: Weights) -> float:
    return float(sum((a.double() * b.double()).sum() for a, b in zip(one, other, strict=True)))

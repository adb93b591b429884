"""Gauss-Newton steps on two layers at once: one that a ReLU follows, and the one that alone reads what it lets through.

Pure functions over windows of samples; all that the second reads of the first is computed anew.

Sets up the joint fit of a layer and of the rectified one before it, and writes what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from prunekit.repair.layer_samples import Sample, convolving
from prunekit.repair.layer_walk import LayerWeights
from prunekit.repair.least_squares import FLAT, Change
from prunekit.statistics.layers.linear_layers import LayerCall
from prunekit.statistics.layers.patches import PatchGeometry, mean_products, sample_rows, with_constant

INNER = 6
"""Conjugate gradient steps within each Gauss-Newton step."""
DAMPING = 0.1
"""Levenberg-Marquardt damping, as a share of the curvature: of what the rows hardly determine less is changed."""
RIDGE = 1e-3
"""Of the Gram matrices that precondition, as a share of their mean diagonal."""
SHARED = 0.1
"""Added to how channels act together on what reads them, as a share of the mean: some are read by nothing."""
CONDITIONING_ROWS = 8192
"""Positions whose Gram matrices precondition."""
FRACTIONS = (1.0, 0.5, 0.25)
"""Of a step that are tried in turn until the error falls."""

Weights = tuple[Tensor, Tensor]
"""Of both layers, (d * taps + 1, k) and (k * taps + 1, o); constants last, in units of the chains' ends."""


@dataclass(frozen=True, eq=False)
class Pair:
    """N windows of samples, see `Windows`, in which both layers are looked at.

    Attributes:
        first, second: how the layers read, without padding.
        inputs: (N, d, ...) what the first reads.
        there: (N, 1, ...) 0 where the second reads padding, else 1.
        rest: (N, o, ...) what is added to the end of the second's chain.
        wanted: (N, o, ...) what the dense network has there.
        fitted: number of windows to fit on; the rest judge.
        rectified: whether only the positive part of it is used.
    """

    first: PatchGeometry
    second: PatchGeometry
    inputs: Tensor
    there: Tensor
    rest: Tensor
    wanted: Tensor
    fitted: int
    rectified: bool = False

    def split(self) -> tuple[Pair, Pair]:
        """Return the windows to fit on, and those that judge."""
        parts = []
        for some in (slice(self.fitted), slice(self.fitted, None)):
            values = (self.inputs[some], self.there[some], self.rest[some], self.wanted[some])
            parts.append(Pair(self.first, self.second, *values, len(values[0]), self.rectified))
        return parts[0], parts[1]


class Linearized:
    """Two layers as they are at some weights, and linear around them: a ReLU lets through what it does now.

    Of targets that are negative behind a ReLU only what is above zero counts: a majorization of the error after it, as
    in `fits.least_squares`.
    """

    def __init__(self, pair: Pair, weights: Weights) -> None:
        self.pair, self.weights = pair, weights
        hidden = _through(pair.first, pair.inputs, weights[0])
        self.active = (hidden > 0) * pair.there
        self.hidden = hidden.mul_(self.active)
        end = pair.rest + _through(pair.second, self.hidden, weights[1])
        self.counted = ((pair.wanted > 0) | (end > 0)).to(end) if pair.rectified else torch.ones_like(end)
        wanted = pair.wanted.clamp(min=0) if pair.rectified else pair.wanted
        self.missing = (wanted - end) * self.counted
        seen = end.clamp(min=0) if pair.rectified else end
        self.error = float((seen - wanted).square().mean())
        self.bound = float(self.missing.square().mean())

    def change(self, step: Weights) -> Tensor:
        """(N, o, ...) what a step changes at the end, to first order."""
        through = _through(self.pair.first, self.pair.inputs, step[0]).mul_(self.active)
        kept = torch.cat([self.weights[1][:-1], torch.zeros_like(self.weights[1][-1:])])
        return (_through(self.pair.second, through, kept) + _through(self.pair.second, self.hidden, step[1])).mul_(
            self.counted
        )

    def gradient(self, values: Tensor) -> Weights:
        """Return the transpose of `change`, a mean over positions."""
        values = values * self.counted / (values.numel() // values.shape[1])
        back, second = _back(self.pair.second, self.hidden, self.weights[1], values)
        return _back(self.pair.first, self.pair.inputs, self.weights[0], back.mul_(self.active), read=False)[1], second


def _kernel(reading: PatchGeometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """(d * taps + 1, o) -> (o, d, ...), without the constants."""
    return weight[:-1].T.reshape(weight.shape[1], inputs.shape[1], *reading.kernel)


def _through(reading: PatchGeometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return what a layer gives that pads nothing."""
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(reading.kernel) - 1]
    found: Tensor = convolution(
        inputs, _kernel(reading, inputs, weight), weight[-1], reading.stride, dilation=reading.dilation
    )
    return found


def _back(
    reading: PatchGeometry, inputs: Tensor, weight: Tensor, values: Tensor, *, read: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the transposes of `_through`, by what it reads (unless not wanted) and by its weight."""
    none = [0] * len(reading.kernel)
    into, kernel, constants = torch.ops.aten.convolution_backward(
        values,
        inputs,
        _kernel(reading, inputs, weight),
        [weight.shape[1]],
        reading.stride,
        none,
        reading.dilation,
        False,
        none,
        1,
        [read, True, True],
    )
    return into, torch.cat([kernel.flatten(1).T, constants[None]])


def _gram(reading: PatchGeometry, inputs: Tensor) -> Tensor:
    """(d * taps + 1, d * taps + 1) of some of what a layer reads, with a constant."""
    rows = sample_rows(reading.rows_of(inputs), CONDITIONING_ROWS, 0).to(inputs.device)
    patches = with_constant(reading.patches(inputs, rows, reading.spatial(inputs)))
    return mean_products(patches, patches)


def gauss_newton(pair: Pair, weights: Weights, steps: int) -> tuple[Weights, float, float]:
    """Fit both layers to the wanted outputs, by steps each of which is a least-squares problem of its own.

    Levenberg 1944, Marquardt 1963; each is solved by conjugate gradients, preconditioned by Kronecker factors of the
    curvature (Martens & Grosse 2015). What is fitted is a block's output, as in Li et al. 2021, "BRECQ", without
    gradient descent. A step is kept if the error falls, on the rows to fit on and on held-out ones.

    Returns:
        The weights, and the mean squared error on held-out rows before and after.
    """
    fitting, judging = pair.split()
    factor, now = _factor(_gram(pair.first, fitting.inputs)), Linearized(fitting, weights)
    before = after = Linearized(judging, weights).error
    for _ in range(steps):
        step = _step(now, factor)
        trials = (Linearized(fitting, _moved(now.weights, step, share)) for share in FRACTIONS)
        better = next((trial for trial in trials if trial.bound < now.bound), None)
        judged = after if better is None else Linearized(judging, better.weights).error
        if better is None or judged >= after:
            break
        now, after = better, judged
    return now.weights, before, after


def _moved(weights: Weights, step: Weights, share: float) -> Weights:
    return weights[0] + share * step[0], weights[1] + share * step[1]


def _factor(matrix: Tensor) -> Tensor:
    """Return the cholesky factor of a Gram matrix with its ridge; the constant's, the last, has none."""
    pull = torch.full_like(matrix[0], RIDGE * (float(matrix.diagonal()[:-1].mean()) or 1.0))
    pull[-1] = torch.finfo(matrix.dtype).eps
    factor: Tensor = torch.linalg.cholesky(matrix + torch.diag(pull))
    return factor


def _step(now: Linearized, inputs: Tensor) -> Weights:
    """Return the damped Gauss-Newton step."""
    read = now.weights[1][:-1].double().view(now.active.shape[1], now.pair.second.taps, -1)
    together = torch.einsum("kto,lto->kl", read, read) * float(now.active.double().mean())
    together.diagonal().add_(SHARED * float(together.diagonal().mean()) or 1.0)
    channels, hidden = torch.linalg.cholesky(together), _factor(_gram(now.pair.second, now.hidden))

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
    """Solve a symmetric positive definite system, from 0 (Hestenes & Stiefel 1952).

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


class PairFitter(LayerWeights):
    """Refits a layer and its source."""

    def refit(self, layer: LayerCall, dense: Sample, running: Sample, steps: int) -> tuple[float, float] | None:
        """Fit both, and write them where that is better; the error on held-out rows before and after.

        None where there is no constant to write to, or not what the second reads is what the first gives.
        """
        source = layer.source
        assert source is not None
        hidden = self._index(source, 0)
        biased = all(each.bias is not None or each.norm is not None for each in (source, layer))
        if not biased or not torch.equal(hidden, self._index(layer, 1)):
            return None
        rows = self._index(layer, 0)
        scale = self._affine(self._modules, layer, rows)[0]
        rows = rows[scale.abs() > FLAT * scale.abs().max()]
        pair, weights = self._pair(layer, dense, running, rows), self._both(source, layer, hidden, rows)
        (first, second), before, after = gauss_newton(pair, weights, steps)
        if after < before:
            self._add(source, hidden, (first - weights[0]).T.double())
            self._add(layer, rows, (second - weights[1]).T.double())
        return before, after

    def _pair(self, layer: LayerCall, dense: Sample, running: Sample, rows: Tensor) -> Pair:
        """Return the windows in which both layers were looked at, in units of the end of the second's chain."""
        before, there = running.before, running.there
        assert layer.source is not None
        assert before is not None
        assert there is not None
        assert dense.window_outputs is not None
        scale, offset = self._affine(self._dense_modules, layer, rows)
        wanted = scale * dense.window_outputs[:, rows].double() + offset
        rest = torch.zeros_like(wanted)
        if running.window_others is not None and dense.window_others is not None:
            wanted = wanted + dense.window_others[:, rows].double()
            rest = running.window_others[:, rows].double()
        first, second = convolving(layer.source.geometry), convolving(layer.geometry)
        sizes = second.spatial_of(tuple(there.shape[2:]))

        def shaped(values: Tensor) -> Tensor:  # (windows * positions, o) -> (windows, o, ...)
            return values.to(before.dtype).view(len(before), *sizes, -1).movedim(-1, 1)

        ends = shaped(rest), shaped(wanted)
        return Pair(first, second, before, there.to(before), *ends, running.windows_fitted, layer.rectified)

    def _both(self, source: LayerCall, layer: LayerCall, hidden: Tensor, rows: Tensor) -> Weights:
        """Return weights and constants of both layers, in units of the ends of their chains."""
        kind = self._tensors[layer.weight].dtype
        return self._whole(source, hidden).T.to(kind), self._whole(layer, rows).T.to(kind)

    def _whole(self, layer: LayerCall, rows: Tensor) -> Tensor:
        """(o, d + 1) kept weights and the constant last, at the end of the chain."""
        scale, offset = self._affine(self._modules, layer, rows)
        weight = scale[:, None] * self._weight(layer, rows, self._index(layer, 1))
        bias = 0.0 if layer.bias is None else self._tensors[layer.bias].detach()[rows].double()
        return with_last(weight, scale * bias + offset)

    def _add(self, layer: LayerCall, rows: Tensor, change: Tensor) -> None:
        """Add (o, d + 1) at the end of the chain, where the chain has a factor."""
        scale = self._affine(self._modules, layer, rows)[0]
        usable = scale.abs() > FLAT * scale.abs().max()
        found = change[usable] / scale[usable][:, None]
        self._write(layer, rows[usable], self._index(layer, 1), Change(found[:, :-1], found[:, -1]))


def with_last(matrix: Tensor, column: Tensor) -> Tensor:
    """Return a matrix with one more column."""
    return torch.cat([matrix, column[:, None]], 1)

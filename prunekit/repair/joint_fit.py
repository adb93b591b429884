"""The joint fit of two layers: a ReLU follows the first, and the second alone reads its output.

Gauss-Newton steps, as pure functions over windows of samples in which the first layer's output is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.distributed.shared_work import shared_count, shared_mean
from prunekit.hooks.model_copy import named_tensors
from prunekit.planning.plan import Plan
from prunekit.repair.layer_samples import LayerSample, convolving
from prunekit.repair.least_squares import WeightChange, determined
from prunekit.statistics.layer_errors import norm_affine
from prunekit.statistics.linear_layers import LayerCall
from prunekit.statistics.patches import PatchGeometry, mean_products, sample_rows, with_constant

INNER = 6
"""Conjugate gradient steps within each Gauss-Newton step."""
DAMPING = 0.1
"""Levenberg-Marquardt damping, as a share of the curvature: shorter steps where rows hardly determine weights."""
RIDGE = 1e-3
"""Ridge of the Gram matrices that precondition, as a share of their mean diagonal."""
SHARED = 0.1
"""Added to the diagonal of the channels' Gram matrix, as a share of its mean: some channels are not read."""
CONDITIONING_ROWS = 8192
"""Positions that Gram matrices for preconditioning are computed from."""
FRACTIONS = (1.0, 0.5, 0.25)
"""Fractions of a step, tried in turn until the error falls."""

Weights = tuple[Tensor, Tensor]
"""Weights of both layers, (d * taps + 1, k) and (k * taps + 1, o); constants last, in units of the chains' ends."""


@dataclass(frozen=True, eq=False)
class LayerPair:
    """Two layers in N windows of samples, see `SampleWindows`."""

    first: PatchGeometry  # how the first layer reads, without padding
    second: PatchGeometry  # how the second layer reads, without padding
    inputs: Tensor  # (N, d, ...) of the first
    there: Tensor  # (N, 1, ...) 0 where the second reads padding, else 1
    rest: Tensor  # (N, o, ...) summand at the end of the second's chain
    wanted: Tensor  # (N, o, ...) the end of that chain in the dense network
    fitted: int  # number of windows to fit on; the rest are held out
    rectified: bool = False  # whether only the positive part of it is used

    def split(self) -> tuple[LayerPair, LayerPair]:
        """Return the windows to fit on, and those that are held out."""
        parts = []
        for some in (slice(self.fitted), slice(self.fitted, None)):
            values = (self.inputs[some], self.there[some], self.rest[some], self.wanted[some])
            parts.append(LayerPair(self.first, self.second, *values, len(values[0]), self.rectified))
        return parts[0], parts[1]


class Linearized:
    """Two layers linearized around some weights, with the ReLU's present active set.

    Outputs below a negative target count as met behind a ReLU: a majorization of the error after it, as in
    `least_squares`.
    """

    def __init__(self, pair: LayerPair, weights: Weights) -> None:
        self.pair, self.weights = pair, weights
        hidden = _through(pair.first, pair.inputs, weights[0])
        self.active = (hidden > 0) * pair.there
        self.hidden = hidden.mul_(self.active)
        end = pair.rest + _through(pair.second, self.hidden, weights[1])
        self.counted = ((pair.wanted > 0) | (end > 0)).to(end) if pair.rectified else torch.ones_like(end)
        wanted = pair.wanted.clamp(min=0) if pair.rectified else pair.wanted
        self.rows = wanted.numel() // wanted.shape[1]
        self.missing = (wanted - end) * self.counted
        seen = end.clamp(min=0) if pair.rectified else end
        means = (shared_mean(values.square().mean(), self.rows) for values in (seen - wanted, self.missing))
        self.error, self.bound = map(float, means)

    def change(self, step: Weights) -> Tensor:
        """Return the change of the chain's end by a step, to first order, (N, o, ...)."""
        through = _through(self.pair.first, self.pair.inputs, step[0]).mul_(self.active)
        kept = torch.cat([self.weights[1][:-1], torch.zeros_like(self.weights[1][-1:])])
        return (_through(self.pair.second, through, kept) + _through(self.pair.second, self.hidden, step[1])).mul_(
            self.counted
        )

    def gradient(self, values: Tensor) -> Weights:
        """Return the transpose of `change`, a mean over positions."""
        values = values * self.counted / self.rows
        back, second = _back(self.pair.second, self.hidden, self.weights[1], values)
        first = _back(self.pair.first, self.pair.inputs, self.weights[0], back.mul_(self.active), read=False)[1]
        return shared_mean(first, self.rows), shared_mean(second, self.rows)


def _kernel(reading: PatchGeometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return (d * taps + 1, o) weights as a kernel, (o, d, ...), without the constants."""
    return weight[:-1].T.reshape(weight.shape[1], inputs.shape[1], *reading.kernel)


def _through(reading: PatchGeometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the output of a layer without padding."""
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(reading.kernel) - 1]
    found: Tensor = convolution(
        inputs, _kernel(reading, inputs, weight), weight[-1], reading.stride, dilation=reading.dilation
    )
    return found


def _back(
    reading: PatchGeometry, inputs: Tensor, weight: Tensor, values: Tensor, *, read: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the transposes of `_through` with respect to its input (if `read`) and to its weight."""
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
    """Return the Gram matrix of sampled patches with a constant, (d * taps + 1, d * taps + 1).

    They are at the same positions of all windows.
    """
    each = reading.rows_of(inputs) // len(inputs)
    some = sample_rows(each, max(1, CONDITIONING_ROWS // shared_count(len(inputs))), 0)
    rows = (torch.arange(len(inputs))[:, None] * each + some).flatten().to(inputs.device)
    patches = with_constant(reading.patches(inputs, rows, reading.spatial(inputs)))
    return shared_mean(mean_products(patches, patches), len(patches))


def gauss_newton(
    pair: LayerPair, weights: Weights, steps: int, free: Weights | None = None
) -> tuple[Weights, float, float]:
    """Fit both layers to the wanted outputs, by steps that each solve a least-squares problem.

    Levenberg 1944, Marquardt 1963; each is solved by conjugate gradients, preconditioned by Kronecker factors of the
    curvature (Martens & Grosse 2015). The target is a block's output, as in Li et al. 2021, "BRECQ", but without
    gradient descent. A step is kept if the error falls, on the rows to fit on and on held-out ones.
    """
    fitting, judging = pair.split()
    factor, now = _factor(_gram(pair.first, fitting.inputs)), Linearized(fitting, weights)
    before = after = Linearized(judging, weights).error
    for _ in range(steps):
        step = _step(now, factor, free)
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
    """Return the Cholesky factor of a Gram matrix with a ridge on all but the constant, the last column."""
    pull = torch.full_like(matrix[0], RIDGE * (float(matrix.diagonal()[:-1].mean()) or 1.0))
    pull[-1] = torch.finfo(matrix.dtype).eps
    factor: Tensor = torch.linalg.cholesky(matrix + torch.diag(pull))
    return factor


def _step(now: Linearized, inputs: Tensor, free: Weights | None) -> Weights:
    """Return the damped Gauss-Newton step of the weights that may change."""
    read = now.weights[1][:-1].double().view(now.active.shape[1], now.pair.second.taps, -1)
    together = torch.einsum("kto,lto->kl", read, read) * float(shared_mean(now.active.double().mean(), now.rows))
    together.diagonal().add_(SHARED * float(together.diagonal().mean()) or 1.0)
    channels, hidden = torch.linalg.cholesky(together), _factor(_gram(now.pair.second, now.hidden))

    def solved(gradient: Weights) -> Weights:
        first = torch.cholesky_solve(torch.cholesky_solve(gradient[0].double(), inputs).T.contiguous(), channels).T
        return among(first.to(gradient[0]), torch.cholesky_solve(gradient[1].double(), hidden).to(gradient[1]))

    def curvature(step: Weights) -> Weights:
        first = inputs @ (inputs.T @ step[0].double()) @ together
        second = hidden @ (hidden.T @ step[1].double())
        damping = DAMPING * first.to(step[0]), DAMPING * second.to(step[1])
        return among(*_moved(now.gradient(now.change(step)), damping, 1.0))

    def among(first: Tensor, second: Tensor) -> Weights:
        return (first, second) if free is None else (first * free[0], second * free[1])

    return conjugate_gradients(curvature, among(*now.gradient(now.missing)), solved, INNER)


def conjugate_gradients(
    times: Callable[[Weights], Weights], right: Weights, solved: Callable[[Weights], Weights], steps: int
) -> Weights:
    """Solve a symmetric positive definite system, from 0 (Hestenes & Stiefel 1952)."""
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


class LayerWeights:
    """The kept weights of layers in a dense and a masked model, and changes that are written to the latter."""

    def __init__(self, original: nn.Module, masked: nn.Module, plan: Plan) -> None:
        self._dense = dict(named_tensors(original))
        self._tensors = dict(named_tensors(masked))
        self._modules, self._dense_modules = dict(masked.named_modules()), dict(original.named_modules())
        self._plan = plan

    def _index(self, layer: LayerCall, axis: int) -> Tensor:
        """Return the kept indices of the weight's outputs (axis 0) or inputs (axis 1)."""
        kept = self._plan.kept(layer.weight, layer.axes[axis])
        return torch.from_numpy(np.asarray(kept)).to(self._tensors[layer.weight].device)

    def _affine(self, modules: Mapping[str, nn.Module], layer: LayerCall, rows: Tensor) -> tuple[Tensor, Tensor]:
        gain = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
        if layer.gain is not None:
            gain = layer.gain[rows]
        if layer.norm is None:
            return gain, torch.zeros_like(gain)
        factor, offset = norm_affine(modules[layer.norm])
        return gain * factor[rows], gain * offset[rows]

    def _weight(self, layer: LayerCall, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the kept weights, (o, d)."""
        return layer.matrix(self._tensors[layer.weight].detach())[rows].index_select(1, columns).flatten(1).double()

    def _write(self, layer: LayerCall, rows: Tensor, columns: Tensor, change: WeightChange) -> None:
        """Change a layer's weight, and its bias, or where it has none that of its norm, in place."""
        weight = layer.matrix(self._tensors[layer.weight])
        addition = change.weight.reshape(len(rows), len(columns), *weight.shape[2:]).to(weight.dtype)
        norm: Any = None if layer.norm is None else self._modules[layer.norm]
        with torch.no_grad():
            weight[rows[:, None], columns[None]] += addition
            if layer.bias is not None:
                bias = self._tensors[layer.bias]
                bias[rows] += change.bias.to(bias.dtype)
            elif norm is not None and norm.bias is not None:
                norm.bias[rows] += (change.bias * norm_affine(norm)[0][rows]).to(norm.bias.dtype)
            elif norm is not None:
                norm.running_mean[rows] -= change.bias.to(norm.running_mean.dtype)


class PairFitter(LayerWeights):
    """A fitter that refits a layer together with its source, and writes changes that lower the error.

    `masks` say which single weights are not zero: by weight, bool (o, i, taps) of kept outputs and inputs.
    """

    def __init__(self, original: nn.Module, masked: nn.Module, plan: Plan, masks: Mapping[str, Tensor]) -> None:
        super().__init__(original, masked, plan)
        self._masks = masks

    def refit(
        self, layer: LayerCall, dense: LayerSample, running: LayerSample, steps: int
    ) -> tuple[float, float] | None:
        """Fit both, write the change if it is better, and return the error on held-out rows before and after.

        None if one of them has no constant to write to, or the second does not read exactly the first's output.
        """
        source = layer.source
        assert source is not None
        hidden = self._index(source, 0)
        biased = all(each.bias is not None or each.norm is not None for each in (source, layer))
        if not biased or not torch.equal(hidden, self._index(layer, 1)):
            return None
        rows = self._index(layer, 0)
        scale = self._affine(self._modules, layer, rows)[0]
        usable = determined(scale)
        rows = rows[usable]
        pair, kind = self._pair(layer, dense, running, rows), self._tensors[layer.weight].dtype
        weights = self._whole(source, hidden).T.to(kind), self._whole(layer, rows).T.to(kind)
        free = self._free(source, weights[0]), self._free(layer, weights[1], usable)
        (first, second), before, after = gauss_newton(pair, weights, steps, free)
        if after < before:
            self._add(source, hidden, (first - weights[0]).T.double())
            self._add(layer, rows, (second - weights[1]).T.double())
        return before, after

    def _pair(self, layer: LayerCall, dense: LayerSample, running: LayerSample, rows: Tensor) -> LayerPair:
        """Return the windows in which both layers were sampled, in units of the end of the second's chain."""
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
        return LayerPair(first, second, before, there.to(before), *ends, running.windows_fitted, layer.rectified)

    def _free(self, layer: LayerCall, weights: Tensor, usable: Tensor | None = None) -> Tensor:
        """Return 1 for each weight (d + 1, o) of a layer that may change, and 0 for its zeros."""
        free = torch.ones_like(weights)
        if (mask := self._masks.get(layer.weight)) is not None:
            mask = mask.flatten(1).to(weights.device)
            free[:-1] = (mask if usable is None else mask[usable]).T
        return free

    def _whole(self, layer: LayerCall, rows: Tensor) -> Tensor:
        """Return the kept weights and the constant last, (o, d + 1), in units of the end of the chain."""
        scale, offset = self._affine(self._modules, layer, rows)
        weight = scale[:, None] * self._weight(layer, rows, self._index(layer, 1))
        bias = 0.0 if layer.bias is None else self._tensors[layer.bias].detach()[rows].double()
        return torch.cat([weight, (scale * bias + offset)[:, None]], 1)

    def _add(self, layer: LayerCall, rows: Tensor, change: Tensor) -> None:
        """Add a change, (o, d + 1) in units of the end of the chain, to outputs whose chain has a factor."""
        scale = self._affine(self._modules, layer, rows)[0]
        usable = determined(scale)
        found = change[usable] / scale[usable][:, None]
        self._write(layer, rows[usable], self._index(layer, 1), WeightChange(found[:, :-1], found[:, -1]))

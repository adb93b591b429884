"""Sets up the joint fit of a layer and of the rectified one before it, and writes what it found."""

from __future__ import annotations

import torch
from torch import Tensor

from prunekit.calibration.layers import Layer
from prunekit.calibration.patches import with_constant
from prunekit.repair.fits import FLAT, Change
from prunekit.repair.joint import Pair, Weights, gauss_newton
from prunekit.repair.record import Sample
from prunekit.repair.weights import LayerWeights


class PairFitter(LayerWeights):
    """Refits a layer and its source."""

    def refit(self, layer: Layer, dense: Sample, running: Sample, steps: int) -> tuple[float, float] | None:
        """Fits both, and writes them where that is better; the error on held-out rows before and after.

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
            columns = (second - weights[1])[:-1].view(layer.reading.taps, len(hidden), -1)
            self._add(layer, rows, with_last(columns.permute(2, 1, 0).flatten(1), (second - weights[1])[-1]).double())
        return before, after

    def _pair(self, layer: Layer, dense: Sample, running: Sample, rows: Tensor) -> Pair:
        """The rows at which both layers were looked at, in units of the end of the second's chain."""
        paired, before, there = running.paired, running.before, running.there
        assert paired is not None
        assert before is not None
        assert there is not None
        assert dense.outputs is not None
        scale, offset = self._affine(self._dense_modules, layer, rows)
        wanted = scale * dense.outputs[paired][:, rows].double() + offset
        rest = torch.zeros_like(wanted)
        if running.others is not None and dense.others is not None:
            wanted = wanted + dense.others[paired][:, rows].double()
            rest = running.others[paired][:, rows].double()
        inputs = with_constant(before.view(there.numel(), -1))
        fitted = int(paired[: dense.fitted].sum())
        kind = inputs.dtype
        return Pair(inputs, there.view(-1, 1).to(kind), rest.to(kind), wanted.to(kind), fitted, layer.rectified)

    def _both(self, source: Layer, layer: Layer, hidden: Tensor, rows: Tensor) -> Weights:
        """Weights and constants of both layers, in units of the ends of their chains."""
        first, second = self._whole(source, hidden), self._whole(layer, rows)
        taps = second[:, :-1].view(len(rows), len(hidden), -1)
        second = with_last(taps.permute(0, 2, 1).flatten(1), second[:, -1])
        kind = self._tensors[layer.weight].dtype
        return first.T.to(kind), second.T.to(kind)

    def _whole(self, layer: Layer, rows: Tensor) -> Tensor:
        """(o, d + 1) kept weights and the constant last, at the end of the chain."""
        scale, offset = self._affine(self._modules, layer, rows)
        weight = scale[:, None] * self._weight(layer, rows, self._index(layer, 1))
        bias = 0.0 if layer.bias is None else self._tensors[layer.bias].detach()[rows].double()
        return with_last(weight, scale * bias + offset)

    def _add(self, layer: Layer, rows: Tensor, change: Tensor) -> None:
        """Adds (o, d + 1) at the end of the chain, where the chain has a factor."""
        scale = self._affine(self._modules, layer, rows)[0]
        usable = scale.abs() > FLAT * scale.abs().max()
        found = change[usable] / scale[usable][:, None]
        self._write(layer, rows[usable], self._index(layer, 1), Change(found[:, :-1], found[:, -1]))


def with_last(matrix: Tensor, column: Tensor) -> Tensor:
    """A matrix with one more column."""
    return torch.cat([matrix, column[:, None]], 1)

"""Sets up the joint fit of a layer and of the rectified one before it, and writes what it found."""

from __future__ import annotations

import torch
from torch import Tensor

from prunekit.calibration.layers import Layer
from prunekit.repair.fits import FLAT, Change
from prunekit.repair.joint import Pair, Weights, gauss_newton
from prunekit.repair.record import Sample
from prunekit.repair.weights import LayerWeights
from prunekit.repair.windows import convolving


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
            self._add(layer, rows, (second - weights[1]).T.double())
        return before, after

    def _pair(self, layer: Layer, dense: Sample, running: Sample, rows: Tensor) -> Pair:
        """The windows in which both layers were looked at, in units of the end of the second's chain."""
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
        first, second = convolving(layer.source.reading), convolving(layer.reading)
        sizes = second.spatial_of(tuple(there.shape[2:]))

        def shaped(values: Tensor) -> Tensor:  # (windows * positions, o) -> (windows, o, ...)
            return values.to(before.dtype).view(len(before), *sizes, -1).movedim(-1, 1)

        ends = shaped(rest), shaped(wanted)
        return Pair(first, second, before, there.to(before), *ends, running.windows_fitted, layer.rectified)

    def _both(self, source: Layer, layer: Layer, hidden: Tensor, rows: Tensor) -> Weights:
        """Weights and constants of both layers, in units of the ends of their chains."""
        kind = self._tensors[layer.weight].dtype
        return self._whole(source, hidden).T.to(kind), self._whole(layer, rows).T.to(kind)

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

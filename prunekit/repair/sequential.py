"""Walks through a masked model once and refits each layer as it comes, so that later layers correct earlier errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.calibration.layers import Call, CallWatch, Layer
from prunekit.repair.held import HeldSummands

Refit = Callable[[Layer, Tensor, Tensor | None, tuple[int, ...]], bool]
"""Gets a layer, its input, the other summand, and the spatial sizes of its output; says whether it wrote weights."""


class _Waiting(NamedTuple):
    """A layer whose shortcut is made only after it ran."""

    layer: Layer
    call: Call
    version: int
    output: Tensor | None


class LayerWalk(CallWatch):
    """Runs a model over all images at a time and calls `refit` before each layer runs.

    A layer that is added to a shortcut is refitted to *dense branch + dense shortcut - this model's shortcut*. Where
    that is made later than the branch, the layer is refitted when both are there, and the branch is run again.

    Args:
        model: changed in place by `refit`.
        layers: as `find_layers` gave them.
        norms: as for `CallWatch`.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Layer], refit: Refit, norms: Iterable[str] = ()) -> None:
        super().__init__(model, norms)
        layers = tuple(layers)
        self._modules = dict(model.named_modules())
        self._refit = refit
        self._layers = {layer.call: layer for layer in layers}
        self._totals = {layer.total: layer for layer in layers if layer.total is not None}
        self._held = HeldSummands(layers)
        self._waiting: dict[int, _Waiting] = {}

    def call(self, call: Call) -> Any:
        """Refits the layer that is called, or the one that waited for this sum."""
        waiting = self._waiting.pop(call.number, None)
        if waiting is not None:
            call = self._late(call, waiting)
        layer = self._layers.get(call.number)
        if layer is not None and self.layer_weight(call) == layer.weight:
            self._early(layer, call)
        result = call.run()
        self._held.note(call.number, result)
        return result

    def _early(self, layer: Layer, call: Call) -> None:
        if layer.deferred:
            assert layer.total is not None
            self._waiting[layer.total] = _Waiting(layer, call, call.args[0]._version, None)
        else:
            self._refit(layer, call.args[0], self._held.take(layer), _spatial(call))

    def _late(self, call: Call, waiting: _Waiting) -> Call:
        layer, other, inputs = waiting.layer, self._held.take(waiting.layer), waiting.call.args[0]
        if other is None or inputs._version != waiting.version:
            return call
        if not self._refit(layer, inputs, other, _spatial(waiting.call)):
            return call
        branch = waiting.call.run()
        if layer.norm is not None:
            branch = normalised(self._modules[layer.norm], branch)
        args = tuple(a if a is other or not isinstance(a, Tensor) else a.copy_(branch) for a in call.args)
        return call._replace(args=args)


def _spatial(call: Call) -> tuple[int, ...]:
    """Spatial sizes of a layer's output, from running it on one sample."""
    one = call._replace(args=(call.args[0][:1], *call.args[1:]))
    return tuple(one.run().shape[2:]) if call.name != "linear" else ()


def normalised(norm: nn.Module, values: Tensor) -> Tensor:
    """A BatchNorm in eval mode, by its tensors alone: its hooks do not run."""
    assert isinstance(norm, _BatchNorm)
    return F.batch_norm(values, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)


def norm_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Factor and offset of a BatchNorm in eval mode, (channels,) each, in float64."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.detach().double()
    offset = -norm.running_mean.double() * factor
    return factor, offset if norm.bias is None else offset + norm.bias.detach().double()


Parameters = Mapping[str, Tensor]


def add_bias(layer: Layer, parameters: Parameters, norm: nn.Module | None, rows: Tensor, change: Tensor) -> None:
    """Adds to a layer's bias, or where it has none to that of its norm, in place.

    Args:
        rows: (o,) which outputs.
        change: (o,) before the norm.
    """
    with torch.no_grad():
        if layer.bias is not None:
            target = parameters[layer.bias]
            target[rows] += change.to(target.dtype)
        elif norm is not None:
            assert isinstance(norm, _BatchNorm)
            if norm.bias is not None:
                norm.bias[rows] += (change * norm_affine(norm)[0][rows]).to(norm.bias.dtype)
            else:
                assert norm.running_mean is not None
                norm.running_mean[rows] -= change.to(norm.running_mean.dtype)

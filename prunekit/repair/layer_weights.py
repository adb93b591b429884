"""Weights of one layer after another in a dense and a masked model, in units of the ends of the layers' chains."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.hooks.model_copy import named_tensors
from prunekit.planning.plan import Plan
from prunekit.repair.least_squares import WeightChange
from prunekit.statistics.layer_errors import norm_factor
from prunekit.statistics.linear_layers import LayerCall


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
        factor, offset = _norm_affine(modules[layer.norm])
        return gain * factor[rows], gain * offset[rows]

    def _weight(self, layer: LayerCall, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the kept weights, (o, d)."""
        return layer.matrix(self._tensors[layer.weight].detach())[rows][:, columns].flatten(1).double()

    def _write(self, layer: LayerCall, rows: Tensor, columns: Tensor, change: WeightChange) -> None:
        weight = layer.matrix(self._tensors[layer.weight])
        addition = change.weight.reshape(len(rows), len(columns), *weight.shape[2:]).to(weight.dtype)
        with torch.no_grad():
            weight[rows[:, None], columns[None]] += addition
        norm = self._modules[layer.norm] if layer.norm is not None else None
        _add_bias(layer, self._tensors, norm, rows, change.bias)


def _norm_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the factor and offset of a BatchNorm in eval mode, (channels,) each, in float64."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    factor = norm_factor(norm)
    offset = -norm.running_mean.double() * factor
    return factor, offset if norm.bias is None else offset + norm.bias.detach().double()


def _add_bias(
    layer: LayerCall, parameters: Mapping[str, Tensor], norm: nn.Module | None, rows: Tensor, change: Tensor
) -> None:
    """Add to a layer's bias, or where it has none to that of its norm, in place."""
    with torch.no_grad():
        if layer.bias is not None:
            target = parameters[layer.bias]
            target[rows] += change.to(target.dtype)
        elif norm is not None:
            assert isinstance(norm, _BatchNorm)
            if norm.bias is not None:
                norm.bias[rows] += (change * norm_factor(norm)[rows]).to(norm.bias.dtype)
            else:
                assert norm.running_mean is not None
                norm.running_mean[rows] -= change.to(norm.running_mean.dtype)

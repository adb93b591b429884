"""Weights of one layer after another in a dense and a masked model, in units of the ends of the layers' chains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.hooks.model_copy import named_tensors
from prunekit.planning.plan import Plan
from prunekit.repair.least_squares import WeightChange
from prunekit.statistics.layer_errors import norm_affine
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
        factor, offset = norm_affine(modules[layer.norm])
        return gain * factor[rows], gain * offset[rows]

    def _weight(self, layer: LayerCall, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the kept weights, (o, d)."""
        return layer.matrix(self._tensors[layer.weight].detach())[rows][:, columns].flatten(1).double()

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

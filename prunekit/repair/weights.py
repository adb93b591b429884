"""The weights of a dense and of a masked model, layer by layer, in units of the ends of the layers' chains."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.calibration.layers import Layer
from prunekit.channels.copying import named_tensors
from prunekit.planning import Plan
from prunekit.repair.fits import Change
from prunekit.repair.sequential import add_bias, norm_affine


class LayerWeights:
    """Reads the kept weights of layers, and writes changes of them.

    Args:
        original: the dense model.
        masked: the model whose weights are written.
        plan: which rows and columns are kept.
    """

    def __init__(self, original: nn.Module, masked: nn.Module, plan: Plan) -> None:
        self._dense = dict(named_tensors(original))
        self._tensors = dict(named_tensors(masked))
        self._modules, self._dense_modules = dict(masked.named_modules()), dict(original.named_modules())
        self._plan = plan

    def _index(self, layer: Layer, axis: int) -> Tensor:
        """What is kept of the weight: 0, of its outputs; 1, of its inputs."""
        kept = self._plan.kept(layer.weight, layer.axes[axis])
        return torch.from_numpy(np.asarray(kept)).to(self._tensors[layer.weight].device)

    def _affine(self, modules: Mapping[str, nn.Module], layer: Layer, rows: Tensor) -> tuple[Tensor, Tensor]:
        gain = torch.ones(len(rows), dtype=torch.float64, device=rows.device)
        if layer.gain is not None:
            gain = layer.gain[rows]
        if layer.norm is None:
            return gain, torch.zeros_like(gain)
        factor, offset = norm_affine(modules[layer.norm])
        return gain * factor[rows], gain * offset[rows]

    def _weight(self, layer: Layer, rows: Tensor, columns: Tensor) -> Tensor:
        """(o, d) kept weights."""
        return layer.matrix(self._tensors[layer.weight].detach())[rows][:, columns].flatten(1).double()

    def _write(self, layer: Layer, rows: Tensor, columns: Tensor, change: Change) -> None:
        weight = layer.matrix(self._tensors[layer.weight])
        addition = change.weight.reshape(len(rows), len(columns), *weight.shape[2:]).to(weight.dtype)
        with torch.no_grad():
            weight[rows[:, None], columns[None]] += addition
        norm = self._modules[layer.norm] if layer.norm is not None else None
        add_bias(layer, self._tensors, norm, rows, change.bias)

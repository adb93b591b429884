"""Walks through dense and masked model together, layer by layer, so that later layers correct earlier errors.

The weights of a dense and of a masked model, layer by layer, in units of the ends of the layers' chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.channels.cut.model_copy import named_tensors
from prunekit.planning.plan import Plan
from prunekit.repair.layer_samples import Aim, Gathering, Sample, SourceAim
from prunekit.repair.least_squares import Change
from prunekit.statistics.layers.linear_layers import LayerCall


@dataclass(frozen=True, eq=False)
class Step:
    """One layer of a walk.

    Attributes:
        layer: which.
        rows: positions to fit on.
        channels: kept channels of its input, over all groups.
        centers: whether it is to be fitted by channels.
        source: what is taken of the layer before, to fit both together; None: nothing.
    """

    layer: LayerCall
    rows: int
    channels: Tensor
    centers: bool
    source: SourceAim | None


class Walk:
    """Goes from layer to layer in the order in which all is there that they are fitted to.

    A layer that is added to a shortcut is refitted to *dense branch + dense shortcut - this model's shortcut*. Where
    that is made later than the branch, the layer is refitted when both are there, and the branch is run again.

    Args:
        dense: the dense model, over all batches.
        running: the masked model; None: layers read what the dense model gives.
        steps: in order.
    """

    def __init__(self, dense: Gathering, running: Gathering | None, steps: Sequence[Step]) -> None:
        self._dense, self._running, self._steps = dense, running, steps

    def samples(self) -> Iterator[tuple[LayerCall, Sample | None, Sample | None]]:
        """Yield each layer, what the dense model has there, and the running one; refit it before asking for the next.

        Of a layer that reads what computed values select, the running model has other positions than the dense one:
        there both are the dense one's.
        """
        for i, step in enumerate(self._steps):
            layer = step.layer
            if self._running is None or layer.selected or layer.recurrent:
                dense = running = self._dense_sample(i, step.channels)
            else:
                dense = self._dense_sample(i, None)
                aim = Aim(layer, step.rows, step.channels, source=step.source)
                running = self._running.take(aim, i)
            if dense is None or running is None or dense.totals != running.totals:
                dense = running = None
            yield layer, dense, running

    def _dense_sample(self, i: int, channels: Tensor | None) -> Sample | None:
        """The dense model goes on to where the next layer's pass will begin."""
        step = self._steps[i]
        source = None if step.source is None else step.source._replace(channels=None)
        aim = Aim(step.layer, step.rows, channels, step.centers, outputs=True, source=source)
        return self._dense.take(aim, min(i + 1, len(self._steps) - 1), ahead=True)


def norm_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the factor and offset of a BatchNorm in eval mode, (channels,) each, in float64."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.detach().double()
    offset = -norm.running_mean.double() * factor
    return factor, offset if norm.bias is None else offset + norm.bias.detach().double()


Parameters = Mapping[str, Tensor]


def add_bias(layer: LayerCall, parameters: Parameters, norm: nn.Module | None, rows: Tensor, change: Tensor) -> None:
    """Add to a layer's bias, or where it has none to that of its norm, in place.

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

    def _index(self, layer: LayerCall, axis: int) -> Tensor:
        """Return what is kept of the weight: 0, of its outputs; 1, of its inputs."""
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
        """(o, d) kept weights."""
        return layer.matrix(self._tensors[layer.weight].detach())[rows][:, columns].flatten(1).double()

    def _write(self, layer: LayerCall, rows: Tensor, columns: Tensor, change: Change) -> None:
        weight = layer.matrix(self._tensors[layer.weight])
        addition = change.weight.reshape(len(rows), len(columns), *weight.shape[2:]).to(weight.dtype)
        with torch.no_grad():
            weight[rows[:, None], columns[None]] += addition
        norm = self._modules[layer.norm] if layer.norm is not None else None
        add_bias(layer, self._tensors, norm, rows, change.bias)

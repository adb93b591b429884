"""Walks through dense and masked model together, layer by layer, so that later layers correct earlier errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prunekit.calibration.layers import Layer
from prunekit.repair.record import Aim, Gathering, Sample, SourceAim


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

    layer: Layer
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

    def samples(self) -> Iterator[tuple[Layer, Sample | None, Sample | None]]:
        """Each layer, what the dense model has there, and the running one; refit it before asking for the next.

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

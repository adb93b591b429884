"""What the dense model computes: outputs of its layers at sampled positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.calibration.layers import Call, CallWatch, Layer
from prunekit.calibration.patches import sampled_rows
from prunekit.channels import ChannelMap
from prunekit.repair.held import HeldSummands
from prunekit.repair.settings import RepairSettings


@dataclass(frozen=True, eq=False)
class Sample:
    """A layer of the dense model at sampled rows: those to fit on first, then those of held-out images.

    Attributes:
        rows: (N,) positions, see `Reading`.
        fitted: how many of them are for fitting.
        outputs: (N, channels) of the layer itself.
        others: (N, channels) of the other summand, where the layer's output is added to something.
        inputs: (N, input channels) where the layer is to be fitted by channels.
    """

    rows: Tensor
    fitted: int
    outputs: Tensor
    others: Tensor | None = None
    inputs: Tensor | None = None


class LayerRecorder(CallWatch):
    """Samples what a model's layers compute while it runs once over all images.

    Args:
        model: the dense one.
        layers: as `find_layers` gave them.
        settings: with the number of rows that fit into memory.
        by_channels: weights of layers whose inputs are sampled too.
        norms: as for `CallWatch`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Layer, ...],
        settings: RepairSettings,
        by_channels: Iterable[str] = (),
        norms: Iterable[str] = (),
    ) -> None:
        super().__init__(model, norms)
        self.samples: dict[int, Sample] = {}
        self._settings, self._by_channels = settings, frozenset(by_channels)
        self._layers = {layer.call: layer for layer in layers}
        self._totals = {layer.total: layer for layer in layers if layer.total is not None}
        self._held = HeldSummands(layers)

    def call(self, call: Call) -> Any:
        """Samples the other summand before it may be written to, and every layer's output as it comes."""
        total = self._totals.get(call.number)
        if total is not None:
            self._add_other(total)
        result = call.run()
        self._held.note(call.number, result)
        layer = self._layers.get(call.number)
        if layer is not None and self.layer_weight(call) == layer.weight:
            self._add(layer, call.args[0], result)
        return result

    def _add(self, layer: Layer, inputs: Tensor, output: Tensor) -> None:
        total, reading = layer.reading.rows(output), layer.reading
        split = total - max(1, round(total * self._settings.held_out))
        fit = sampled_rows(split, self._settings.rows, layer.call)
        judge = sampled_rows(total - split, max(1, round(self._settings.rows * self._settings.held_out)), layer.call)
        rows = torch.cat([fit, judge + split]).to(output.device)
        read = reading.centres(inputs, rows, tuple(output.shape[2:])) if layer.weight in self._by_channels else None
        self.samples[layer.call] = Sample(rows, len(fit), reading.outputs(output, rows).clone(), inputs=read)

    def _add_other(self, layer: Layer) -> None:
        other, sample = self._held.take(layer), self.samples.get(layer.call)
        if other is not None and sample is not None:
            self.samples[layer.call] = replace(sample, others=layer.reading.outputs(other, sample.rows).clone())


def affordable_rows(layers: tuple[Layer, ...], channel_map: ChannelMap, settings: RepairSettings) -> int:
    """How many rows of each layer can be recorded within the limit on memory; never fewer than 64."""
    each = sum(4 * channel_map.shapes[layer.weight][0] * (2 if layer.other else 1) for layer in layers)
    return max(64, min(settings.rows, int(settings.memory_bytes / max(1, each) / (1 + settings.held_out))))


def recorded_bytes(samples: Iterable[Sample]) -> int:
    """Memory that samples take."""
    tensors = [tensor for sample in samples for tensor in (sample.rows, sample.outputs, sample.others, sample.inputs)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)

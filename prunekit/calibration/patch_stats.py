"""Gram matrices of what a model's layers read, patch by patch, streamed over batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.calibration.finding import find_layers
from prunekit.calibration.layers import Call, CallWatch, Layer
from prunekit.calibration.patches import gram, gram_bytes, sampled_rows
from prunekit.channels.copying import named_tensors
from prunekit.context import training_mode
from prunekit.errors import ModelError, NonFiniteError, UsageError
from prunekit.inputs import arguments, count_of, inputs_in, taken
from prunekit.nested import first_not_finite

ROWS = 32768
"""Positions sampled of each layer over all images, at least one of each image."""


@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Second moments of a layer's input, and what its output is compared with.

    Attributes:
        layer: which call.
        grams: for each convolution group (d + 1, d + 1) mean products of the columns of a patch and a constant last,
            float64; d is channels * taps, or channels where `taps` is 1.
        taps: columns of each channel; 1 where only the centres of patches were taken, because of the memory.
        variance: (channels,) of the end of the chain behind the output, float64.
        rows: how many positions were sampled.
        output_gain: what the model's output makes of an error here, 1 for a usual layer; see `gains.with_gains`.
    """

    layer: Layer
    grams: tuple[Tensor, ...]
    taps: int
    variance: Tensor
    rows: int
    output_gain: float = 1.0


@dataclass(frozen=True, eq=False)
class PatchStats:
    """What a model's layers read, by the order in which they run."""

    layers: tuple[LayerMoments, ...]

    @property
    def nbytes(self) -> int:
        """Memory of all Gram matrices."""
        return sum(matrix.nbytes for moments in self.layers for matrix in moments.grams)


class _Collector(CallWatch):
    """Adds up moments of the layers of one forward pass after another."""

    def __init__(
        self, model: nn.Module, layers: tuple[Layer, ...], norms: Iterable[str], columns: Mapping[int, int]
    ) -> None:
        super().__init__(model, norms)
        self.found: dict[int, LayerMoments] = {}
        self.batch_rows = 0
        self.batch = 0
        self._ends: dict[int, list[Tensor]] = {}
        self._layers = {layer.call: layer for layer in layers}
        self._finals = {layer.end: layer for layer in layers}
        self._columns = columns

    def call(self, call: Call) -> Any:
        """Takes a layer's input as it is called, and the end of its chain as that is made."""
        layer = self._layers.get(call.number)
        operands = self.operands(call) if layer is not None else None
        result = call.run()
        if layer is not None and operands is not None and operands.weight == layer.weight:
            self._add(layer, operands.inputs, layer.matrix(operands.matrix), result)
        final = self._finals.get(call.number)
        if final is not None and isinstance(result, Tensor):
            ends = self._ends.setdefault(final.call, [])
            found = final.reading.outputs(result, self._rows(final, result))
            if ends and ends[0].shape[1:] != found.shape[1:]:
                raise ModelError(
                    f"layer {final.weight.rpartition('.')[0]!r}: expected a model that makes the same calls on every "
                    "batch, but this one branches on values, as transformers do that leave out a mask which masks "
                    "nothing; let every batch be alike (some padding in each), or choose a criterion such as taylor "
                    "or l2, without repair"
                )
            ends.append(found)
        return result

    def _rows(self, layer: Layer, output: Tensor) -> Tensor:
        rows = sampled_rows(layer.reading.rows(output), self.batch_rows, layer.call + 100_003 * self.batch)
        return rows.to(output.device)

    def _add(self, layer: Layer, inputs: Tensor, weight: Tensor, output: Tensor) -> None:
        reading, rows = layer.reading, self._rows(layer, output)
        spatial = tuple(output.shape[2:]) if reading.kernel else ()
        width = weight.shape[1]
        taps = self._columns[layer.call] // width
        read = reading.patches if taps == reading.taps else reading.centres
        parts = []
        for group in range(reading.groups):
            channels = torch.arange(group * width, (group + 1) * width, device=inputs.device)
            parts.append(gram(read(reading.channels(inputs, channels), rows, spatial)) * len(rows))
        known = self.found.get(layer.call)
        sums = parts if known is None else [a.add_(b) for a, b in zip(known.grams, parts, strict=True)]
        count = len(rows) + (0 if known is None else known.rows)
        none = torch.zeros(0, dtype=torch.float64)
        self.found[layer.call] = LayerMoments(layer, tuple(sums), taps, none, count)

    def finished(self) -> tuple[LayerMoments, ...]:
        """The moments of all batches; once, at the end."""
        return tuple(
            replace(
                moments,
                grams=tuple(total.div_(moments.rows) for total in moments.grams),  # in place: they are large
                variance=torch.cat(self._ends[call]).double().var(0),
            )
            for call, moments in sorted(self.found.items())
            if call in self._ends
        )


def _columns(layers: Iterable[Layer], tensors: Mapping[str, Tensor], limit: int) -> dict[int, int]:
    """Columns of each layer's Gram matrices by its call: those of whole patches, or of the centres of the largest."""
    widths = {layer.call: layer.matrix(tensors[layer.weight]).shape[1] for layer in layers}
    found = {layer.call: widths[layer.call] * layer.reading.taps for layer in layers}
    size = {layer.call: layer.reading.groups * gram_bytes(found[layer.call]) for layer in layers}
    for layer in sorted(layers, key=lambda layer: size[layer.call], reverse=True):
        if sum(size.values()) <= limit:
            break
        found[layer.call] = widths[layer.call]
        size[layer.call] = layer.reading.groups * gram_bytes(widths[layer.call])
    return found


def _stated(layers: Sequence[Layer], columns: Mapping[int, int]) -> str:
    """What the Gram matrices will take, in words."""
    if not layers:
        return "no layer that can be followed reads channels that may go"
    sizes = [layer.reading.groups * gram_bytes(columns[layer.call]) / 2**20 for layer in layers]
    largest = layers[sizes.index(max(sizes))]
    return (
        f"Gram matrices of the patches of {len(layers)} layers take {sum(sizes):,.0f} MiB, the largest "
        f"{max(sizes):,.0f} MiB ({largest.weight.rpartition('.')[0]}, {columns[largest.call]:,} columns)"
    )


def collect_patches(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    norms: Iterable[str] = (),
    inputs: Collection[tuple[str, int]] | None = None,
    rows: int = ROWS,
    images: int = 1024,
    memory_bytes: int = 2**31,
    log: Callable[[str], None] | None = None,
) -> PatchStats:
    """Runs a model over batches, in eval mode without gradients, and sums the Gram matrices of its layers' inputs.

    Memory: `gram_bytes(channels * taps)` for each layer and group, 8 * 4609^2 = 170 MB for 512 channels and a 3 x 3
    kernel. Where all would take more than `memory_bytes`, the largest have only the centres of their patches, 8 * 513^2
    = 2 MB each, until the rest fits.

    Args:
        model: the dense model.
        batches: tensors, or tuples and lists whose first entry is the model's input, or a tuple of all its inputs.
        norms: paths of modules whose insides are not looked at: those of a channel map.
        inputs: weight and axis of the inputs, of those of the layers to look at; None: all.
        rows: positions sampled of each layer over `images` images.
        images: how many there will be: only the share of each batch in `rows` depends on it.
        memory_bytes: limit for all Gram matrices together.
        log: gets a line on the memory that they take before they are collected.

    Raises:
        UsageError: there are no batches.
        ModelError: the model makes other calls on other batches.
        NonFiniteError: a layer reads NaN or Inf; names it, and the weight to blame if one is.
    """
    collector: _Collector | None = None
    with training_mode(model, False):
        for index, batch in enumerate(batches):
            given = arguments(model, inputs_in(batch))
            samples = count_of(given)
            if collector is None:
                layers = find_layers(model, taken(given, slice(2)), norms)
                wanted = tuple(x for x in layers if inputs is None or (x.weight, x.axes[1]) in inputs)
                columns = _columns(wanted, dict(named_tensors(model)), memory_bytes)
                if log is not None:
                    log(_stated(wanted, columns))
                collector = _Collector(model, wanted, norms, columns)
            collector.batch, collector.batch_rows = index, max(samples, round(rows * samples / images))
            with collector.watching():
                model(*given)
    if collector is None:
        raise UsageError("patch statistics: expected at least one batch, got none")
    found = collector.finished()
    for moments in found:
        if not all(bool(matrix.isfinite().all()) for matrix in moments.grams):
            raise NonFiniteError(f"layer {moments.layer.weight.rpartition('.')[0]!r} reads NaN or Inf{_blamed(model)}")
    return PatchStats(found)


def _blamed(model: nn.Module) -> str:
    """The first tensor of a model that is to blame, in words; nothing where all are finite."""
    name = first_not_finite(named_tensors(model))
    return "" if name is None else f": {name!r} of the model is not finite"

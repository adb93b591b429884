"""What a layer reads and gives at sampled positions, gathered over batches in passes that stop there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prunekit.calibration.layers import Call, Layer
from prunekit.calibration.patches import sampled_rows
from prunekit.repair.kept import Kept
from prunekit.repair.resuming import DivergedError, ResumableRun

Inputs = tuple[Tensor, ...]
"""Positional inputs of a model, samples first."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some of the calibration images.

    Attributes:
        number: of the batch.
        inputs: of the model.
        share: of the rows that are sampled.
    """

    number: int
    inputs: Inputs
    share: float


def batches_of(inputs: Inputs, held_out: float, size: int) -> tuple[list[Batch], int]:
    """Batches to fit on, then those of the held-out images; and how many are to fit on.

    Args:
        held_out: share of the images, the last ones, that only judge.
        size: images in a batch, at most.
    """
    total = len(inputs[0])
    split = total - max(1, round(total * held_out))
    parts = [(0, split, 1.0), (split, total, held_out)]
    bounds = [
        (start, min(start + size, last), share / (last - first))
        for first, last, share in parts
        for start in range(first, last, size)
    ]
    found = [Batch(i, tuple(x[a:b] for x in inputs), each * (b - a)) for i, (a, b, each) in enumerate(bounds)]
    return found, sum(a < split for a, _, _ in bounds)


class SourceAim(NamedTuple):
    """What is taken of the layer before: some input channels, wherever some rows of the aimed layer read its output."""

    layer: Layer
    rows: int
    channels: Tensor


@dataclass(frozen=True, eq=False)
class Aim:
    """What a pass takes of a layer.

    Attributes:
        layer: which.
        rows: how many positions of its output to fit on.
        channels: of its input whose patches are taken; None: no patches.
        centres: whether the whole input is taken at the centres of the patches.
        outputs: whether what the layer gives is taken.
        source: of the layer before; None: nothing.
    """

    layer: Layer
    rows: int
    channels: Tensor | None = None
    centres: bool = False
    outputs: bool = False
    source: SourceAim | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """A layer at N sampled rows: those to fit on first, then those of held-out images.

    Attributes:
        fitted: how many of them are for fitting.
        inputs: (N, channels * taps) patches that the layer reads.
        outputs: (N, output channels) of the layer itself.
        others: (N, output channels) of the other summand, where the layer's output is added to something.
        centres: (N, input channels) at the middle of each patch.
        paired: (N,) bool, the n rows at which the layer before was looked at too; None: it was not.
        before: (n, taps * d) what that one reads at all positions of its output that each of these rows reads.
        there: (n, taps) False where what they read is padding.
    """

    fitted: int
    inputs: Tensor | None = None
    outputs: Tensor | None = None
    others: Tensor | None = None
    centres: Tensor | None = None
    paired: Tensor | None = None
    before: Tensor | None = None
    there: Tensor | None = None


class LayerPass(ResumableRun):
    """Takes what a layer reads and gives in one pass after another.

    Attributes:
        taken: in the last pass, by the names of a `Sample`'s tensors; empty where the layer was not called.
    """

    def __init__(self, model: nn.Module, norms: Iterable[str] = ()) -> None:
        super().__init__(model, norms)
        self.taken: dict[str, Tensor] = {}
        self._aim: Aim | None = None
        self._batch: Batch | None = None
        self._other: Tensor | None = None
        self._rows: Tensor | None = None
        self._places: Tensor | None = None
        self._shape = torch.Size()

    def take(self, aim: Aim, batch: Batch, kept: Kept | None, keep_at: int, stop_at: int) -> Kept | None:
        """One pass over a batch, see `ResumableRun.run`."""
        self._aim, self._batch, self.taken = aim, batch, {}
        try:
            return self.run(batch.inputs, kept, keep_at, stop_at)
        finally:
            self._aim = self._other = self._rows = self._places = None

    def before(self, call: Call) -> None:
        """Takes what the layer reads, and the other summand before it may be written to."""
        aim = self._aim
        if aim is None:
            return
        layer = aim.layer
        if aim.source is not None and call.number == aim.source.layer.call:
            operands = self.operands(call)
            if operands is not None and operands.weight == aim.source.layer.weight:
                self._read_before(aim, aim.source, self.real(operands.inputs))
        if call.number == layer.call:
            operands = self.operands(call)
            if operands is not None and operands.weight == layer.weight:
                self._read(aim, self.real(operands.inputs))
        if call.number == layer.ready and self._other is not None and self._rows is not None:
            other = self.real(self._other)
            if self._places is None:
                self.taken["others"] = layer.reading.outputs(other, self._rows).clone()
            else:
                self.taken["others"] = layer.reading.outputs(self._landed(other), self._rows)

    def _read(self, aim: Aim, inputs: Tensor) -> None:
        reading = aim.layer.reading
        spatial = reading.spatial(inputs)
        self._rows = rows = self._sampled(aim, reading.rows_of(inputs)).to(inputs.device)
        if aim.channels is not None:
            self.taken["inputs"] = reading.patches(reading.channels(inputs, aim.channels), rows, spatial)
        if aim.centres:
            self.taken["centres"] = reading.centres(inputs, rows, spatial)

    def _sampled(self, aim: Aim, total: int) -> Tensor:
        assert self._batch is not None
        seed = aim.layer.call + 100_003 * self._batch.number
        return sampled_rows(total, max(1, round(aim.rows * self._batch.share)), seed)

    def _read_before(self, aim: Aim, source: SourceAim, inputs: Tensor) -> None:
        """Rows of the aimed layer are known before it is called: by the shape of what the layer before gives."""
        reading, made = aim.layer.reading, source.layer.reading.spatial(inputs)
        spatial, samples = reading.spatial_of(made), source.layer.reading.rows_of(inputs) // prod(made)
        rows = self._sampled(aim, samples * prod(spatial)).to(inputs.device)
        paired = torch.arange(len(rows), device=rows.device) % -(-aim.rows // source.rows) == 0
        places, there = reading.places(rows[paired], spatial, made)
        channels = source.layer.reading.channels(inputs, source.channels)
        patches = source.layer.reading.patches(channels, places.flatten(), made)
        self.taken |= {"paired": paired, "before": patches.view(len(places), -1), "there": there}

    def _landed(self, other: Tensor) -> Tensor:
        """The other summand as the layer's output lies; 0 where of that nothing is left."""
        assert self._places is not None
        landed = other.new_zeros(self._shape.numel())
        landed[self._places.flatten()] = other.flatten()
        return landed.view(self._shape)

    def after(self, call: Call, result: Any) -> None:
        """Takes what the layer gives, and holds the other summand."""
        aim = self._aim
        if aim is None or not isinstance(result, Tensor):
            return
        layer = aim.layer
        if call.number == layer.other:
            self._other = result
        if call.number == layer.call and self._rows is not None:
            if aim.outputs:
                self.taken["outputs"] = layer.reading.outputs(result, self._rows).clone()
            if layer.moves:
                self._shape = result.shape
                self._places = torch.arange(result.numel(), device=result.device).view(result.shape)
        if call.number in layer.moves and self._places is not None:
            self._places = call.function(self._places, *call.args[1:], **call.named)


class Gathering:
    """One model over all batches, as far as it has run.

    Args:
        run: of the model.
        batches: those to fit on first.
        fitted: how many these are.
    """

    def __init__(self, run: LayerPass, batches: Sequence[Batch], fitted: int) -> None:
        self._run, self._batches, self._fitted = run, batches, fitted
        self._kept: list[Kept | None] = [None] * len(batches)
        self._at = 0

    def take(self, aim: Aim, keep_at: int, stop_at: int) -> Sample | None:
        """What the layer reads and gives; None where it is not called in each pass.

        Args:
            keep_at: number of the call from which later passes go on.
            stop_at: of the call up to which this one goes.
        """
        parts: list[dict[str, Tensor]] = []
        keep_at, self._at = (0 if keep_at == self._at else keep_at), keep_at
        for i, batch in enumerate(self._batches):
            kept, self._kept[i] = self._kept[i], None
            try:
                self._kept[i] = self._run.take(aim, batch, kept, keep_at, stop_at)
            except DivergedError:
                self._run.take(aim, batch, None, 0, stop_at)
            parts.append(self._run.taken)
        if not all(part.keys() == parts[0].keys() and part for part in parts):
            return None
        count = sum(len(next(iter(part.values()))) for part in parts[: self._fitted])
        return Sample(count, **{name: _joined([part.pop(name) for part in parts]) for name in list(parts[0])})


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates tensors, each freed as soon as it is copied."""
    whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    start = 0
    for i, part in enumerate(parts):
        whole[start : start + len(part)] = part
        start += len(part)
        parts[i] = whole[:0]
    return whole

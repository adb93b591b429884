"""What a layer reads and gives at sampled positions, gathered over batches in passes that stop there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prunekit.calibration.layers import Call, Layer
from prunekit.calibration.patches import sampled_rows
from prunekit.repair.batches import Batch
from prunekit.repair.kept import Kept
from prunekit.repair.resuming import DivergedError, ResumableRun
from prunekit.repair.windows import Windows


class SourceAim(NamedTuple):
    """What is taken of the layer before: some input channels, in windows of the aimed layer's output, see `Windows`."""

    layer: Layer
    each: float
    channels: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Aim:
    """What a pass takes of a layer.

    Attributes:
        layer: which.
        rows: how many positions of its output to fit on.
        channels: of its input whose patches are taken; None: no patches.
        centres: whether the whole input is taken at the centres of the patches.
        outputs: whether what the layer gives is taken.
        source: of the layer before, and of this one's ends in the same windows; None: nothing.
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
        before: (n, d, ...) what the layer before it reads in n windows, see `Windows.inputs`; None: nothing was taken.
        there: (n, 1, ...) False where what the layer reads in them is padding.
        window_outputs, window_others: (n * positions, output channels) as `outputs` and `others`, in the windows.
        windows_fitted: how many of the windows are for fitting.
    """

    fitted: int
    inputs: Tensor | None = None
    outputs: Tensor | None = None
    others: Tensor | None = None
    centres: Tensor | None = None
    before: Tensor | None = None
    there: Tensor | None = None
    window_outputs: Tensor | None = None
    window_others: Tensor | None = None
    windows_fitted: int = 0


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
        self._windows: Tensor | None = None
        self._places: Tensor | None = None
        self._shape = torch.Size()

    def take(self, aim: Aim, batch: Batch, kept: Kept | None, keep_at: int, stop_at: int) -> Kept | None:
        """One pass over a batch, see `ResumableRun.run`."""
        self._aim, self._batch, self.taken = aim, batch, {}
        try:
            return self.run(batch.inputs, kept, keep_at, stop_at)
        finally:
            self._aim = self._other = self._rows = self._windows = self._places = None

    def before(self, call: Call) -> None:
        """Takes what the layer reads, and the other summand before it may be written to."""
        aim = self._aim
        if aim is None:
            return
        layer, source = aim.layer, aim.source
        if source is not None and call.number == source.layer.call:
            operands = self.operands(call)
            if operands is not None and operands.weight == source.layer.weight:
                self._read_before(layer, source, operands.inputs)
        if call.number == layer.call:
            operands = self.operands(call)
            if operands is not None and operands.weight == layer.weight:
                self._read(aim, self.real(operands.inputs))
        if call.number == layer.ready and self._other is not None and self._rows is not None:
            other = self.real(self._other)
            self._take_rows("others", other if self._places is None else self._landed(other), layer)

    def _read(self, aim: Aim, inputs: Tensor) -> None:
        reading = aim.layer.reading
        spatial = reading.spatial(inputs)
        self._rows = rows = self._sampled(aim, inputs).to(inputs.device)
        if aim.channels is not None:
            self.taken["inputs"] = reading.patches(reading.channels(inputs, aim.channels), rows, spatial)
        if aim.centres:
            self.taken["centres"] = reading.centres(inputs, rows, spatial)

    def _sampled(self, aim: Aim, inputs: Tensor) -> Tensor:
        assert self._batch is not None
        reading, count = aim.layer.reading, max(1, round(aim.rows * self._batch.share))
        among = reading.counted(reading.positions_of(inputs), self._batch.counted)
        return sampled_rows(reading.rows_of(inputs), count, self._seed(aim.layer), among)

    def _seed(self, layer: Layer) -> int:
        assert self._batch is not None
        return layer.call + 100_003 * self._batch.number

    def _read_before(self, layer: Layer, source: SourceAim, inputs: Tensor) -> None:
        """Windows of the layer's output are known before it is called, by shapes, which a blank has too."""
        assert self._batch is not None
        first, counted = source.layer.reading, self._batch.counted
        among = None if first.kernel else first.counted(first.positions_of(inputs), counted)
        windows = Windows.drawn(first, layer.reading, inputs, source.each, self._seed(layer), among)
        self._windows = windows.rows()
        if source.channels is not None:
            values = source.layer.reading.channels(self.real(inputs), source.channels)
            self.taken |= {"before": windows.inputs(values), "there": windows.there()}

    def _take_rows(self, name: str, values: Tensor, layer: Layer) -> None:
        """Of a tensor that lies as the layer's output does."""
        assert self._rows is not None
        self.taken[name] = layer.reading.outputs(values, self._rows)
        if self._windows is not None:
            self.taken[f"window_{name}"] = layer.reading.outputs(values, self._windows)

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
                self._take_rows("outputs", result, layer)
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
                if kept is not None and not all(bool(part.isfinite().all()) for part in self._run.taken.values()):
                    raise DivergedError  # perhaps of a blank that something read where nobody looks
            except DivergedError:
                self._kept[i] = None
                self._run.take(aim, batch, None, 0, stop_at)
            parts.append(self._run.taken)
        if not all(part.keys() == parts[0].keys() and part for part in parts):
            return None
        names = list(parts[0])
        counts = {name: sum(len(part[name]) for part in parts[: self._fitted]) for name in names}
        rows = next(counts[name] for name in ("inputs", "outputs", "centres") if name in counts)
        tensors = {name: _joined([part.pop(name) for part in parts]) for name in names}
        return Sample(rows, **tensors, windows_fitted=counts.get("before", 0))


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates tensors, each freed as soon as it is copied."""
    whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    start = 0
    for i, part in enumerate(parts):
        whole[start : start + len(part)] = part
        start += len(part)
        parts[i] = whole[:0]
    return whole

"""What a layer reads and gives at sampled positions, gathered over batches in passes that stop there.

Windows of images in which two layers, one behind the other, are looked at together.

All positions of a window share what the first layer computes in it: to compute that for scattered positions one by one
takes as many times longer as the second layer has taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.repair.memory_budget import Lifetimes
from prunekit.repair.resumable_forward import DivergedError, Kept, ResumableRun
from prunekit.repair.validation import Batch
from prunekit.statistics.layers.layer_graph import LayerGraph, calls_by_weight, find_layer_graph
from prunekit.statistics.layers.linear_layers import FunctionCall, LayerCall
from prunekit.statistics.layers.patches import PatchGeometry, sample_rows, with_strides_of
from prunekit.utils.inputs import sample_count
from prunekit.utils.tensors import map_tensors

Sizes = tuple[int, ...]


def convolving(reading: PatchGeometry) -> PatchGeometry:
    """Return a reading as one of a convolution that pads nothing; that of a linear layer has one tap along one axis."""
    if not reading.kernel:
        return PatchGeometry((1,), (1,), (0,), (1,))
    return PatchGeometry(reading.kernel, reading.stride, (0,) * len(reading.kernel), reading.dilation)


@dataclass(frozen=True, eq=False)
class Windows:
    """One window of the second layer's output in each of N samples, all of one size.

    A linear layer's samples are its rows, and have one position.

    Attributes:
        first, second: how the layers read.
        made, outputs: spatial sizes of what the first gives, and of what the second does.
        size: of a window, positions of the second's output along each axis.
        samples: (N,) which.
        starts: (N, axes) where each begins.
    """

    first: PatchGeometry
    second: PatchGeometry
    made: Sizes
    outputs: Sizes
    size: Sizes
    samples: Tensor
    starts: Tensor

    @classmethod
    def drawn(
        cls,
        first: PatchGeometry,
        second: PatchGeometry,
        inputs: Tensor,
        each: float,
        seed: int,
        among: Tensor | None = None,
    ) -> Windows:
        """Return the windows of one size whatever the number of images.

        Args:
            inputs: of the first layer; an image may have several samples for a linear layer.
            each: positions of the second's output for each image, at most; below 1 for not every image.
            seed: of samples and places.
            among: (N,) samples that may be drawn; None: all.
        """
        made = first.spatial(inputs)
        outputs = second.spatial_of(made)
        samples = sample_rows(first.rows_of(inputs) // prod(made), max(1, round(each * len(inputs))), seed, among)
        share = min(1.0, max(1.0, each) / prod(outputs)) ** (1 / max(1, len(outputs)))
        size = tuple(max(1, int(share * n + 1e-6)) for n in outputs)
        generator, number = torch.Generator().manual_seed(seed), (len(samples),)
        starts = [torch.randint(n - m + 1, number, generator=generator) for n, m in zip(outputs, size, strict=True)]
        at = torch.stack(starts, 1) if starts else torch.zeros(*number, 0, dtype=torch.int64)
        return cls(first, second, made, outputs, size, samples.to(inputs.device), at.to(inputs.device))

    def rows(self) -> Tensor:
        """(N * positions,) which rows of the second's output they are, window by window."""
        found = self.samples.view(-1, *[1] * len(self.size))
        for i, (size, total) in enumerate(zip(self.size, self.outputs, strict=True)):
            found = found * total + self._along(i, self.starts[:, i], size)
        return found.flatten()

    def inputs(self, inputs: Tensor) -> Tensor:
        """(N, channels, ...): what the first layer reads of them, with all padding that either layer puts there."""
        if not self.size:
            return inputs.reshape(-1, inputs.shape[-1])[self.samples][:, :, None]
        pads = [p + s * q for p, s, q in zip(self.first.padding, self.first.stride, self.second.padding, strict=True)]
        padded = F.pad(inputs, [pad for pad in reversed(pads) for _ in range(2)]) if any(pads) else inputs
        first, second = self.first, self.second
        where: list[Any] = [self.samples.view(-1, *[1] * len(self.size)), slice(None)]
        for i, size in enumerate(self._hidden()):
            span = (size - 1) * first.stride[i] + first.dilation[i] * (first.kernel[i] - 1) + 1
            where.append(self._along(i, self.starts[:, i] * second.stride[i] * first.stride[i], span))
        return padded[tuple(where)].movedim(-1, 1)

    def there(self) -> Tensor:
        """(N, 1, ...): False where what the second layer reads of them is padding."""
        shape = len(self.samples), *[1] * max(1, len(self.size))
        found = torch.ones(shape, dtype=torch.bool, device=self.samples.device)
        for i, (size, total) in enumerate(zip(self._hidden(), self.made, strict=True)):
            at = self._along(i, self.starts[:, i] * self.second.stride[i] - self.second.padding[i], size)
            found = found & (at >= 0) & (at < total)
        return found[:, None]

    def _hidden(self) -> Sizes:
        """Spatial sizes of what the second layer reads of a window."""
        second = self.second
        axes = zip(self.size, second.kernel, second.stride, second.dilation, strict=True)
        return tuple((m - 1) * step + wide * (k - 1) + 1 for m, k, step, wide in axes)

    def _along(self, axis: int, starts: Tensor, size: int) -> Tensor:
        """(N, 1.., size, ..1) positions along an axis."""
        shape = [1] * len(self.size)
        shape[axis] = size
        positions = torch.arange(size, device=starts.device)
        return starts.view(-1, *[1] * len(self.size)) + positions.view(shape)


class SourceAim(NamedTuple):
    """What is taken of the layer before: some input channels, in windows of the aimed layer's output, see `Windows`."""

    layer: LayerCall
    each: float
    channels: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Aim:
    """What a pass takes of a layer.

    Attributes:
        layer: which.
        rows: how many positions of its output to fit on, over all of its calls.
        channels: of its input whose patches are taken; None: no patches.
        centers: whether the whole input is taken at the centers of the patches.
        outputs: whether what the layer gives is taken.
        source: of the layer before, and of this one's ends in the same windows; None: nothing.
        calls: those of the layer's weight in the pass; empty: the layer's own.
    """

    layer: LayerCall
    rows: int
    channels: Tensor | None = None
    centers: bool = False
    outputs: bool = False
    source: SourceAim | None = None
    calls: tuple[LayerCall, ...] = ()


@dataclass(frozen=True, eq=False)
class Route:
    """The calls that a model makes in a pass over one batch.

    Attributes:
        names: of all of them.
        layers: the calls of each weight.
        lifetimes: how long results are needed.
        cuts: for each step of a walk the number of the call from which passes go on to it.
    """

    names: tuple[str, ...]
    layers: Mapping[str, tuple[LayerCall, ...]]
    lifetimes: Lifetimes
    cuts: Sequence[int]

    def stop(self, weight: str) -> int:
        """Return the number of the call before which all is there that a layer is fitted to."""
        return max((call.ready for call in self.layers.get(weight, ())), default=0)

    def aimed(self, aim: Aim) -> Aim:
        """Return an aim at the layer's calls in this pass."""
        source = aim.source
        if source is not None:
            before = self.layers.get(source.layer.weight)
            source = None if before is None else source._replace(layer=before[0])
        return replace(aim, calls=self.layers.get(aim.layer.weight, ()), source=source)


@dataclass(frozen=True, eq=False)
class Sample:
    """A layer at N sampled rows: those to fit on first, then those of held-out images.

    Attributes:
        fitted: how many of them are for fitting.
        inputs: (N, channels * taps) patches that the layer reads.
        outputs: (N, output channels) of the layer itself.
        others: (N, output channels) of the other summand, where the layer's output is added to something.
        centers: (N, input channels) at the middle of each patch.
        before: (n, d, ...) what the layer before it reads in n windows, see `Windows.inputs`; None: nothing was taken.
        there: (n, 1, ...) False where what the layer reads in them is padding.
        window_outputs, window_others: (n * positions, output channels) as `outputs` and `others`, in the windows.
        windows_fitted: how many of the windows are for fitting.
        totals: how many rows each call has of which those are drawn, batch by batch.
    """

    fitted: int
    inputs: Tensor | None = None
    outputs: Tensor | None = None
    others: Tensor | None = None
    centers: Tensor | None = None
    before: Tensor | None = None
    there: Tensor | None = None
    window_outputs: Tensor | None = None
    window_others: Tensor | None = None
    windows_fitted: int = 0
    totals: tuple[tuple[int, ...], ...] = ()


@dataclass(eq=False)
class _Seen:
    """One call of a layer, as far as a pass has come.

    Attributes:
        layer: the call.
        number: among those of its weight.
        share: of the rows of all of them.
        taken: by the names of a `Sample`'s tensors.
        total: rows of the call.
    """

    layer: LayerCall
    number: int
    share: float
    taken: dict[str, Tensor] = field(default_factory=dict)
    total: int = 0
    other: Tensor | None = None
    rows: Tensor | None = None
    windows: Tensor | None = None
    places: Tensor | None = None
    shape: torch.Size = field(default_factory=torch.Size)


class LayerPass(ResumableRun):
    """Takes what a layer reads and gives in one pass after another.

    Attributes:
        taken: in the last pass, by the names of a `Sample`'s tensors, call after call; empty where there was none.
        totals: rows of each call.
    """

    def __init__(self, model: nn.Module, norms: Iterable[str] = ()) -> None:
        super().__init__(model, norms)
        self.taken: dict[str, Tensor] = {}
        self.totals: tuple[int, ...] = ()
        self._norm_paths = tuple(norms)
        self._aim: Aim | None = None
        self._batch: Batch | None = None
        self._aimed: list[_Seen] = []

    def survey(self, batch: Batch) -> LayerGraph:
        """Find the calls of a pass over a batch, and how long results are needed in it."""
        self.learn(batch.inputs)
        return find_layer_graph(self._model, map_tensors(batch.inputs, torch.clone), self._norm_paths)

    def take(self, aim: Aim, batch: Batch, kept: Kept | None, keep_at: int, stop_at: int) -> Kept | None:
        """Return one pass over a batch, see `ResumableRun.run`.

        Raises:
            DivergedError: a call of the layer was not made as it was expected.
        """
        calls = aim.calls or (aim.layer,)
        total = sum(call.rows for call in calls) or 1
        self._aimed = [_Seen(call, i, call.rows / total if len(calls) > 1 else 1.0) for i, call in enumerate(calls)]
        self._aim, self._batch, self.taken = aim, batch, {}
        try:
            found = self.run(batch.inputs, kept, keep_at, stop_at)
            self.totals = tuple(seen.total for seen in self._aimed)
            names = list(self._aimed[0].taken)
            if not names or any(set(seen.taken) != set(names) for seen in self._aimed):
                raise DivergedError
            self.taken = {name: _joined([seen.taken.pop(name) for seen in self._aimed]) for name in names}
            return found
        finally:
            self._aim, self._aimed = None, []

    def before(self, call: FunctionCall) -> None:
        """Take what the layer reads, and the other summand before it may be written to."""
        for seen in self._aimed:
            self._before(call, seen)

    def _before(self, call: FunctionCall, seen: _Seen) -> None:
        aim, layer = self._aim, seen.layer
        assert aim is not None
        if aim.source is not None and call.number == aim.source.layer.call:
            operands = self.operands(call)
            if operands is not None and operands.weight == aim.source.layer.weight:
                self._read_before(seen, aim.source, operands.inputs)
        if call.number == layer.call:
            operands = self.operands(call)
            if operands is not None and operands.weight == layer.weight:
                self._read(aim, seen, self.real(operands.inputs))
        if call.number == layer.ready and seen.other is not None and seen.rows is not None:
            other = self.real(seen.other)
            self._take_rows("others", other if seen.places is None else self._landed(seen, other), seen)

    def _read(self, aim: Aim, seen: _Seen, inputs: Tensor) -> None:
        reading = seen.layer.geometry
        spatial = reading.spatial(inputs)
        seen.total = reading.rows_of(inputs)
        seen.rows = rows = self._sampled(aim, seen, inputs).to(inputs.device)
        if aim.channels is not None:
            seen.taken["inputs"] = reading.patches(reading.channels(inputs, aim.channels), rows, spatial)
        if aim.centers:
            seen.taken["centers"] = reading.centers(inputs, rows, spatial)

    def _sampled(self, aim: Aim, seen: _Seen, inputs: Tensor) -> Tensor:
        assert self._batch is not None
        reading, count = seen.layer.geometry, max(1, round(aim.rows * self._batch.share * seen.share))
        among = reading.counted(reading.positions_of(inputs), self._batch.counted)
        return sample_rows(seen.total, count, self._seed(seen), among)

    def _seed(self, seen: _Seen) -> int:
        """Return the same for a call in both models, whatever is called before it."""
        assert self._aim is not None
        assert self._batch is not None
        return self._aim.layer.call + 100_003 * self._batch.number + 1_000_003 * seen.number

    def _read_before(self, seen: _Seen, source: SourceAim, inputs: Tensor) -> None:
        """Windows of the layer's output are known before it is called, by shapes, which a blank has too."""
        assert self._batch is not None
        first, counted = source.layer.geometry, self._batch.counted
        among = None if first.kernel else first.counted(first.positions_of(inputs), counted)
        windows = Windows.drawn(first, seen.layer.geometry, inputs, source.each, self._seed(seen), among)
        seen.windows = windows.rows()
        if source.channels is not None:
            values = source.layer.geometry.channels(self.real(inputs), source.channels)
            seen.taken |= {"before": windows.inputs(values), "there": windows.there()}

    def _take_rows(self, name: str, values: Tensor, seen: _Seen) -> None:
        """Of a tensor that lies as the layer's output does."""
        assert seen.rows is not None
        seen.taken[name] = seen.layer.geometry.outputs(values, seen.rows)
        if seen.windows is not None:
            seen.taken[f"window_{name}"] = seen.layer.geometry.outputs(values, seen.windows)

    def _landed(self, seen: _Seen, other: Tensor) -> Tensor:
        """Return the other summand as the layer's output lies; 0 where of that nothing is left."""
        assert seen.places is not None
        landed = other.new_zeros(seen.shape.numel())
        landed[seen.places.flatten()] = other.flatten()
        return landed.view(seen.shape)

    def after(self, call: FunctionCall, result: Any) -> None:
        """Take what the layer gives, and hold the other summand."""
        if isinstance(result, Tensor):
            for seen in self._aimed:
                self._after(call, result, seen)

    def _after(self, call: FunctionCall, result: Tensor, seen: _Seen) -> None:
        aim, layer = self._aim, seen.layer
        assert aim is not None
        if call.number == layer.other:
            seen.other = result
        if call.number == layer.call and seen.rows is not None:
            if aim.outputs:
                self._take_rows("outputs", result, seen)
            if layer.moves:
                seen.shape = result.shape
                seen.places = torch.arange(result.numel(), device=result.device).view(result.shape)
        if call.number in layer.moves and seen.places is not None:
            seen.places = call.function(with_strides_of(seen.places, call.args[0]), *call.args[1:], **call.named)


class Gathering:
    """One model over all batches, as far as it has run.

    Another batch may make other calls, as one of more images does where a model loops over them: each has a route of
    its own where the one that it is expected to take turns out to be wrong.

    Args:
        run: of the model.
        batches: those to fit on first.
        fitted: how many these are.
        cuts: of a walk, see `Route`, from the calls of each weight and how long results are needed.
        found: the calls that all are expected to make, of which the run has learned how long their results are needed;
            None: those of the first batch.

    Attributes:
        route: that all batches are expected to take.
    """

    def __init__(
        self,
        run: LayerPass,
        batches: Sequence[Batch],
        fitted: int,
        cuts: Callable[[Mapping[str, tuple[LayerCall, ...]], Lifetimes], Sequence[int]],
        found: LayerGraph | None = None,
    ) -> None:
        self._run, self._batches, self._fitted = run, batches, fitted
        self._kept: list[Kept | None] = [None] * len(batches)
        self._at = [0] * len(batches)
        self._cuts, self._by_size = cuts, dict[int, Route]()
        self.route = self._routed(run.survey(batches[0]) if found is None else found)
        self._routes = [self.route] * len(batches)

    def _routed(self, found: LayerGraph) -> Route:
        layers = calls_by_weight(found.layers)
        return Route(found.calls, layers, self._run.lifetimes, self._cuts(layers, self._run.lifetimes))

    def take(self, aim: Aim, step: int, *, ahead: bool = False) -> Sample | None:
        """Return what the layer reads and gives; None where that is not the same in each pass.

        Args:
            step: of the walk, from whose cut the passes of later steps go on.
            ahead: whether this pass goes on to there, and to what the layer gives.
        """
        parts: list[dict[str, Tensor]] = []
        totals: list[tuple[int, ...]] = []
        for i in range(len(self._batches)):
            if not self._found(i, aim, step, ahead=ahead):
                return None
            parts.append(self._run.taken)
            totals.append(self._run.totals)
        names = next((list(part) for part in parts if part), [])
        if not names or any(part and list(part) != names for part in parts):
            return None
        fitting = [part for part in parts[: self._fitted] if part]
        counts = {name: sum(len(part[name]) for part in fitting) for name in names}
        rows = next(counts[name] for name in ("inputs", "outputs", "centers") if name in counts)
        tensors = {name: _joined([part.pop(name) for part in parts if part]) for name in names}
        return Sample(rows, **tensors, windows_fitted=counts.get("before", 0), totals=tuple(totals))

    def _found(self, i: int, aim: Aim, step: int, *, ahead: bool) -> bool:
        """Run a batch: from where it was kept, from its start, by the route of others of its size, or by its own."""
        for attempt in (self._same, self._restarted, self._as_others, self._surveyed):
            if attempt(i):
                try:
                    self._pass(i, aim, step, ahead=ahead)
                except DivergedError:
                    continue
                return True
        self._restarted(i)
        return False

    def _pass(self, i: int, aim: Aim, step: int, *, ahead: bool) -> None:
        run, batch, route = self._run, self._batches[i], self._routes[i]
        run.lifetimes, run.expected, run.taken, run.totals = route.lifetimes, route.names, {}, ()
        keep_at, stop_at = route.cuts[step], route.stop(aim.layer.weight)
        stop_at = max(stop_at + 1, keep_at) if ahead else stop_at
        if aim.layer.weight not in route.layers:
            return
        kept, self._kept[i] = self._kept[i], None
        now = 0 if keep_at == self._at[i] else keep_at
        found = run.take(route.aimed(aim), batch, kept, now, stop_at)
        if kept is not None and not all(bool(part.isfinite().all()) for part in run.taken.values()):
            raise DivergedError  # perhaps of a blank that something read where nobody looks
        self._kept[i], self._at[i] = found, keep_at

    def _same(self, i: int) -> bool:
        return True

    def _restarted(self, i: int) -> bool:
        self._kept[i], before, self._at[i] = None, self._at[i], 0
        return before > 0

    def _as_others(self, i: int) -> bool:
        known = self._by_size.get(sample_count(self._batches[i].inputs))
        self._restarted(i)
        if known is None or known is self._routes[i]:
            return False
        self._routes[i] = known
        return True

    def _surveyed(self, i: int) -> bool:
        self._restarted(i)
        batch = self._batches[i]
        self._routes[i] = self._by_size[sample_count(batch.inputs)] = self._routed(self._run.survey(batch))
        return True


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors, each freed as soon as it is copied."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    start = 0
    for i, part in enumerate(parts):
        whole[start : start + len(part)] = part
        start += len(part)
        parts[i] = whole[:0]
    return whole

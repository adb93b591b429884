"""Samples of a layer's inputs and outputs, gathered over batches in passes that stop at the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.distributed.shared_work import agreed, shared_values
from prunekit.repair.held_out_images import Batch
from prunekit.statistics.layer_graph import LayerGraph, calls_by_weight, find_layer_graph
from prunekit.statistics.linear_layers import FunctionCall, LayerCall
from prunekit.statistics.patches import PatchGeometry, sample_rows, with_strides_of
from prunekit.statistics.resumable_forward import DivergedError, Lifetimes, PassState, ResumableRun
from prunekit.utils.tensors import is_finite, map_tensors

Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """A request for a sample of a layer."""

    layer: LayerCall  # that is sampled
    rows: int  # number of positions of its output to fit on, over all of its calls
    channels: Tensor | None = None  # of its input whose patches are sampled; None: no patches
    centers: bool = False  # whether the whole input is sampled at the centers of the patches
    outputs: bool = False  # whether the layer's output is sampled
    # what to sample of the layer before, and of this layer's outputs in the same windows; None: no windows
    source: SourceRequest | None = None
    calls: tuple[LayerCall, ...] = ()  # of the layer's weight in the pass; empty: the layer's own
    # the first layer that reads the same tensor, at whose call this one's inputs are sampled; None: itself
    first: LayerCall | None = None


@dataclass(frozen=True, eq=False)
class SampledCalls:
    """Samples of a layer from one pass over one batch."""

    # by their names in `LayerSample`, the calls' rows one after the other; empty if the pass does not call the layer
    tensors: dict[str, Tensor] = field(default_factory=dict)
    totals: tuple[int, ...] = ()  # rows of each call
    window: Sizes = ()  # positions of the layer's output in a window, along each axis; none if no windows were sampled


class SourceRequest(NamedTuple):
    """A request for some input channels of the layer before, in `SampleWindows` of the requested layer's output."""

    layer: LayerCall
    each: float
    channels: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerSample:
    """A layer at N sampled rows: those to fit on first, then those of held-out images."""

    fitted: int  # number of rows to fit on
    inputs: Tensor | None = None  # (N, channels * taps) patches that the layer reads
    outputs: Tensor | None = None  # (N, output channels) of the layer itself
    # (N, output channels) of the other summand, where the layer's output is added to something
    others: Tensor | None = None
    centers: Tensor | None = None  # (N, input channels) at the middle of each patch
    # (n, d, ...) inputs of the layer before it in n windows, see `SampleWindows.inputs`; None: not sampled
    before: Tensor | None = None
    there: Tensor | None = None  # (n, 1, ...) False where the layer reads padding in the windows
    window_outputs: Tensor | None = None  # (n * positions, output channels) as `outputs`, in the windows
    window_others: Tensor | None = None  # as `others`, in the windows
    windows_fitted: int = 0  # number of windows to fit on
    totals: tuple[tuple[int, ...], ...] = ()  # rows of each call, of which samples are drawn, batch by batch


class SampleGatherer:
    """Samples of one layer after the other over all batches, and the place that each batch has come to.

    To sample a layer, every batch runs from its last saved state to that layer, and saves a state at the step's cut,
    from which the next step continues; no call in front of a cut is computed again:

        calls      1  2  3  4  5  6  7  8  9
        step 0     =  =  =  =  a                  samples layer a (call 5), saves the state before call 4
        step 1              =  =  =  =  b         from there to layer b (call 8), saves the state before call 7
        step 2                       =  =  c

    A route is the list of calls that a pass makes. Batches may take several: batches of another size do if the model
    loops over images, and so do images of another size. A pass that leaves its route, or reads a tensor that was not
    saved, raises `DivergedError`. Then the batch is run in the next of three ways:

        continue    from its saved state, by its route           nearly always
        restart     from the first call, by its route            the state lacks a tensor
        survey      from the first call, by a route of its own, which watching its calls finds

    1. `_states[i]` is the state of batch i before call `_saved_at[i]` of `_routes[i]`; None at call 0.
    2. Cuts never go back from one step to the next.
    3. While a batch runs it has no state: a pass that fails may have written to it.
    4. A request has samples of all batches or of none.
    """

    def __init__(
        self,
        run: LayerPass,
        batches: Sequence[Batch],  # those to fit on first
        fitted: int,  # number of batches to fit on
        # the cuts of `PassRoute`, from the calls of each weight and the lifetimes of tensors
        cuts: Callable[[Mapping[str, tuple[LayerCall, ...]], Lifetimes], Sequence[int]],
        # the expected calls, for which the run has learned lifetimes; None: those of the first batch
        found: LayerGraph | None = None,
    ) -> None:
        self._run, self._batches, self._fitted = run, batches, fitted
        self._states: list[PassState | None] = [None] * len(batches)
        self._saved_at = [0] * len(batches)
        self._cuts = cuts
        self.route = self._route(run.survey(batches[0]) if found is None else found)  # the expected one
        self._routes = [self.route] * len(batches)

    def _route(self, found: LayerGraph) -> PassRoute:
        layers = calls_by_weight(found.layers)
        return PassRoute(found.calls, layers, self._run.lifetimes, self._cuts(layers, self._run.lifetimes))

    def take(self, requests: Sequence[SampleRequest], step: int, *, ahead: bool = False) -> list[LayerSample | None]:
        """Return samples over all batches from one pass over each; None unless each batch has the same tensors."""
        taken: list[tuple[SampledCalls, ...]] = []
        for i in range(len(self._batches)):
            if not self._run_batch(i, requests, step, ahead=ahead):
                break
            taken.append(self._run.taken)
        self._run.taken = ()
        if not agreed(len(taken) == len(self._batches)):
            return [None] * len(requests)
        found = [self._joined(request, [batch[place] for batch in taken]) for place, request in enumerate(requests)]
        names = [[] if one is None else [name for name, part in vars(one).items() if part is not None] for one in found]
        everywhere = shared_values(names)
        return [one if all(each[i] == names[i] for each in everywhere) else None for i, one in enumerate(found)]

    def _joined(self, request: SampleRequest, taken: Sequence[SampledCalls]) -> LayerSample | None:
        """Return the sample of a layer over all batches."""
        parts, windows = [one.tensors for one in taken], [one.window for one in taken]
        names = next((list(part) for part in parts if part), [])
        if not names or any(part and list(part) != names for part in parts):
            return None
        if request.source is not None:
            crop_windows(parts, windows, request.source.layer.geometry, request.layer.geometry)
        fitting = [part for part in parts[: self._fitted] if part]
        counts = {name: sum(len(part[name]) for part in fitting) for name in names}
        rows = next(counts[name] for name in ("inputs", "outputs", "centers") if name in counts)
        tensors = {name: _concatenated([part.pop(name) for part in parts if part]) for name in names}
        return LayerSample(
            rows, **tensors, windows_fitted=counts.get("before", 0), totals=tuple(one.totals for one in taken)
        )

    def _run_batch(self, i: int, requests: Sequence[SampleRequest], step: int, *, ahead: bool) -> bool:
        """Run a batch in the first of three ways in which its pass makes the calls of its route; False if none is."""
        for prepare in (None, self._restart, self._find_route):
            if prepare is not None and not prepare(i):  # this way is the same as one that was tried
                continue
            try:
                self._pass(i, requests, step, ahead=ahead)
            except DivergedError:
                continue
            return True
        self._restart(i)
        return False

    def _pass(self, i: int, requests: Sequence[SampleRequest], step: int, *, ahead: bool) -> None:
        """Run a batch from its state to the requested layers, sample them, and save the state at the cut."""
        run, batch, route = self._run, self._batches[i], self._routes[i]
        run.lifetimes, run.expected = route.lifetimes, route.names
        run.taken = tuple(SampledCalls() for _ in requests)
        made = [request.layer.weight in route.layers for request in requests]
        if not any(made):
            return
        wanted = [route.routed(request) for request, is_made in zip(requests, made, strict=True) if is_made]
        keep_at, stop_at = route.cuts[step], max(route.stop((one.first or one.layer).weight) for one in wanted)
        stop_at = max(stop_at + 1, keep_at) if ahead else stop_at
        kept, self._states[i] = self._states[i], None
        now = 0 if keep_at == self._saved_at[i] else keep_at
        found = run.take(wanted, batch, kept, now, stop_at)
        there = iter(run.taken)
        run.taken = tuple(next(there) if is_made else SampledCalls() for is_made in made)
        tensors = (part for one in run.taken for part in one.tensors.values())
        if kept is not None and not all(map(is_finite, tensors)):
            raise DivergedError  # perhaps of a blank that was read where reads are not tracked
        self._states[i], self._saved_at[i] = found, keep_at

    def _restart(self, i: int) -> bool:
        """Send a batch back to the first call; return whether it was elsewhere."""
        self._states[i], before, self._saved_at[i] = None, self._saved_at[i], 0
        return before > 0

    def _find_route(self, i: int) -> bool:
        """Give a batch a route of its own."""
        self._restart(i)
        self._routes[i] = self._route(self._run.survey(self._batches[i]))
        return True


@dataclass(frozen=True, eq=False)
class PassRoute:
    """The calls that a model makes in a pass over one batch."""

    names: tuple[str, ...]  # of all calls
    layers: Mapping[str, tuple[LayerCall, ...]]  # the calls of each weight
    lifetimes: Lifetimes  # of the tensors in the pass
    cuts: Sequence[int]  # for each step of a walk the number of the call from which its passes continue

    def stop(self, weight: str) -> int:
        """Return the number of the call before which a layer's targets are all computed."""
        return max((call.ready for call in self.layers.get(weight, ())), default=0)

    def routed(self, request: SampleRequest) -> SampleRequest:
        """Return a request with the layer's calls in this pass."""
        source = request.source
        if source is not None:
            before = self.layers.get(source.layer.weight)
            source = None if before is None else source._replace(layer=before[0])
        calls = self.layers.get(request.layer.weight, ())
        first = () if request.first is None else self.layers.get(request.first.weight, ())
        alike = len(first) == len(calls) == 1 and first[0].read is not None and first[0].read == calls[0].read
        return replace(request, calls=calls, source=source, first=first[0] if alike else None)


class LayerPass(ResumableRun):
    """Passes of a model, each of which samples some layers; `taken` is what the last one took of each layer."""

    def __init__(self, model: nn.Module, norms: Iterable[str] = ()) -> None:
        super().__init__(model, norms)
        self.taken: tuple[SampledCalls, ...] = ()
        self._norm_paths = tuple(norms)
        self._samples: list[_CallSample] = []

    def survey(self, batch: Batch) -> LayerGraph:
        """Return the calls of a pass over a batch, and learn the lifetimes of its tensors."""
        found = find_layer_graph(self._model, map_tensors(batch.inputs, torch.clone), self._norm_paths)
        self.learn(batch.inputs, found.end)
        return found

    def take(
        self, requests: Sequence[SampleRequest], batch: Batch, kept: PassState | None, keep_at: int, stop_at: int
    ) -> PassState | None:
        """Sample layers in one pass over a batch, see `ResumableRun.run`."""
        by_layer = [_call_samples(request, batch) for request in requests]
        self._samples = [sample for samples in by_layer for sample in samples]
        self.taken = ()
        try:
            found = self.run(batch.inputs, kept, keep_at, stop_at)
            self.taken = tuple(map(_sampled_calls, by_layer))
            return found
        finally:
            self._samples = []

    def before(self, call: FunctionCall) -> None:
        """Sample the layer's input, and the other summand before it may be written to."""
        for sample in self._samples:
            request, layer = sample.request, sample.layer
            if request.source is not None and call.number == request.source.layer.call:
                operands = self.operands(call)
                if operands is not None and operands.weight == request.source.layer.weight:
                    self._sample_source(sample, request.source, operands.inputs)
            first = request.first or layer
            if call.number == first.call:
                operands = self.operands(call)
                if operands is not None and operands.weight == first.weight:
                    self._sample_inputs(sample, self.real(operands.inputs))
            if call.number == layer.ready and sample.other is not None and sample.rows is not None:
                other = self.real(sample.other)
                if sample.places is not None:  # in the layout of the layer's output; 0 where none of the output is left
                    landed = other.new_zeros(sample.shape.numel())
                    landed[sample.places.flatten()] = other.flatten()
                    other = landed.view(sample.shape)
                self._sample_output("others", other, sample)

    def _sample_inputs(self, sample: _CallSample, inputs: Tensor) -> None:
        request, reading = sample.request, sample.layer.geometry
        spatial = reading.spatial(inputs)
        sample.total = reading.rows_of(inputs)
        count = max(1, round(request.rows * sample.batch.share * sample.share))
        among = reading.counted(reading.positions_of(inputs), sample.batch.counted)
        sample.rows = rows = sample_rows(sample.total, count, sample.seed, among).to(inputs.device)
        if request.channels is not None:
            sample.taken["inputs"] = reading.patches(reading.channels(inputs, request.channels), rows, spatial)
        if request.centers:
            sample.taken["centers"] = reading.centers(inputs, rows, spatial)

    def _sample_source(self, sample: _CallSample, source: SourceRequest, inputs: Tensor) -> None:
        """Sample the layer before in windows of the layer's output, whose shape is known before the layer is called."""
        first = source.layer.geometry
        among = None if first.kernel else first.counted(first.positions_of(inputs), sample.batch.counted)
        windows = SampleWindows.drawn(first, sample.layer.geometry, inputs, source.each, sample.seed, among)
        sample.windows, sample.window = windows.rows(), windows.size
        if source.channels is not None:
            values = first.channels(self.real(inputs), source.channels)
            sample.taken |= {"before": windows.inputs(values), "there": windows.there()}

    def _sample_output(self, name: str, values: Tensor, sample: _CallSample) -> None:
        """Sample rows of a tensor in the layout of the layer's output."""
        assert sample.rows is not None
        sample.taken[name] = sample.layer.geometry.outputs(values, sample.rows)
        if sample.windows is not None:
            sample.taken[f"window_{name}"] = sample.layer.geometry.outputs(values, sample.windows)

    def after(self, call: FunctionCall, result: Any) -> None:
        """Sample the layer's output, and hold the other summand."""
        for sample in self._samples if isinstance(result, Tensor) else ():
            request, layer = sample.request, sample.layer
            if call.number == layer.other:
                sample.other = result
            if call.number == layer.call and sample.rows is not None:
                if request.outputs:
                    self._sample_output("outputs", result, sample)
                if layer.moves:
                    sample.shape = result.shape
                    sample.places = torch.arange(result.numel(), device=result.device).view(result.shape)
            if call.number in layer.moves and sample.places is not None:
                sample.places = call.function(
                    with_strides_of(sample.places, call.args[0]), *call.args[1:], **call.named
                )


@dataclass(eq=False)
class _CallSample:
    """The sample of one call of a layer, as far as a pass has come."""

    request: SampleRequest  # for samples of the layer
    batch: Batch  # that the pass runs on
    layer: LayerCall  # the call
    number: int  # among the calls of its weight
    share: float  # of the rows of all these calls
    taken: dict[str, Tensor] = field(default_factory=dict)  # tensors by their names in `LayerSample`
    total: int = 0  # rows of the call
    other: Tensor | None = None  # the other summand
    rows: Tensor | None = None  # indices of the sampled rows of the output
    windows: Tensor | None = None  # indices of its rows in windows
    window: Sizes = ()  # positions of a window, along each axis
    places: Tensor | None = None  # for each value of the result so far, its index in the layer's output
    shape: torch.Size = field(default_factory=torch.Size)  # of the layer's output

    @property
    def seed(self) -> int:
        """Seed by the numbers of the call and of its batch, so that both models sample the same positions."""
        return self.request.layer.call + 100_003 * self.batch.number + 1_000_003 * self.number


def _call_samples(request: SampleRequest, batch: Batch) -> list[_CallSample]:
    """Return empty samples of the calls of a layer."""
    calls = request.calls or (request.layer,)
    total = sum(call.rows for call in calls) or 1
    shares = [call.rows / total if len(calls) > 1 else 1.0 for call in calls]
    pairs = enumerate(zip(calls, shares, strict=True))
    return [_CallSample(request, batch, call, i, share) for i, (call, share) in pairs]


def _sampled_calls(samples: Sequence[_CallSample]) -> SampledCalls:
    """Return what was sampled of all calls of a layer."""
    names = list(samples[0].taken)
    if not names or any(set(sample.taken) != set(names) for sample in samples):
        raise DivergedError
    tensors = {name: _concatenated([sample.taken.pop(name) for sample in samples]) for name in names}
    window = next((sample.window for sample in samples if sample.window), ())
    return SampledCalls(tensors, tuple(sample.total for sample in samples), window)


def crop_windows(
    parts: list[dict[str, Tensor]], windows: list[Sizes], first: PatchGeometry, second: PatchGeometry
) -> None:
    """Crop samples in windows to the smallest one along each axis: images of several sizes have several windows."""
    found = [(part, window) for part, window in zip(parts, windows, strict=True) if part]
    if len({window for _, window in found}) < 2:
        return
    least = tuple(map(min, zip(*(window for _, window in found), strict=True)))
    hidden = _read(least, second)
    for part, window in found:
        for name, sizes in (("before", _read(hidden, first)), ("there", hidden)):
            where: Any = (..., *map(slice, sizes))
            if name in part:
                part[name] = part[name][where]
        for name in part.keys() & {"window_outputs", "window_others"}:
            width = part[name].shape[1]
            part[name] = part[name].view(-1, *window, width)[(slice(None), *map(slice, least))].reshape(-1, width)


def _concatenated(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors, and free each as soon as it is copied."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    start = 0
    for i, part in enumerate(parts):
        whole[start : start + len(part)] = part
        start += len(part)
        parts[i] = whole[:0]
    return whole


@dataclass(frozen=True, eq=False)
class SampleWindows:
    """Windows of the output of two layers in a row: one in each of N samples, all of one size.

    All positions of a window share what the first layer computes in it: computing that for scattered positions one by
    one takes longer by a factor of the second layer's taps. A linear layer's samples are its rows, with one position.
    """

    first: PatchGeometry  # how the first layer reads its input
    second: PatchGeometry  # how the second layer reads the first's output
    made: Sizes  # spatial sizes of the first's output
    outputs: Sizes  # spatial sizes of the second's output
    size: Sizes  # positions of the second's output in a window, along each axis
    samples: Tensor  # (N,) indices of the samples
    starts: Tensor  # (N, axes) where each window begins

    @classmethod
    def drawn(
        cls,
        first: PatchGeometry,
        second: PatchGeometry,
        inputs: Tensor,
        each: float,
        seed: int,
        among: Tensor | None = None,
    ) -> SampleWindows:
        """Draw samples, all or some of `among`, and windows in them; the number of images does not change the size."""
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
        """Return the indices of their rows in the second's output, (N * positions,), window by window."""
        found = self.samples.view(-1, *[1] * len(self.size))
        for i, (size, total) in enumerate(zip(self.size, self.outputs, strict=True)):
            found = found * total + self._along(i, self.starts[:, i], size)
        return found.flatten()

    def inputs(self, inputs: Tensor) -> Tensor:
        """Return the first layer's inputs in the windows, (N, channels, ...), with the padding of both layers."""
        if not self.size:
            return inputs.reshape(-1, inputs.shape[-1])[self.samples][:, :, None]
        pads = [p + s * q for p, s, q in zip(self.first.padding, self.first.stride, self.second.padding, strict=True)]
        padded = F.pad(inputs, [pad for pad in reversed(pads) for _ in range(2)]) if any(pads) else inputs
        first, second = self.first, self.second
        where: list[Any] = [self.samples.view(-1, *[1] * len(self.size)), slice(None)]
        for i, span in enumerate(_read(self._hidden(), first)):
            where.append(self._along(i, self.starts[:, i] * second.stride[i] * first.stride[i], span))
        return padded[tuple(where)].movedim(-1, 1)

    def there(self) -> Tensor:
        """Return bool (N, 1, ...), False where the second layer reads padding."""
        shape = len(self.samples), *[1] * max(1, len(self.size))
        found = torch.ones(shape, dtype=torch.bool, device=self.samples.device)
        for i, (size, total) in enumerate(zip(self._hidden(), self.made, strict=True)):
            at = self._along(i, self.starts[:, i] * self.second.stride[i] - self.second.padding[i], size)
            found = found & (at >= 0) & (at < total)
        return found[:, None]

    def _hidden(self) -> Sizes:
        """Return the spatial sizes of the second layer's input in a window."""
        return _read(self.size, self.second)

    def _along(self, axis: int, starts: Tensor, size: int) -> Tensor:
        """Return positions along an axis, (N, 1.., size, ..1)."""
        shape = [1] * len(self.size)
        shape[axis] = size
        positions = torch.arange(size, device=starts.device)
        return starts.view(-1, *[1] * len(self.size)) + positions.view(shape)


def _read(sizes: Sizes, reading: PatchGeometry) -> Sizes:
    """Return the spatial sizes of what a layer without padding reads for an output."""
    axes = zip(sizes, reading.kernel, reading.stride, reading.dilation, strict=True)
    return tuple((size - 1) * step + wide * (kernel - 1) + 1 for size, kernel, step, wide in axes)


def convolving(reading: PatchGeometry) -> PatchGeometry:
    """Return a reading as one of a convolution that pads nothing; that of a linear layer has one tap along one axis."""
    if not reading.kernel:
        return PatchGeometry((1,), (1,), (0,), (1,))
    return PatchGeometry(reading.kernel, reading.stride, (0,) * len(reading.kernel), reading.dilation)

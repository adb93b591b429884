"""The error of a model's output: which outputs are compared, and how much an error in a layer changes them."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunekit.channels.cut.model_copy import named_tensors, with_tensors
from prunekit.channels.tracing.storages import plain_in
from prunekit.statistics.layers.layer_graph import LayerFinder
from prunekit.statistics.layers.linear_layers import CallInterceptor, FunctionCall, LayerCall, Stopped
from prunekit.statistics.layers.patch_moments import LayerMoments, PatchStats
from prunekit.statistics.layers.patches import solve_positive
from prunekit.utils.context import release_memory, same_attributes, training_mode
from prunekit.utils.inputs import call, counted_positions, inputs_as_example, rows_of, sample_count, select_samples
from prunekit.utils.outputs import ALL_READ, ReadOutputs
from prunekit.utils.progress import tracked
from prunekit.utils.tensors import AT_ONCE, gather, in_parts

FEW = 2
"""Samples, and one more, by which outputs whose first axis holds samples are recognized."""


@dataclass(frozen=True)
class OutputComparison:
    """The tensors of a model that are compared with those of the dense one.

    All outputs whose first axis holds samples are compared. Instead of other outputs, the layers are compared that they
    are made of without another in between; and so are layers from whose outputs computed values select something, as a
    detector selects the boxes that score best: entries of the selection have no counterpart in the other model.

    Attributes:
        outputs: indices among the tensors of the model's output that are read.
        weights: of layers whose outputs are compared, over all of their calls.
        read: the outputs of the model that are read.
        channels: which output channels of these layers are compared, ascending; all of those that it does not name.
        selected: whether computed values select entries of these outputs, such as the queries that score best.
    """

    outputs: tuple[int, ...]
    weights: tuple[str, ...]
    read: ReadOutputs = ALL_READ
    channels: Mapping[str, Tensor] = field(default_factory=dict)
    selected: bool = False
    _calls: dict[tuple[torch.Size, ...], int] = field(default_factory=dict, repr=False, compare=False)
    """Calls of these layers that the dense model makes, by the shapes of the inputs."""

    @classmethod
    def of(cls, model: nn.Module, inputs: tuple[Any, ...], read: ReadOutputs = ALL_READ) -> OutputComparison:
        """Return the comparison of a model.

        Args:
            model: the dense one, in eval mode.
            inputs: at least three samples, if there are so many.
            read: its outputs that are read.
        """
        finder = LayerFinder(model, ())
        few, more = (_returned(model, select_samples(inputs, slice(count)), finder, read) for count in (FEW, FEW + 1))
        counts = [sample_count(select_samples(inputs, slice(count))) for count in (FEW, FEW + 1)]
        outputs, made, selected = list[int](), set(finder.boundary), False
        pairs = zip(few, more, strict=True) if len(few) == len(more) else ((tensor, tensor) for tensor in more)
        for place, (one, other) in enumerate(pairs):
            origin, lengths = finder.origin(other), [len(tensor) if tensor.dim() else 0 for tensor in (one, other)]
            by_sample = other.is_floating_point() and lengths == counts and other is not one
            if by_sample and (not origin.selected or one.shape[1:] == other.shape[1:]):
                if not any(other is more[earlier] for earlier in outputs):
                    outputs.append(place)
                    selected = selected or origin.selected
            elif not origin.selected:
                made |= origin.origins
        alone = {chain.layer.weight for chain in finder.chains if chain.layer.selected}
        weights = dict.fromkeys(finder.chains[i].layer.weight for i in sorted(made))
        compared = tuple(weight for weight in weights if weight not in alone)
        return cls(tuple(outputs), compared, read, selected=selected)

    def within(self, kept: Mapping[str, Tensor]) -> OutputComparison:
        """Return the comparison of models that keep some output channels of layers: removed ones are zero or gone.

        Layers that keep none are not compared.
        """
        weights = tuple(weight for weight in self.weights if weight not in kept or len(kept[weight]))
        return replace(self, weights=weights, channels={weight: kept[weight] for weight in weights if weight in kept})

    def values(
        self, model: nn.Module, inputs: tuple[Any, ...], counted: Tensor | None = None
    ) -> list[tuple[int | str, Tensor]]:
        """Return the compared tensors, samples or positions first, each with its index or weight.

        If only layers are compared, what the model does behind them, such as selecting boxes, is run only the first
        time that there are inputs of these shapes.

        Args:
            model: the dense one, or one pruned from it.
            inputs: that it is run on.
            counted: which positions of the samples are not padding, see `counted_positions`; None: all.
        """
        most = 0 if self.outputs else self._calls.get(_shapes(inputs), 0)
        return self._run(model, inputs, counted, most)[1]

    def run(
        self, model: nn.Module, inputs: tuple[Any, ...], counted: Tensor | None = None
    ) -> tuple[Any, list[tuple[int | str, Tensor]]]:
        """Return what the model returned, and its compared tensors, see `values`."""
        return self._run(model, inputs, counted, 0)

    def _run(
        self, model: nn.Module, inputs: tuple[Any, ...], counted: Tensor | None, most: int
    ) -> tuple[Any, list[tuple[int | str, Tensor]]]:
        """Return the output, or None behind a number of calls of the layers, and the compared tensors."""
        layers, output = _LayerOutputs(model, self, counted, most), None
        with same_attributes(model), layers.intercepting():
            try:
                output = call(model, inputs)
            except (Stopped, Exception):  # a callback from C++ may turn it into another exception
                if not layers.stopped:
                    raise
        self._calls.setdefault(_shapes(inputs), len(layers.found))
        tensors = [] if layers.stopped else plain_in(self.read.of(output))
        found: list[tuple[int | str, Tensor]] = [(place, rows_of(tensors[place], counted)) for place in self.outputs]
        return output, found + layers.found


def _shapes(inputs: tuple[Any, ...]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in gather(inputs))


def _returned(model: nn.Module, inputs: tuple[Any, ...], finder: LayerFinder, read: ReadOutputs) -> list[Tensor]:
    with finder.intercepting():
        return plain_in(read.of(call(model, inputs)))


class _LayerOutputs(CallInterceptor):
    """Collects the outputs of some layers, and stops behind a number of their calls; 0: never."""

    def __init__(self, model: nn.Module, judge: OutputComparison, counted: Tensor | None, most: int) -> None:
        super().__init__(model)
        self._counted, self._most = counted, most
        self.stopped = False
        self.found: list[tuple[int | str, Tensor]] = []
        self._weights, self._channels = frozenset(judge.weights), judge.channels

    def call(self, call: FunctionCall) -> Any:
        operands = self.operands(call)
        result = call.run()
        if operands is not None and operands.weight in self._weights:
            axis = 1 if call.name.startswith("conv") else -1
            values = rows_of(result.movedim(axis, -1), self._counted)
            if (kept := self._channels.get(operands.weight)) is not None:
                values = values[..., kept.to(values.device)]
            self.found.append((operands.weight, values.flatten(0, -2)))
            if len(self.found) == self._most:
                self.stopped = True
                raise Stopped
        return result


class RelativeError:
    """The squared difference of a model from the dense one over the dense one's variance, summed over batches."""

    def __init__(self) -> None:
        self._squares: dict[int | str, float] = {}
        self._counts: dict[int | str, int] = {}
        self._sums: dict[int | str, Tensor] = {}
        self._totals: dict[int | str, Tensor] = {}

    def add(self, key: int | str, want: Tensor, got: Tensor) -> None:
        """Add some samples, (n, ...) each; some at a time in float64, as they may be as wide as a vocabulary."""
        self._counts[key] = self._counts.get(key, 0) + len(want)
        for wide, other in zip(in_parts(want), in_parts(got), strict=True):
            wide = wide.double()
            self._squares[key] = self._squares.get(key, 0.0) + float((other.double() - wide).square().sum())
            self._sums[key] = wide.sum(0) + self._sums.get(key, 0)
            self._totals[key] = wide.square().sum(0) + self._totals.get(key, 0)

    def shares(self, flat: float) -> Iterator[float]:
        """Yield the relative error of each tensor that varies by more than a share `flat` of its mean square."""
        for key, around in self.variations(flat).items():
            yield self._squares[key] / around

    def variations(self, flat: float) -> dict[int | str, float]:
        """Return the squared deviation from the mean of each tensor that varies by more, summed over the samples."""
        found = {}
        for key, total in self._totals.items():
            count = self._counts[key]
            around = total if count == 1 else total - self._sums[key].square() / count
            if not float(around.sum()) <= flat * float(total.sum()):  # NaN passes: its origin is found later
                found[key] = float(around.sum())
        return found


RIDGE = 1e-3
"""Added to the diagonal of a Gram matrix, as a share of its mean: dead channels have zeros there."""


PROBES = 32
"""Random directions of the output, about, that gradients are taken of."""


def with_gains(model: nn.Module, stats: PatchStats, inputs: Any, read: ReadOutputs = ALL_READ) -> PatchStats:
    """Measure how much errors in each layer change the model's output.

    In each layer every second input channel is removed and the others make up for them by least squares: the gain is
    the mean squared change of what the model returns, see `OutputComparison`, over the layer's own error by its Gram
    matrix, each output over its variance; relative to the median of all layers. Errors of some layers are averaged away
    later, above all by pooling, and others grow.

    The change is that to first order: the gradient of random sums of the output, one sample at a time, times the change
    of the weight. Its mean square over random signs is the squared norm (Hutchinson 1990), for all layers at once.
    Where no gradient reaches the weights, as behind boxes that a detector selects, the model runs with one layer
    changed after the other.

    Args:
        model: the dense model; only read.
        stats: of that model.
        inputs: (B, ...), as `inputs_as_example` takes them.
        read: the outputs of the model that are read.

    Returns:
        The statistics with `output_gain` filled in: 1 for a layer where it cannot be measured.
    """
    copy = with_tensors(model, {name: tensor.detach() for name, tensor in named_tensors(model)})
    with training_mode(copy, False), torch.no_grad():
        given = inputs_as_example(model, inputs)
        judge = OutputComparison.of(copy, given, read)
        gains = _gains_by_gradients(copy, stats, judge, given)
    if gains is None:
        copy = with_tensors(model, {name: tensor.detach().clone() for name, tensor in named_tensors(model)})
        tensors, modules = dict(named_tensors(copy)), dict(copy.named_modules())
        with training_mode(copy, False), torch.no_grad():
            run = partial(judge.values, copy, given, counted_positions(copy, given))
            dense = run()
            gains = [
                _gain(_Change.of(moments, tensors, modules), tensors, modules, run, dense)
                for moments in tracked(stats.layers, "gains", unit="layer")
            ]
    known = [gain for gain in gains if gain is not None]
    usual = median(known) if known else 1.0
    relative = [1.0 if gain is None else gain / usual for gain in gains]
    layers = tuple(replace(each, output_gain=gain) for each, gain in zip(stats.layers, relative, strict=True))
    return replace(stats, layers=layers, computed={})


@dataclass(frozen=True, eq=False)
class _Change:
    """The change of a layer's weight and bias without every second input channel, and the error that it makes.

    Attributes:
        layer: the layer.
        weight: the change of the weight, as the model has it, in its dtype.
        bias: the change of the output's constant, (o,) float64; None if there is none that could change.
        error: summed over the outputs, each over its variance.
    """

    layer: LayerCall
    weight: Tensor
    bias: Tensor | None
    error: float

    @classmethod
    def of(cls, moments: LayerMoments, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> _Change:
        """Return the change of a layer."""
        layer = moments.layer
        weight, biased = layer.matrix(tensors[layer.weight]), shifted(layer, tensors, modules) is not None
        kept = torch.arange(weight.shape[1], device=weight.device) % 2 == 0
        change, bias, errors = without_channels(moments, weight, kept, biased=biased)
        total = float((errors * relative_scale(moments, modules).square()).sum())
        return cls(layer, layer.stored(change), bias if biased else None, total)

    def by_parameter(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of the parameters that change, and their changes."""
        yield self.layer.weight, self.weight
        if self.bias is not None and self.layer.bias is not None:
            yield self.layer.bias, self.bias
        elif self.bias is not None and self.layer.norm is not None:
            norm: Any = modules[self.layer.norm]
            if norm.weight is not None:
                scale = norm.weight.detach().double() * (norm.running_var.double() + norm.eps).rsqrt()
                yield f"{self.layer.norm}.bias", scale * self.bias


class _Slopes:
    """The slopes of a sum along the changes of layers, of which each gradient is dropped as soon as it is used.

    Args:
        model: whose parameters require no gradients, and do while this is entered, where they change.
        changes: of its layers.
    """

    def __init__(self, model: nn.Module, changes: Sequence[_Change]) -> None:
        modules, self._model, self._parts = dict(model.named_modules()), model, dict[int, list[tuple[int, Tensor]]]()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for index, change in enumerate(changes):
            for name, part in change.by_parameter(modules):
                if name in parameters:
                    self._parts.setdefault(id(parameters[name]), []).append((index, part))
        self._slopes, self._hooks = [0.0] * len(changes), list[RemovableHandle]()

    def __enter__(self) -> Self:
        for parameter in self._model.parameters():
            parameter.requires_grad_(id(parameter) in self._parts)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._use))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)

    def _use(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        for index, part in self._parts[id(parameter)]:
            rows = torch.linalg.vecdot(parameter.grad.reshape(len(part), -1), part.reshape(len(part), -1))
            self._slopes[index] += float(rows.sum(dtype=torch.float64))
        parameter.grad = None

    def of(self, total: Tensor, *, again: bool) -> list[float]:
        """Return the slope along each change; `again`: whether others of the same forward pass follow."""
        self._slopes = [0.0] * len(self._slopes)
        total.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        return self._slopes


def _gains_by_gradients(
    model: nn.Module,
    stats: PatchStats,
    judge: OutputComparison,
    inputs: tuple[Any, ...],
) -> list[float | None] | None:
    """Return the gain of each layer, None where it is none; None altogether if gradients don't reach all of them.

    Samples run one at a time, so that outputs as wide as a vocabulary take little memory.

    Args:
        model: whose parameters require no gradients afterwards.
        stats: with its layers.
        judge: that compares outputs.
        inputs: samples.
    """
    if judge.weights or not stats.layers:
        return None
    samples = sample_count(inputs)
    each = [select_samples(inputs, slice(index, index + 1)) for index in range(samples)]
    tensors, modules = dict(named_tensors(model)), dict(model.named_modules())
    changes = list[_Change]()
    for moments in stats.layers:
        changes.append(_Change.of(moments, tensors, modules))
        stats.memory.release()
    release_memory(model, collect=False)
    probes, squares, spread = -(-PROBES // samples), [0.0] * len(changes), RelativeError()
    try:
        for one in each:
            for key, values in judge.values(model, one, counted_positions(model, one)):
                spread.add(key, values, values)
        around = spread.variations(0.0)
        with _Slopes(model, changes) as slopes:
            for one in tracked(each, "gains", unit="sample"):
                with torch.enable_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of models that look at values, which have gradients
                    output = plain_in(judge.read.of(call(model, one)))
                    counted = counted_positions(model, one)
                    generator = torch.Generator().manual_seed(_number_of(one, counted))
                    found = [(rows_of(output[place], counted), around[place]) for place in judge.outputs
                             if place in around]  # fmt: skip
                    sums = [_random_sum(found, generator) for _ in range(probes)]
                for number, total in enumerate(sums, 1):
                    squares = [
                        square + slope**2 / probes
                        for square, slope in zip(squares, slopes.of(total, again=number < probes), strict=True)
                    ]
                del output, found, sums, total
                release_memory(model, collect=False)
    except (RuntimeError, NotImplementedError, IndexError, AttributeError):
        return None  # an operator without a gradient, or an output that changes with the number of samples
    if not all(square > 0 for square, one in zip(squares, changes, strict=True) if one.error > 0):
        return None  # some layer is cut off
    found_gains = [square / one.error if one.error > 0 else None for square, one in zip(squares, changes, strict=True)]
    return [gain if gain is not None and math.isfinite(gain) else None for gain in found_gains]


def _number_of(sample: tuple[Any, ...], counted: Tensor | None) -> int:
    """Return a number of what a sample holds, whatever its place among others and its padding."""
    there = (
        tensor
        if counted is None or tensor.shape[: counted.dim()] != counted.shape
        else tensor[counted.to(tensor.device)]
        for tensor in gather(sample)
    )
    parts = (tensor.detach().cpu().contiguous() for tensor in there)
    return zlib.crc32(b"".join(part.flatten().view(torch.uint8).numpy().tobytes() for part in parts))


def _random_sum(found: list[tuple[Tensor, float]], generator: torch.Generator) -> Tensor:
    """Return a sum of tensors with random signs, each tensor over the deviation of all samples."""
    total = torch.zeros((), dtype=torch.float64)
    for values, around in found:
        signs = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        whole = (signs.to(values.device) * values).sum(dtype=torch.float64)
        total = total.to(values.device) + whole / math.sqrt(around * len(found))
    return total


def _gain(
    change: _Change,
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    run: Callable[[], list[tuple[int | str, Tensor]]],
    dense: list[tuple[int | str, Tensor]],
) -> float | None:
    """Return the gain of a layer by running the model with that layer changed."""
    weight, shift = tensors[change.layer.weight], shifted(change.layer, tensors, modules)
    saved = (weight.clone(), None if shift is None else shift[0].clone())
    weight.add_(change.weight)
    if shift is not None and change.bias is not None:
        shift[0].add_(shift[1] * change.bias)
    got = run()
    weight.copy_(saved[0])
    if shift is not None and saved[1] is not None:
        shift[0].copy_(saved[1])
    if not change.error > 0 or [value.shape for _, value in got] != [value.shape for _, value in dense]:
        return None
    spread = RelativeError()
    for (key, want), (_, value) in zip(dense, got, strict=True):
        spread.add(key, want, value)
    shares = list(spread.shares(0.0))
    gain = sum(shares) / len(shares) / change.error if shares else 0.0
    return gain if 0 < gain < float("inf") else None


def shifted(
    layer: LayerCall, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[Tensor, float] | None:
    """Return the tensor that adds a constant to a layer's output, and its sign; None if there is none."""
    if layer.bias is not None:
        return tensors[layer.bias], 1.0
    if layer.norm is not None:
        return modules[layer.norm].running_mean, -1.0  # type: ignore[return-value]
    return None


def without_channels(
    moments: LayerMoments, weight: Tensor, kept: Tensor, *, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the change of a layer that takes input channels away and fits the others to its outputs, by least squares.

    Args:
        moments: of what the layer reads.
        weight: (o, C, ...), see `LayerCall.matrix`.
        kept: (C,) bool, False for channels that go; of each group.
        biased: whether there is a bias that can change.

    Returns:
        The change of the weight, in its dtype; that of the bias, and the outputs' squared errors, (o,) float64 each.
    """
    changes, biases, errors = list[Tensor](), list[Tensor](), list[Tensor]()
    for some in map(Tensor.double, [weight] if len(moments.grams) > 1 else in_parts(weight, 4 * AT_ONCE)):
        deep = some.flatten(2) if some.dim() > 2 else some[:, :, None]  # (o, C, taps)
        for matrix, rows in zip(moments.grams, deep.chunk(len(moments.grams)), strict=True):
            change, bias, error = _group_without(rows, matrix.double(), kept, each_tap=moments.taps == 1, biased=biased)
            changes.append(change.to(weight.dtype))
            biases.append(bias)
            errors.append(error)
    return torch.cat(changes).reshape(weight.shape), torch.cat(biases), torch.cat(errors)


def _group_without(
    rows: Tensor, matrix: Tensor, kept: Tensor, *, each_tap: bool, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for rows (o, C, taps) of a group; without statistics of its own, each tap is a layer."""
    outputs, channels, taps = rows.shape
    flat = rows.transpose(1, 2).flatten(0, 1) if each_tap else rows.flatten(1)
    change = without_columns(flat, matrix, kept.repeat_interleave(flat.shape[1] // channels), biased=biased)
    errors = ((change @ matrix) * change).sum(1).clamp(min=0)
    weights = change[:, :-1]
    weights = weights.view(outputs, taps, channels).transpose(1, 2) if each_tap else weights.view_as(rows)
    return weights, change[:, -1].view(outputs, -1).sum(1), errors.view(outputs, -1).sum(1)


def without_columns(flat: Tensor, matrix: Tensor, kept: Tensor, *, biased: bool) -> Tensor:
    """Return the least-squares change of a weight and its bias, (r, d + 1), that leaves only some columns."""
    left = torch.cat([kept, kept.new_full((1,), biased)])
    gone = torch.cat([~kept, kept.new_zeros(1)])
    solved = solve_positive(with_ridge(matrix)[left][:, left], matrix[left][:, gone])  # (kept, gone)
    change = torch.zeros(len(flat), len(matrix), dtype=flat.dtype, device=flat.device)
    change[:, gone] = -flat[:, ~kept]
    change[:, left] = flat[:, ~kept] @ solved.T
    return change


def with_ridge(matrix: Tensor) -> Tensor:
    """Return a Gram matrix with its ridge, which is not on the constant column, the last."""
    raised = matrix.clone()
    raised.diagonal()[:-1] += RIDGE * float(matrix.diagonal()[:-1].mean()) or 1.0
    return raised


def relative_scale(moments: LayerMoments, modules: Mapping[str, nn.Module]) -> Tensor:
    """Return the scale of a layer's output at the end of its chain over its standard deviation there, (o,).

    It is on the device of the moments; the model may be elsewhere.
    """
    scale = moments.variance.clamp(min=1e-12 * float(moments.variance.max()) or 1.0).rsqrt()
    if moments.layer.gain is not None and moments.layer.end == "sum":
        scale = scale * moments.layer.gain.to(scale.device)
    if moments.layer.norm is None:
        return scale
    norm: Any = modules[moments.layer.norm]
    factor = (norm.running_var.double() + norm.eps).rsqrt()
    factor = factor if norm.weight is None else factor * norm.weight.detach().double()
    found: Tensor = scale * factor.to(scale.device)
    return found

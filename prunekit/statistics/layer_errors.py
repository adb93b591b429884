"""The errors of single layers, and how much they change the output of the model."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.tracing.storages import plain_in
from prunekit.distributed.shared_work import dealt, owned, shared_values
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.hooks.owner import HookOwner
from prunekit.statistics.gram_matrices import LayerMoments, PatchStats
from prunekit.statistics.linear_layers import WEIGHT_FUNCTIONS, CallInterceptor, FunctionCall, LayerCall
from prunekit.statistics.output_error import OutputComparison, RelativeError
from prunekit.statistics.patches import FewRows, solve_positive
from prunekit.utils.context import device_of, release_memory, training_mode
from prunekit.utils.inputs import (
    call,
    checksum,
    counted_positions,
    inputs_as_example,
    rows_of,
    sample_count,
    select_samples,
)
from prunekit.utils.outputs import ALL_READ, ReadOutputs
from prunekit.utils.progress import tracked
from prunekit.utils.tensors import AT_ONCE, gather, in_parts

RIDGE = 1e-3
"""Added to the diagonal of a Gram matrix, as a share of its mean: dead channels have zeros there."""
NO_GRADIENT = ".*an autograd kernel was not registered"
"""The warning of torch where a gradient ends at an operator that has none, as those of quantized layers do."""
PROBES = 32
"""Random directions of the output, about, that gradients are taken of."""


def with_gains(model: nn.Module, stats: PatchStats, inputs: Any, read: ReadOutputs = ALL_READ) -> PatchStats:
    """Measure how much errors in each layer change the model's output.

    In each layer every second input channel is removed, and the others make up for it by least squares. The gain is the
    mean squared change of what the model returns, see `OutputComparison`, or for scores of tokens the divergence of
    their probabilities, over the layer's own error by its Gram matrix, each output over its variance; and this relative
    to the median of all layers. Errors of some layers are averaged away later, above all by pooling, and others grow.

    The change is computed to first order: the gradient of random sums of the output, one sample at a time, times the
    change of what a linear layer reads, or of the weight of another layer. Its mean square over random signs is the
    squared norm (Hutchinson 1990), for all layers at once. Where no gradient reaches the layers, as behind boxes that a
    detector selects, the model runs with one layer changed after the other.
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
            own = {
                place: _gain(_Change.of(stats.layers[place], tensors, modules), tensors, modules, run, dense)
                for place in tracked(owned([1.0] * len(stats.layers)), "gains", unit="layer")
            }
            every = {place: gain for part in shared_values(own) for place, gain in part.items()}
            gains = [every[place] for place in range(len(stats.layers))]
    known = [gain for gain in gains if gain is not None]
    usual = median(known) if known else 1.0
    relative = [1.0 if gain is None else gain / usual for gain in gains]
    layers = tuple(replace(each, output_gain=gain) for each, gain in zip(stats.layers, relative, strict=True))
    return replace(stats, layers=layers, computed={})


@dataclass(frozen=True, eq=False)
class _Change:
    """The change of a layer when every second input channel is removed, and the error that this makes."""

    layer: LayerCall  # the layer
    weight: Tensor  # the change of the weight, as the model has it, in its dtype
    bias: Tensor | None  # the change of the output's constant, (o,) float64; None if there is none that could change
    error: float  # summed over the outputs, each over its variance

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
        elif self.bias is not None and (norm := self.layer.norm) is not None and modules[norm].weight is not None:
            yield f"{norm}.bias", norm_affine(modules[norm])[0] * self.bias


@dataclass(frozen=True, eq=False)
class _Prediction:
    """Every second channel of what linear layers read, as the others predict it by least squares."""

    # a layer without these channels, fitted to its outputs again, returns what it returns for the prediction
    factors: Tensor  # (kept, gone) of the channels that stay, and of a constant if layers have a bias
    missing: Tensor  # (gone, gone) mean products of prediction less channel, float64; of few rows (N, gone), see `few`
    # of few rows the ridge, that of the Gram matrix, and the channels that stay, (N, kept)
    few: tuple[float, float, Tensor] | None = None

    @classmethod
    def of(cls, moments: LayerMoments, kind: torch.dtype, *, biased: bool) -> _Prediction:
        """Return the prediction by a Gram matrix, with factors in float64 for layers in that, else in float32."""
        kind = torch.promote_types(kind, torch.float32)
        if moments.read:
            return cls._of_few(*few_rows(moments.read, moments.grams[0], biased=biased), kind)
        matrix = moments.grams[0].double()
        kept = torch.arange(len(matrix) - 1, device=matrix.device) % 2 == 0
        change = predicted_columns(matrix, kept, biased=biased)
        left = torch.cat([kept, kept.new_full((1,), biased)])
        gone, factors = matrix[:-1][~kept], change[left]
        # (G + ridge) factors = G at the columns that stay, so that the products of all columns need not be summed
        pull = (with_ridge(matrix).diagonal() - matrix.diagonal())[left]
        missing = gone[:, :-1][:, ~kept] - gone[:, left] @ factors - factors.T @ (pull[:, None] * factors)
        return cls(factors.to(kind), missing)

    @classmethod
    def _of_few(cls, rows: FewRows, raised: float, ridge: float, kind: torch.dtype) -> _Prediction:
        """Return the prediction as sums of few rows; of what these sums lack at a row, the ridge times them is left."""
        kept, gone = slice(None, None, 2), slice(1, None, 2)
        sums = solve_positive(rows.products(ridge, kept), rows.read[:, gone]).to(kind)  # (N, gone)
        factors = rows.read[:, kept].to(kind).T @ sums
        constant = rows.shares[:, gone].to(kind) - rows.shares[:, kept].to(kind) @ factors
        return cls(torch.cat([factors, constant]), sums, (ridge, raised, rows.read[:, kept].to(kind)))

    def change(self, read: Tensor) -> Tensor:
        """Return prediction less channel at all positions of what layers read, (..., gone)."""
        read = read.to(self.factors.dtype)
        kept = read[..., ::2]
        predicted = kept @ self.factors[: kept.shape[-1]]
        if len(self.factors) > kept.shape[-1]:
            predicted += self.factors[-1]
        return predicted.sub_(read[..., 1::2])

    def error(self, weight: Tensor, scale: Tensor) -> float:
        """Return the error that a layer makes, summed over its outputs times the squares of `scale`, (o,)."""
        total, rows = 0.0, in_parts(weight, 4 * AT_ONCE)
        for some, factors in zip(rows, torch.split(scale, [len(part) for part in rows]), strict=True):
            gone = some[:, 1::2].to(scale.dtype) * factors[:, None]
            if self.few is not None:
                (ridge, raised, kept), gone = self.few, gone.to(self.missing)
                sums = gone @ self.missing.T
                squares = (sums.square().sum(), (sums @ kept).square().sum() + gone.square().sum())
                total += float(ridge**2 * squares[0] + raised * squares[1])
            else:
                total += float(torch.linalg.vecdot(gone @ self.missing, gone).clamp(min=0).sum())
        return total


class _Slopes(CallInterceptor):
    """The slopes of a sum along changes of layers: of what linear ones read, and of the weights of others."""

    def __init__(
        self,
        model: nn.Module,
        predictions: Mapping[tuple[str, bool], Sequence[tuple[int, _Prediction]]],
        changes: Sequence[tuple[int, _Change]],
        layers: int,
    ) -> None:
        super().__init__(model)
        modules, self._model, self._parts = dict(model.named_modules()), model, dict[int, list[tuple[int, Tensor]]]()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for index, change in changes:
            for name, part in change.by_parameter(modules):
                if name in parameters:
                    self._parts.setdefault(id(parameters[name]), []).append((index, part))
        self._predictions, self.layers, self._slopes = predictions, layers, [0.0] * layers

    def follow(self, hooks: HookOwner) -> None:
        """Let the parameters that change have gradients, and use them."""
        for parameter in self._model.parameters():
            parameter.requires_grad_(id(parameter) in self._parts)
            hooks.own_undo(partial(parameter.requires_grad_, False))
            if parameter.requires_grad:
                hooks.own_parameter_gradient(parameter, self._use)  # which drops the gradient at once

    def call(self, call: FunctionCall) -> Any:
        """Make a call, and follow the gradient of what a linear layer reads."""
        operands = self.operands(call)
        found = () if operands is None else self._predictions.get((operands.weight, operands.transposed), ())
        if operands is None or not found or not torch.is_grad_enabled():
            return call.run()
        inputs, function = operands.inputs, WEIGHT_FUNCTIONS[call.name]
        read = inputs.view_as(inputs) if inputs.requires_grad else inputs.detach().requires_grad_()
        for index, prediction in found:
            read.register_hook(partial(self._add, index, prediction.change(inputs.detach())))  # type: ignore[no-untyped-call]
        return call.with_argument(function.inputs, function.names[0], read).run()

    def _add(self, index: int, change: Tensor, gradient: Tensor) -> None:
        gone = gradient[..., 1::2].to(change.dtype)
        self._slopes[index] += float(torch.linalg.vecdot(gone, change).sum(dtype=torch.float64))

    def _use(self, parameter: Tensor) -> None:
        if parameter.grad is None:  # an operator behind it has no gradient
            return
        for index, part in self._parts[id(parameter)]:
            rows = torch.linalg.vecdot(parameter.grad.reshape(len(part), -1), part.reshape(len(part), -1))
            self._slopes[index] += float(rows.sum(dtype=torch.float64))
        parameter.grad = None

    def of(self, total: Tensor, *, again: bool) -> list[float]:
        """Return the slope along each change; `again`: whether others of the same forward pass follow."""
        self._slopes = [0.0] * len(self._slopes)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", NO_GRADIENT, UserWarning)
            total.backward(retain_graph=again)  # type: ignore[no-untyped-call]
        return self._slopes


def _slopes_and_errors(model: nn.Module, stats: PatchStats) -> tuple[_Slopes, list[float]]:
    """Return the slopes along changes of all layers, and the error that each change makes."""
    tensors, modules = dict(named_tensors(model)), dict(model.named_modules())
    known, changes, errors = dict[tuple[Any, ...], _Prediction](), list[tuple[int, _Change]](), list[float]()
    predictions = defaultdict[tuple[str, bool], list[tuple[int, _Prediction]]](list)
    for index, moments in enumerate(stats.layers):
        layer, weight = moments.layer, tensors[moments.layer.weight]
        if layer.geometry.kernel or layer.stack:
            change = _Change.of(moments, tensors, modules)
            changes.append((index, change))
            errors.append(change.error)
        else:
            biased = shifted(layer, tensors, modules) is not None
            key = id(moments.grams[0]), weight.dtype, biased
            if key not in known:
                known[key] = _Prediction.of(moments, weight.dtype, biased=biased)
            predictions[layer.weight, layer.transposed].append((index, known[key]))
            errors.append(known[key].error(layer.matrix(weight), relative_scale(moments, modules)))
        stats.memory.release()
    return _Slopes(model, predictions, changes, len(stats.layers)), errors


def _gains_by_gradients(
    model: nn.Module, stats: PatchStats, judge: OutputComparison, inputs: tuple[Any, ...]
) -> list[float | None] | None:
    """Return the gain of each layer, None where it is none; None altogether if gradients miss some."""
    if judge.weights or not stats.layers:
        return None
    samples = sample_count(inputs)  # run one at a time: outputs may be as wide as a vocabulary
    each = [select_samples(inputs, slice(index, index + 1)) for index in range(samples)]
    slopes, errors = _slopes_and_errors(model, stats)
    release_memory(model, collect=False)
    parts = shared_values(_squared_slopes(model, slopes, judge, each))
    if any(part is None for part in parts):
        return None
    squares = [sum(some) for some in zip(*filter(None, parts), strict=True)]
    if not all(square > 0 for square, error in zip(squares, errors, strict=True) if error > 0):
        return None  # no gradient reaches some layer
    found_gains = [square / error if error > 0 else None for square, error in zip(squares, errors, strict=True)]
    return [gain if gain is not None and math.isfinite(gain) else None for gain in found_gains]


def _squared_slopes(
    model: nn.Module, slopes: _Slopes, judge: OutputComparison, each: Sequence[tuple[Any, ...]]
) -> list[float] | None:
    """Return the squared norm along each change, of this process's samples; None if something has no gradient."""
    probes, squares, spread = -(-PROBES // len(each)), [0.0] * slopes.layers, RelativeError()
    device = device_of(model)
    try:
        for one in each if len(judge.outputs) > 1 else each[:1]:  # the variance of a single one is in all gains
            for key, values in judge.values(model, one, counted_positions(model, one)):
                spread.add(key, values, values)
        around = spread.variations(0.0)
        with HookOwner(slopes.follow):
            for one in tracked([*dealt(each)], "gains", unit="sample"):
                with slopes.intercepting(), torch.enable_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # of models that look at values, which have gradients
                    returned = call(model, one)
                output, scores = plain_in(judge.read.of(returned)), _token_scores(returned, one)
                with torch.enable_grad():
                    counted = counted_positions(model, one)
                    generator = torch.Generator().manual_seed(checksum(one, counted))
                    found = [
                        _Judged(rows_of(output[place], counted), around[place], output[place] is scores)
                        for place in judge.outputs
                        if place in around
                    ]
                for number in range(1, probes + 1):
                    with torch.enable_grad():
                        sums = [one.random_sum(generator).to(device) / math.sqrt(len(found)) for one in found]
                        total = sum(sums, torch.zeros((), dtype=torch.float64, device=device))
                    squares = [
                        square + slope**2 / probes
                        for square, slope in zip(squares, slopes.of(total, again=number < probes), strict=True)
                    ]
                del returned, output, scores, found, sums, total
    except (RuntimeError, NotImplementedError, IndexError, AttributeError, UserWarning):
        return None  # an operator without a gradient, or an output that changes with the number of samples
    return squares


@dataclass(frozen=True, eq=False)
class _Judged:
    """An output of a model whose changes count."""

    values: Tensor  # at the positions that count
    around: float  # squared deviation of all samples, which squared changes are shares of
    scores: bool  # whether these are scores of tokens, whose probabilities count

    def random_sum(self, generator: torch.Generator) -> Tensor:
        """Return a sum whose slope along a change d has the size of d as mean square.

        The size is d^T d / `around`, by random signs. That of scores with probabilities p is d^T (diag(p) - p p^T) d,
        two times the divergence of the probabilities to second order, and the mean over positions: the slope of the
        log likelihood of tokens that are drawn from p (Amari 1998, "Natural gradient works efficiently in learning").
        """
        if not self.scores:
            signs = torch.randint(0, 2, self.values.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
            return (signs.to(self.values.device) * self.values).sum(dtype=torch.float64) / math.sqrt(self.around)
        rows = self.values.flatten(0, -2).float()
        with torch.no_grad():
            below = rows.softmax(-1).cumsum_(-1)
            drawn = torch.rand(len(rows), 1, generator=generator).to(rows.device) * below[:, -1:]
            tokens = torch.searchsorted(below, drawn).clamp_(max=rows.shape[1] - 1).flatten()
        return F.cross_entropy(rows, tokens, reduction="sum").double() / math.sqrt(len(rows))


def _token_scores(returned: Any, inputs: tuple[Any, ...]) -> Tensor | None:
    """Return the scores of tokens (B, T, vocabulary) by the name that transformers gives them; None of other models."""
    found = getattr(returned, "logits", None)
    texts = all(not tensor.is_floating_point() for tensor in gather(inputs))
    return found if texts and isinstance(found, Tensor) and found.dim() == 3 and found.shape[-1] > 1 else None


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

    `weight` is (o, C, ...), see `LayerCall.matrix`; `kept` (C,) is False for channels that go, the same in each group.
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
    """Return what `without_channels` does for rows (o, C, taps) of a group; each tap by itself if `each_tap`."""
    outputs, channels, taps = rows.shape
    flat = rows.transpose(1, 2).flatten(0, 1) if each_tap else rows.flatten(1)
    change = without_columns(flat, matrix, kept.repeat_interleave(flat.shape[1] // channels), biased=biased)
    errors = ((change @ matrix) * change).sum(1).clamp(min=0)
    weights = change[:, :-1]
    weights = weights.view(outputs, taps, channels).transpose(1, 2) if each_tap else weights.view_as(rows)
    return weights, change[:, -1].view(outputs, -1).sum(1), errors.view(outputs, -1).sum(1)


def without_columns(flat: Tensor, matrix: Tensor, kept: Tensor, *, biased: bool) -> Tensor:
    """Return the least-squares change of a weight and its bias, (r, d + 1), that leaves only some columns."""
    return flat[:, ~kept] @ predicted_columns(matrix, kept, biased=biased).T


def predicted_columns(matrix: Tensor, kept: Tensor, *, biased: bool) -> Tensor:
    """Return the factors of columns and a constant in the prediction less the column, (d + 1, gone), -1 for itself."""
    left = torch.cat([kept, kept.new_full((1,), biased)])
    gone = torch.cat([~kept, kept.new_zeros(1)])
    found = matrix.new_zeros(len(matrix), int(gone.sum()))
    found[left] = solve_positive(with_ridge(matrix)[left][:, left], matrix[left][:, gone])
    found[gone] = -torch.eye(found.shape[1], dtype=found.dtype, device=found.device)
    return found


def with_ridge(matrix: Tensor) -> Tensor:
    """Return a Gram matrix with its ridge, which is not on the constant column, the last."""
    raised = matrix.clone()
    raised.diagonal()[:-1] += ridge_of(matrix)
    return raised


def few_rows(parts: Sequence[Tensor], matrix: Tensor, *, biased: bool) -> tuple[FewRows, float, float]:
    """Return the rows of `LayerMoments.read`, the ridge that their Gram matrix has, and the one to factor it with."""
    read = torch.cat([*parts]).double()
    raised = float((matrix.diagonal() - read.square().mean(0))[:-1].mean().clamp(min=0))
    return FewRows.of(read[:, :-1], read[:, -1:] if biased else read[:, :0]), raised, raised + ridge_of(matrix)


def ridge_of(matrix: Tensor) -> float:
    """Return the ridge of a Gram matrix."""
    return RIDGE * float(matrix.diagonal()[:-1].mean()) or 1.0


def relative_scale(moments: LayerMoments, modules: Mapping[str, nn.Module]) -> Tensor:
    """Return the scale of a layer's output at the end of its chain over its standard deviation there, (o,).

    It is on the device of the moments; the model may be elsewhere.
    """
    scale = moments.variance.clamp(min=1e-12 * float(moments.variance.max()) or 1.0).rsqrt()
    if moments.layer.gain is not None and moments.layer.end == "sum":
        scale = scale * moments.layer.gain.to(scale.device)
    if moments.layer.norm is None:
        return scale
    return scale * norm_affine(modules[moments.layer.norm])[0].to(scale.device)


def norm_affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Return the factor and the offset of a BatchNorm in eval mode, (channels,) each, float64."""
    factor: Tensor = (norm.running_var.double() + norm.eps).rsqrt()
    factor = factor if norm.weight is None else factor * norm.weight.detach().double()
    offset = -norm.running_mean.double() * factor
    return factor, offset if norm.bias is None else offset + norm.bias.detach().double()

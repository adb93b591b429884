"""One budget of activation sparsity for a whole model, spread over its layers so that its output changes least."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from prunekit.channels.tracing.execution import plain_operators
from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.channels.tracing.storages import memory_of
from prunekit.criteria.elimination import hull_slopes
from prunekit.errors import DataError, ModelError, NonFiniteError, UsageError
from prunekit.hooks.owner import HookOwner
from prunekit.masks.activation_masks import ActivationMasks, Side, change_activations
from prunekit.masks.threshold_search import (
    FoundThresholds,
    MagnitudeSketch,
    MaskedActivations,
    Sketches,
    search_thresholds,
    sketch_activations,
)
from prunekit.statistics.output_error import FLAT, OutputComparison, RelativeError
from prunekit.utils.context import same_attributes, same_draws, training_mode
from prunekit.utils.display import listed
from prunekit.utils.inputs import call, counted_positions, running, sample_count, select_samples, to_device
from prunekit.utils.progress import stage, tracked
from prunekit.utils.tensors import gather, map_tensors

SavedBy = Literal["macs", "values"]
"""Units of what zeros save: MACs of the layers that read them, or the values themselves."""
STEPS = 8
"""Equal steps from a layer's own zeros to nothing but zeros; the error is measured after each but the last."""
SAMPLES = 256
"""The most samples on which errors are measured, and on which two ways to spread are compared."""
HELD_OUT = 4
"""One of so many samples is held out."""

Array = NDArray[np.float64]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, eq=False)
class SpreadThresholds:
    """Thresholds that meet an overall budget in two ways: `spread` by errors, and `uniform`."""

    found: dict[str, FoundThresholds]  # the thresholds of each way
    weights: dict[str, float]  # share of what can be saved that lies behind each mask, by module path; they add up to 1
    errors: dict[str, float]  # error of the model's output on held-out data, as a share of its variance, of each way


def spread_budgets(masked: MaskedActivations, budgets: Iterable[float], by: SavedBy) -> Iterator[SpreadThresholds]:
    """Yield thresholds for each budget: under them the mean of the layers' shares of zeros is the budget.

    Shares of zeros are weighted by what zeros save, which `by` says. The error of the model's output is measured with
    each mask alone at several shares of zeros. The convex hulls of these curves are followed from all layers' cheapest
    step to the dearest, by error per saving, as TEAL does greedily (Liu et al. 2024, "Training-Free Activation Sparsity
    in Large Language Models"), until the budget is met; then the thresholds are searched with all masks active. So are
    those of one share for all layers, and held-out samples tell which changes the output less, see `better_way`.

    Raises:
        UsageError: nothing that is counted by MACs reads the masked values.
        DataError: there are fewer than 8 samples, or the model's output is the same for all of them.
        ModelError: the output has another shape under masks.
        NonFiniteError: the output is NaN or Inf.
    """
    fit = replace(masked, batches=_Chosen(masked.batches, lambda numbers: ~_held_out(numbers)))
    held_out = replace(masked, batches=_Chosen(masked.batches, _held_out))
    stage("threshold search: zeros of the unmasked model")
    sketches, zeros = sketch_activations(fit, dict.fromkeys(masked.paths, 0.0))
    few, judged = (replace(each, batches=_few(each.batches)) for each in (fit, held_out))
    weights = _weights(few, sketches, by)
    counted = [path for path in masked.paths if weights[path] > 0]
    curves = error_curves(few, sketches, {path: zeros[path] for path in counted})
    saved, own = np.array([weights[path] for path in counted]), np.array([zeros[path] for path in counted])
    ways = {"spread": SharePath.along_errors(own, curves, saved), "uniform": SharePath.uniform(len(counted))}
    for budget in budgets:
        found = {name: _search(fit, way, budget, dict(zip(counted, saved, strict=True))) for name, way in ways.items()}
        errors = _output_errors(judged, [(name, each.thresholds) for name, each in found.items()])
        yield SpreadThresholds(found, weights, errors)


def _search(masked: MaskedActivations, way: SharePath, budget: float, weights: Mapping[str, float]) -> FoundThresholds:
    """Search for thresholds along a path of shares; paths without a weight are not masked."""
    saved = np.array(list(weights.values()))

    def shares(sketches: Sketches) -> dict[str, float]:
        floor = np.array([sketches[path].zero_share for path in weights])
        found = dict(zip(weights, way.within(budget, saved, floor).tolist(), strict=True))
        return dict.fromkeys(masked.paths, 0.0) | found

    return search_thresholds(masked, shares)


def better_way(errors: Mapping[str, float]) -> str:
    """Return `spread`, or `uniform` where its error is less."""
    return "spread" if errors["spread"] <= errors["uniform"] else "uniform"


@dataclass(frozen=True, eq=False)
class SharePath:
    """A way to raise the shares of zeros of all layers, from none to all."""

    points: Array  # (n, layers) shares, rising; between two points they rise in line

    @classmethod
    def uniform(cls, layers: int) -> SharePath:
        """Return the path on which all layers have one share."""
        return cls(np.array([[0.0] * layers, [1.0] * layers]))

    @classmethod
    def along_errors(cls, zeros: Array, errors: Array, weights: Array) -> SharePath:
        """Return the path on which each step costs the least error for what it saves.

        `errors`, (layers, steps - 1), are those after equal steps from `zeros` to 1. That of the last step is not
        known: it is taken when all others are.
        """
        layers, steps = errors.shape[0], errors.shape[1] + 1
        widths = (1 - zeros) / steps
        slopes = np.array([hull_slopes(row) for row in errors])
        with np.errstate(divide="ignore", invalid="ignore"):
            prices = np.where(widths[:, None] > 0, slopes / (weights * widths)[:, None], np.inf)
        order = np.argsort(prices, axis=None, kind="stable")  # hulls are convex: steps of a layer stay in order
        rises = np.zeros((order.size, layers))
        rises[np.arange(order.size), order // (steps - 1)] = widths[order // (steps - 1)]
        return cls(np.concatenate([zeros[None], zeros + np.cumsum(rises, axis=0), np.ones((1, layers))]))

    def within(self, overall: float, weights: Array, floor: Array) -> Array:
        """Return the shares on this path at which the budget is met: (layers,)."""
        means = np.maximum(self.points, floor) @ weights
        after = int(np.searchsorted(means, overall))
        after = min(max(after, 1), len(means) - 1)
        low, high = self.points[after - 1 : after + 1]
        start, end = 0.0, 1.0
        for _ in range(60):  # the floor bends the mean between two points, which rises all the same
            middle = (start + end) / 2
            if float(np.maximum(low + middle * (high - low), floor) @ weights) < overall:
                start = middle
            else:
                end = middle
        found: Array = low + end * (high - low)
        return found


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Some samples of batches, chosen by their numbers; of batches without samples, whole batches."""

    batches: Iterable[tuple[Any, Any]]
    chosen: Callable[[Tensor], Tensor]  # numbers (n,) -> bool (n,)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        start = 0
        for inputs, _ in self.batches:
            count = sample_count(inputs)
            wanted = self.chosen(torch.arange(start, start + max(count, 1)))
            start += len(wanted)
            if wanted.any():
                yield (select_samples(inputs, wanted.nonzero().flatten()) if count else inputs), None


def _held_out(numbers: Tensor) -> Tensor:
    """Return which samples are held out, of every `HELD_OUT` the last."""
    return numbers % HELD_OUT == HELD_OUT - 1


def _few(batches: Iterable[tuple[Any, Any]]) -> _Chosen:
    """Return at most `SAMPLES` samples of some batches, evenly spread."""
    total = sum(max(1, sample_count(inputs)) for inputs, _ in batches)
    if total < 2:
        raise DataError(
            f"threshold search: an overall budget is spread by errors on {HELD_OUT - 1} of {HELD_OUT} samples and "
            f"judged on the others: expected at least {2 * HELD_OUT} samples, got fewer"
        )
    most = min(SAMPLES, total)
    return _Chosen(batches, lambda numbers: (numbers + 1) * most // total > numbers * most // total)


def _weights(masked: MaskedActivations, sketches: Mapping[str, MagnitudeSketch], by: SavedBy) -> dict[str, float]:
    if by == "values":
        found = {path: float(sketches[path].count) for path in masked.paths}
    else:
        inputs = next(iter(masked.batches))[0]
        some = to_device(select_samples(inputs, slice(2)) if sample_count(inputs) else inputs, masked.device)
        found = macs_of_readers(masked.model, some, masked.paths, masked.side)
    total = sum(found.values())
    if not total:
        raise UsageError(
            f"by: no convolution, linear layer or product of matrices reads the {masked.side}s of "
            f"{listed(masked.paths, 3)}, so zeros there save no MACs; choose modules whose values are read by such, or "
            "by='values'"
        )
    return {path: value / total for path, value in found.items()}


def error_curves(
    masked: MaskedActivations, sketches: Mapping[str, MagnitudeSketch], zeros: Mapping[str, float]
) -> Array:
    """Return the error of the output with each layer masked alone, (layers, STEPS - 1), see `SharePath`."""
    candidates = [
        ((path, step), {path: sketches[path].quantile(own + (1 - own) * step / STEPS)})
        for path, own in zeros.items()
        for step in range(1, STEPS)
    ]
    stage(f"threshold search: error of the output at {STEPS - 1} shares of zeros in {len(zeros)} layers")
    found = _output_errors(masked, candidates)
    return np.array([[found[path, step] for step in range(1, STEPS)] for path in zeros])


def _output_errors(masked: MaskedActivations, candidates: list[tuple[Name, dict[str, float]]]) -> dict[Name, float]:
    """Return the error of the model's output under each of some masks, as a share of its variance, by their names."""
    model, judge = masked.model, None
    dense = RelativeError()
    squares: dict[Name, dict[int | str, float]] = {name: {} for name, _ in candidates}
    with training_mode(model, False), torch.no_grad():
        for inputs, _ in tracked(masked.batches, "output errors"):
            given = to_device(inputs, masked.device)
            with running(model, given):
                judge = judge or OutputComparison.of(model, map_tensors(given, torch.clone))
                want = _values(judge, model, given)
            for key, value in want:
                dense.add(key, value, value)
            for name, thresholds in tracked(candidates, "masks", unit="mask"):
                with ActivationMasks(model, thresholds, side=masked.side, count=False):
                    got = _values(judge, model, given)
                for key, square in _squares(want, got):
                    squares[name][key] = squares[name].get(key, 0.0) + square
    variations = dense.variations(FLAT)
    if not variations:
        raise DataError(
            "threshold search: the model's output is the same for all samples, or holds no floating-point numbers, so "
            "that no error can be measured; expected samples that differ, preprocessed as the model wants them"
        )
    shares = {name: [found[key] / around for key, around in variations.items()] for name, found in squares.items()}
    errors = {name: sum(values) / len(values) for name, values in shares.items()}
    if not np.isfinite(list(errors.values())).all():
        raise NonFiniteError("threshold search: the model's output is NaN or Inf; expected finite outputs")
    return errors


def _values(judge: OutputComparison, model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[int | str, Tensor]]:
    with same_draws(model):
        return judge.values(model, map_tensors(inputs, torch.clone), counted_positions(model, inputs))


def _squares(
    want: list[tuple[int | str, Tensor]], got: list[tuple[int | str, Tensor]]
) -> Iterator[tuple[int | str, float]]:
    """Yield the summed squared difference of each tensor, by its key."""
    shapes = [[tuple(value.shape) for _, value in values] for values in (want, got)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"threshold search: expected outputs of the unmasked model's shapes {shapes[0]}, got {shapes[1]} under a "
            "mask: their difference cannot be measured; give every layer one share instead: target=..."
        )
    for (key, value), (_, other) in zip(want, got, strict=True):
        yield key, float((other.double() - value.double()).square().sum())


_KEEPING_ZEROS = frozenset(
    getattr(torch.ops.aten, f"{name}{place}")
    for name in ("relu", "leaky_relu", "elu", "gelu", "silu", "hardswish", "hardtanh", "tanh", "neg", "mul", "div")
    for place in ("", "_")
) | {
    getattr(torch.ops.aten, name)
    for name in ("clone", "copy_", "_to_copy", "cat", "stack", "constant_pad_nd", "index_select", "repeat")
}  # fmt: skip
"""Operators whose result is zero where what they read is; views need none, as they share memory."""


def macs_of_readers(model: nn.Module, inputs: tuple[Any, ...], paths: Iterable[str], side: Side) -> dict[str, float]:
    """Return the multiply-accumulates of the operators that read each module's masked activations, by module path.

    They are those of convolutions, linear layers and products of matrices that read these values, also through views,
    copies, padding and operators that keep zeros, such as ReLU and products. A product of a masked value with another
    counts for both. 0: nothing that computes by MACs reads the zeros, as behind a convolution and before its BatchNorm.
    """
    readers = _Readers(model, paths, side)
    with (
        training_mode(model, False), same_attributes(model), torch.no_grad(), plain_operators(model),
        readers.hooks, readers,
    ):  # fmt: skip
        call(model, map_tensors(inputs, torch.clone))
    return readers.macs


class _Readers(OperatorMode):
    """Follows masked values through a forward pass, and counts the operators that multiply them."""

    def __init__(self, model: nn.Module, paths: Iterable[str], side: Side) -> None:
        super().__init__()
        self.macs = dict.fromkeys(paths, 0.0)
        self.hooks = HookOwner(partial(self._register, model, side))
        self._masked: dict[int, frozenset[str]] = {}
        self._alive: list[Tensor] = []

    def _register(self, model: nn.Module, side: Side, hooks: HookOwner) -> None:
        """Mark the values that masks would change."""
        for path in self.macs:
            change_activations(hooks, model, path, side, partial(self._marked, path))

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator; add its MACs to the masks that it reads, or pass these on to its result."""
        given = gather((args, kwargs))
        read: frozenset[str] = frozenset().union(
            *(self._masked.get(memory_of(tensor), frozenset()) for tensor in given)
        )
        out, packet = run_operator(func, args, kwargs), func.overloadpacket
        if read and packet in flop_registry:
            macs = int(flop_registry[packet](*args, **kwargs, out_val=out)) // 2
            for path in read:
                self.macs[path] += macs
        known, results = {memory_of(tensor) for tensor in given}, gather(out)
        written = func._schema.is_mutable
        for tensor in results:
            if written or memory_of(tensor) not in known:
                self._note(tensor, read if packet in _KEEPING_ZEROS else frozenset())
        return out

    def _note(self, tensor: Tensor, paths: frozenset[str]) -> None:
        self._alive.append(tensor)  # freed memory would be another tensor's
        self._masked[memory_of(tensor)] = paths

    def _marked(self, path: str, tensor: Tensor) -> Tensor:
        own = tensor.clone()  # as a mask makes a tensor of its own, that only this module's readers read
        self._note(own, frozenset({path}))
        return own

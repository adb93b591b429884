"""The error of a model's output: which outputs are compared, and how far they are from those of the dense model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.operator_mode import OperatorMode
from prunekit.channels.tracing.storages import plain_in
from prunekit.distributed.shared_work import shared_values
from prunekit.hooks.wrappers import unwrapped
from prunekit.statistics.layer_graph import LayerFinder
from prunekit.statistics.linear_layers import CallInterceptor, FunctionCall
from prunekit.utils.context import same_attributes
from prunekit.utils.inputs import Counted, call, checksum, rows_of, sample_count, select_samples
from prunekit.utils.outputs import ALL_READ, ReadOutputs
from prunekit.utils.tensors import gather, map_tensors

FEW = 2
"""Samples, and one more, by which outputs whose first axis holds samples are recognized."""
AT_ONCE = 2**19
"""Values in float64 at a time: they stay in the cache."""
DETECTORS = ("torchvision.models.detection", "ultralytics.")
"""Beginnings of the names of modules with detectors."""
DETR = "ForObjectDetection"
"""End of the names of transformers' classes of detectors."""
SELECTING = frozenset({"topk", "sort", "nonzero", "nms"})
"""Operators by which detectors select places."""
DETECTED = ("scores", "boxes")
"""Names of the tensors that every detector's head is compared by."""
FLAT = 1e-13
"""Variance among samples, as a share of the mean square, that may be no more than float32's rounding."""


@dataclass(frozen=True)
class OutputComparison:
    """The tensors of a model that are compared with those of the dense one.

    Outputs whose first axis holds samples are compared as they are. In place of each other output, those layers are
    compared from whose outputs it is computed with no other layer in between. So it is where computed values select
    something, as a detector selects the boxes that score best: what is selected has no counterpart in the other model.

    Of known detectors are compared the probabilities of classes, and boxes, masks and keypoints times the probability
    of an object, of all places: nobody reads a box where nothing is, and most places are such. Where a detector selects
    proposals or queries, the dense model's places are selected in the other model too.
    """

    outputs: tuple[int, ...]  # indices among the tensors of the model's output that are read
    weights: tuple[str, ...]  # of layers whose outputs are compared, over all of their calls
    read: ReadOutputs = ALL_READ  # the outputs of the model that are read
    # output channels of these layers that are compared, ascending; all channels of a layer that is not among the keys
    channels: Mapping[str, Tensor] = field(default_factory=dict)
    # whether computed values select entries of these outputs, such as the queries that score best
    selected: bool = False
    head: Any = field(default=None, repr=False, compare=False)  # of a detector, by which it is compared alone
    each: int = field(default=0, compare=False)  # values of the compared outputs of a sample
    # what the first model that saw the last inputs selected, by a checksum of these and by the operator
    _selected: dict[int, dict[str, list[Tensor]]] = field(default_factory=dict, repr=False, compare=False)
    # calls of these layers that the dense model makes, by the shapes of the inputs
    _calls: dict[tuple[torch.Size, ...], int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, model: nn.Module, inputs: tuple[Any, ...], read: ReadOutputs = ALL_READ) -> OutputComparison:
        """Return the comparison of a model."""
        kinds = type(unwrapped(model)).__mro__
        if any(one.__name__.endswith(DETR) or one.__module__.startswith(DETECTORS) for one in kinds):
            from prunekit.tasks.detection import detecting_head

            if (head := detecting_head(model)) is not None:
                found = cls((), DETECTED, read, head=head)
                # of a head that says something else
                with suppress(KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError):
                    found.values(model, select_samples(inputs, slice(FEW)))
                    return found
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
        each = sum(more[place].numel() for place in outputs) // counts[1]
        compared = tuple(one for one in weights if one not in alone)
        return cls(tuple(outputs), compared, read, selected=selected, each=each)

    def within(self, kept: Mapping[str, Tensor]) -> OutputComparison:
        """Return the comparison of models that keep some output channels of layers: removed ones are zero or gone.

        Layers that keep none are not compared.
        """
        weights = tuple(weight for weight in self.weights if weight not in kept or len(kept[weight]))
        return replace(self, weights=weights, channels={weight: kept[weight] for weight in weights if weight in kept})

    def values(
        self, model: nn.Module, inputs: tuple[Any, ...], counted: Counted | None = None
    ) -> list[tuple[int | str, Tensor]]:
        """Return the compared tensors, samples or positions first, each with its index or weight.

        If only layers are compared, what the model does behind them, such as selecting boxes, is run only the first
        time that there are inputs of these shapes.
        """
        most = 0 if self.outputs else self._calls.get(_shapes(inputs), 0) if self.head is None else 1
        return self.run(model, inputs, counted, most)[1]

    def run(
        self, model: nn.Module, inputs: tuple[Any, ...], counted: Counted | None = None, most: int = 0
    ) -> tuple[Any, list[tuple[int | str, Tensor]]]:
        """Return the model's output, None if the pass ends after `most` calls of layers, and the compared tensors."""
        if self.head is not None:
            run = partial(call, model, inputs)
            with same_attributes(model):
                if not self.head.selects:
                    output, said = self.head.detections(model, run, whole=not most)
                    return output, [*said.items()]
                if (number := checksum(inputs)) not in self._selected:
                    self._selected.clear()  # each batch is compared before the next one
                known = self._selected.setdefault(number, {})
                output = None if most else call(model, map_tensors(inputs, torch.clone))
                with _SameSelection(known):
                    return output, [*self.head.detections(model, run, whole=False)[1].items()]
        layers, output = _LayerOutputs(model, self, counted, most), None
        with same_attributes(model), layers.intercepting():
            output = call(model, inputs)
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

    def __init__(self, model: nn.Module, judge: OutputComparison, counted: Counted | None, most: int) -> None:
        super().__init__(model)
        self._counted, self._most = counted, most
        self.found: list[tuple[int | str, Tensor]] = []
        self._weights, self._channels = frozenset(judge.weights), judge.channels
        self._widths: dict[str, int] = {}

    def call(self, call: FunctionCall) -> Any:
        operands = self.operands(call)
        result = call.run()
        if operands is not None and operands.weight in self._weights:
            axis = 1 if call.name.startswith("conv") else -1
            width = result.shape[axis]
            if self._widths.setdefault(operands.weight, width) != width:  # a weight that is used in both directions
                return result
            values = rows_of(result.movedim(axis, -1), self._counted)
            if (kept := self._channels.get(operands.weight)) is not None:
                values = values[..., kept.to(values.device)]
            self.found.append((operands.weight, values.flatten(0, -2)))
            if len(self.found) == self._most:
                self.stop()
        return result


class _SameSelection(OperatorMode):
    """Notes what the operators of `SELECTING` select in a model; or, where that is known, has them select the same."""

    def __init__(self, known: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self._known, self._made, self._notes = known, Counter[str](), not known

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        if name not in SELECTING:
            return result
        index: Tensor = gather(result)[-1]
        if self._notes:
            self._known.setdefault(name, []).append(index.clone())
            return result
        at, known = self._made[name], self._known.get(name, [])
        self._made[name] += 1
        if at >= len(known) or not (index.shape == known[at].shape or isinstance(result, Tensor)):
            return result
        index = known[at].clone()
        if isinstance(result, Tensor):
            return index
        names = [argument.name for argument in func._schema.arguments]
        axis = kwargs.get("dim", args[names.index("dim")] if names.index("dim") < len(args) else -1)
        return args[0].gather(axis, index), index


class RelativeError:
    """The squared difference of a model from the dense one over the dense one's variance, summed over batches."""

    def __init__(self) -> None:
        self._squares: dict[int | str, float] = {}
        self._counts: dict[int | str, int] = {}
        self._sums: dict[int | str, Tensor] = {}  # of each value over the samples
        self._totals: dict[int | str, float] = {}  # of all squares

    def add(self, key: int | str, want: Tensor, got: Tensor) -> None:
        """Add some samples, (n, ...) each; some at a time in float64, as they may be as wide as a vocabulary."""
        self._counts[key] = self._counts.get(key, 0) + len(want)
        want, got = (values.flatten(1) if values.dim() > 1 else values[:, None] for values in (want, got))
        sums = self._sums.setdefault(key, torch.zeros(want.shape[1], dtype=torch.float64, device=want.device))
        step = max(1, AT_ONCE // max(1, len(want)))
        for some in (slice(start, start + step) for start in range(0, want.shape[1], step)):
            wide = want[:, some].double()
            self._squares[key] = self._squares.get(key, 0.0) + float((got[:, some].double() - wide).square().sum())
            sums[some] += wide.sum(0)
            self._totals[key] = self._totals.get(key, 0.0) + float(wide.square().sum())

    def shared(self) -> RelativeError:
        """Return the sum over the samples of all processes that share the work."""
        found = RelativeError()
        sums = {key: one.cpu() for key, one in self._sums.items()}
        for squares, counts, totals, own in shared_values((self._squares, self._counts, self._totals, sums)):
            for key, count in counts.items():
                found._counts[key] = found._counts.get(key, 0) + count
                found._squares[key] = found._squares.get(key, 0.0) + squares[key]
                found._totals[key] = found._totals.get(key, 0.0) + totals[key]
                found._sums[key] = found._sums[key] + own[key] if key in found._sums else own[key]
        return found

    def shares(self, flat: float) -> Iterator[float]:
        """Yield the relative error of each tensor that varies by more than a share `flat` of its mean square."""
        for key, around in self.variations(flat).items():
            yield self._squares[key] / around

    def variations(self, flat: float) -> dict[int | str, float]:
        """Return the squared deviation from the mean of each tensor that varies by more, summed over the samples."""
        found = {}
        for key, total in self._totals.items():
            count, sums = self._counts[key], self._sums[key]
            around = total if count == 1 else total - float(sums @ sums) / count
            if not around <= flat * total:  # NaN passes: its origin is found later
                found[key] = around
        return found

"""The linear layers of a model, and the chain behind each: a norm, a sum with a shortcut, a rectifier."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prunekit.statistics.linear_layers import CallInterceptor, FunctionCall, LayerCall, Operands, StackParts, WeightUse
from prunekit.statistics.patches import geometry_of, with_strides_of
from prunekit.statistics.row_norms import RowNorm, row_norm_of
from prunekit.utils.context import same_attributes
from prunekit.utils.inputs import call
from prunekit.utils.tensors import gather

_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_PRODUCTS = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__"})
_MOVES = frozenset(
    {
        "view", "reshape", "permute", "transpose", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous",
        "roll", "__getitem__", "movedim", "moveaxis", "swapaxes", "swapdims", "narrow", "clone",
    }
)  # fmt: skip
"""Functions whose results hold values of their first argument, each at most once."""
_SELECTING = frozenset({"__getitem__", "gather", "index_select", "masked_select", "take", "take_along_dim"})
"""Functions that select entries of their first argument by the others."""
_SORTING = frozenset({"topk", "sort", "msort"})
"""Functions that order entries of their argument by their values."""
_WRITING = frozenset(
    {
        "__setitem__", "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "scatter",
        "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
    }
)  # fmt: skip
"""Functions that write entries to their first argument."""

RECTIFIED = "rectified"
"""The stage after a ReLU at the end of a layer's chain."""


class ChainMark(NamedTuple):
    """A mark on a tensor: which call made its values, and which stage of which layer's chain they are."""

    owner: object
    call: int
    version: int
    layer: int | None
    stage: str


class TensorOrigin(NamedTuple):
    """A mark on a tensor: the layers that its values come from."""

    owner: object  # identifies the pass
    # indices, among the chains, of the layers from whose outputs it was computed with no other layer in between
    origins: frozenset[int] = frozenset()
    selected: bool = False  # whether computed values decide which entries it has, as for boxes that a detector selects
    behind: int = 0  # the weights of all layers that it was made with, one bit each


@dataclass
class LayerChain:
    """A layer and the chain behind it, as far as it was followed."""

    layer: LayerCall
    shape: torch.Size  # of its output
    stages: list[str] = field(default_factory=lambda: ["layer"])  # of the chain
    reads: Counter[str] = field(default_factory=Counter)  # how often the result of each stage is read
    rectified: str = ""  # the stage that a ReLU reads
    source: int | None = None  # the layer whose rectified end this one reads
    index: Tensor | None = None  # position of each value of the output at the last stage, once it was moved
    first: bool = False  # whether its input was made without any layer
    # the norms over channels that read stages, the first of each
    row_norms: dict[str, RowNorm] = field(default_factory=dict)

    def places(self) -> Tensor:
        """Return the position of each value of the output at the last stage."""
        return torch.arange(self.shape.numel()).view(self.shape) if self.index is None else self.index

    def finished(self, calls: int) -> LayerCall:
        """Return the layer with the part of its chain that nothing else reads."""
        alone = next((i for i, stage in enumerate(self.stages) if self.reads[stage] != 1), len(self.stages))
        stages = self.stages[: alone + 1]
        summed, scaled = "sum" in stages, any(stage.startswith("gain") for stage in stages)
        rectified = self.rectified == stages[-1] and self.reads[stages[-1]] == 1 and (summed or not scaled)
        layer = replace(
            self.layer, calls=calls, rectified=rectified, norm=self.layer.norm if "norm" in stages else None
        )
        if summed:
            layer = replace(layer, end=_plain_end(layer) if layer.moves else "sum")
        else:
            layer = _unsummed(layer, rectified=rectified)
        return replace(layer, row_norm=self.row_norms.get(layer.end))

    def gain(self, factor: Tensor, shape: torch.Size) -> Tensor | None:
        """Return by what a tensor multiplies each output at the last stage; None if it varies within an output."""
        values = torch.full((self.shape.numel(),), torch.nan, dtype=torch.float64)
        values[self.places().flatten()] = factor.detach().double().cpu().expand(shape).flatten()
        geometry = self.layer.geometry
        by_row = geometry.outputs(values.view(self.shape), torch.arange(geometry.rows(values.view(self.shape))))
        least, most = by_row.nan_to_num(torch.inf).amin(0), by_row.nan_to_num(-torch.inf).amax(0)
        return least.to(factor.device) if torch.equal(least, most) else None


class LayerFinder(CallInterceptor):
    """Finds the layers of a forward pass and the chains behind them, and the functions that read each parameter.

    With `stacks`, products with matrices of a stack, as experts have them, are layers too.
    """

    def __init__(self, model: nn.Module, norms: Iterable[str], *, stacks: bool = False) -> None:
        super().__init__(model, norms)
        self._stacks = StackParts(self.names) if stacks else None
        self._clear()

    def _clear(self) -> None:
        self.chains: list[LayerChain] = []  # of the layers, in the order in which they are called
        self.readers: dict[str, list[str]] = {}  # names of the functions that read each parameter and buffer
        self.calls: list[str] = []  # names of all functions, in order
        self.boundary: set[int] = set()  # indices of chains from whose outputs computed values select something
        self._owner, self._bits = object(), dict[str, int]()
        if self._stacks is not None:
            self._stacks.clear()

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Intercept one forward pass, and forget the results of an earlier one."""
        self._clear()
        with super().intercepting():
            yield

    def call(self, call: FunctionCall) -> Any:
        """Make a call and mark its results."""
        inputs = gather((call.args, dict(call.named)))
        marks = [self.mark(tensor) for tensor in inputs]
        self.calls.append(call.name)
        result = call.run()
        if self._stacks is not None:
            self._stacks.follow(call, result)
        if self.transposed_name(result) is None:
            for name in filter(None, (self.names.get(id(tensor)) or self.transposed_name(tensor) for tensor in inputs)):
                self.readers.setdefault(name, []).append(call.name)
        if any(result is tensor and self.mark(tensor) is not None for tensor in inputs):
            return result  # dropout in eval mode returns its argument
        for mark in marks:
            if mark is not None and mark.layer is not None:
                self.chains[mark.layer].reads[mark.stage] += 1
        self._find_row_norms(inputs, marks, result)
        origin = self._origin_of_results(call, inputs)
        if isinstance(result, Tensor):
            layer, stage = self._role(call, inputs, marks, result)
            found = ChainMark(self._owner, call.number, result._version, layer, stage)
            result._prunekit_mark = found  # type: ignore[attr-defined]
            if stage == "layer" and layer is not None:
                origin = self._through(self.chains[layer], origin)._replace(origins=frozenset({layer}))
        result = list(result) if call.name == "__iter__" else result
        for tensor in gather(inputs[:1] if call.name in _WRITING else result):
            tensor._prunekit_origin = origin  # type: ignore[attr-defined]
        return iter(result) if call.name == "__iter__" else result

    def _find_row_norms(self, inputs: list[Tensor], marks: list[ChainMark | None], result: Any) -> None:
        """Note a call that is a norm over the channels of a chain's stage."""
        for tensor, mark in zip(inputs, marks, strict=True):
            if mark is None or mark.layer is None or not isinstance(result, Tensor) or result.shape != tensor.shape:
                continue
            chain = self.chains[mark.layer]
            if mark.stage not in chain.row_norms and tensor.shape == chain.shape and not chain.layer.stack:
                rows = torch.arange(chain.layer.geometry.rows(tensor), device=tensor.device)
                given, returned = (chain.layer.geometry.outputs(each, rows) for each in (tensor, result))
                if (found := row_norm_of(given, returned)) is not None:
                    chain.row_norms[mark.stage] = found

    def operands(self, call: FunctionCall) -> Operands | None:
        """Return the arguments of a linear layer or convolution, or of a product with matrices of a stack."""
        found = super().operands(call)
        return found if found is not None or self._stacks is None else self._stacks.operands(call)

    def mark(self, tensor: Tensor) -> ChainMark | None:
        """Return this pass's mark of a tensor that was not written to since."""
        mark: ChainMark | None = getattr(tensor, "_prunekit_mark", None)
        return mark if mark is not None and (mark.owner, mark.version) == (self._owner, tensor._version) else None

    def origin(self, tensor: Tensor) -> TensorOrigin:
        """Return the origin of a tensor in this pass."""
        origin: TensorOrigin | None = getattr(tensor, "_prunekit_origin", None)
        return origin if origin is not None and origin.owner is self._owner else TensorOrigin(self._owner)

    def _origin_of_results(self, call: FunctionCall, inputs: list[Tensor]) -> TensorOrigin:
        """Return the origin of a call's results."""
        known = [self.origin(tensor) for tensor in inputs]
        origins = frozenset().union(*(origin.origins for origin in known))
        writing = call.name in _WRITING  # numbers that are written where a selection says decide nothing
        deciding = [origin for i, origin in enumerate(known) if not (writing and i and inputs[i].is_floating_point())]
        selected = any(origin.selected for origin in deciding)
        first, others = known[:1], known[1:]
        if call.name in _SORTING or (call.name in _SELECTING and any(origin.origins for origin in others)):
            selected = selected or any(origin.origins for origin in first)
        if selected:
            self.boundary.update(i for origin in known if not origin.selected for i in origin.origins)
        return TensorOrigin(self._owner, origins, selected, reduce(or_, (origin.behind for origin in known), 0))

    def _through(self, chain: LayerChain, origin: TensorOrigin) -> TensorOrigin:
        """Return the origin of a layer's output, given that of its input."""
        own = 1 << self._bits.setdefault(chain.layer.weight, len(self._bits))
        chain.first = not origin.behind
        chain.layer = replace(chain.layer, selected=origin.selected, recurrent=bool(origin.behind & own))
        return origin._replace(behind=origin.behind | own)

    def _role(
        self, call: FunctionCall, inputs: list[Tensor], marks: list[ChainMark | None], result: Tensor
    ) -> tuple[int | None, str]:
        operands = self.operands(call)
        if operands is not None:
            return self._layer(call, operands, result)
        if call.name in _SUMS:
            return self._sum(call, marks)
        if call.name in _PRODUCTS:
            return self._gain(call, inputs, marks, result)
        mark = marks[0] if marks else None
        chain = self.chains[mark.layer] if mark is not None and mark.layer is not None else None
        if mark is None or chain is None:
            return None, ""
        if call.name == "batch_norm" and mark.stage == "layer":
            return self._norm(call, mark, chain)
        if call.name in _MOVES and len(inputs) == 1 and call.args and call.args[0] is inputs[0]:
            return self._move(call, mark, chain)
        if call.name in {"relu", "relu_"}:
            chain.rectified = chain.rectified if mark.stage == RECTIFIED else mark.stage
            return mark.layer, RECTIFIED
        return None, ""

    def _layer(self, call: FunctionCall, operands: Operands, result: Tensor) -> tuple[int | None, str]:
        stacked = operands.numbers is not None
        how = operands.geometry if stacked else geometry_of(call.name, call.args, call.named)
        if how is None:
            return None, ""
        read = self.mark(operands.inputs)
        made = None if read is None else read.call
        layer = LayerCall(operands.weight, operands.bias, call.number, how, transposed=operands.transposed, read=made)
        layer = replace(layer, stack=len(operands.matrix)) if stacked else layer
        source = read.layer if read is not None and read.stage == RECTIFIED else None
        self.chains.append(LayerChain(replace(layer, rows=how.rows(result)), result.shape, source=source))
        return len(self.chains) - 1, "layer"

    def _norm(self, call: FunctionCall, mark: ChainMark, chain: LayerChain) -> tuple[int | None, str]:
        running = self.names.get(id(call.args[1]))
        training = call.argument(5, "training", False)
        if running is None or training:
            return None, ""
        chain.layer = replace(chain.layer, norm=running.rpartition(".")[0])
        chain.stages.append("norm")
        return mark.layer, "norm"

    def _move(self, call: FunctionCall, mark: ChainMark, chain: LayerChain) -> tuple[int | None, str]:
        if mark.stage != chain.stages[-1] or mark.stage == "sum":
            return None, ""
        chain.index = call.function(with_strides_of(chain.places(), call.args[0]), *call.args[1:], **call.named)
        chain.layer = replace(chain.layer, moves=(*chain.layer.moves, call.number))
        chain.stages.append(f"move {call.number}")
        return mark.layer, chain.stages[-1]

    def _gain(
        self, call: FunctionCall, inputs: list[Tensor], marks: list[ChainMark | None], result: Tensor
    ) -> tuple[int | None, str]:
        """Note a parameter that multiplies each of a layer's outputs by one number."""
        ends = [i for i, mark in enumerate(marks) if mark is not None and mark.layer is not None]
        if len(inputs) != 2 or len(ends) != 1 or id(inputs[1 - ends[0]]) not in self.names:
            return None, ""
        mark = marks[ends[0]]
        assert mark is not None
        assert mark.layer is not None
        chain = self.chains[mark.layer]
        gain = chain.gain(inputs[1 - ends[0]], result.shape) if result.shape == chain.places().shape else None
        if gain is None or mark.stage != chain.stages[-1] or mark.stage == "sum":
            return None, ""
        before = chain.layer.gain
        chain.layer = replace(chain.layer, gain=gain if before is None else before * gain)
        chain.stages.append(f"gain {call.number}")
        return mark.layer, chain.stages[-1]

    def _sum(self, call: FunctionCall, marks: list[ChainMark | None]) -> tuple[int | None, str]:
        summands = [argument for argument in call.args if isinstance(argument, Tensor)]
        if len(summands) != 2 or summands[0].shape != summands[1].shape or len(marks) != 2 or call.named:
            return None, ""
        ends = [
            (mark.layer, i)
            for i, mark in enumerate(marks)
            if mark and mark.layer is not None and mark.stage == self.chains[mark.layer].stages[-1] != "sum"
        ]
        if not ends:
            return None, ""
        layer, position = max(ends)
        other = marks[1 - position]
        chain = self.chains[layer]
        if other is None:
            return None, ""
        chain.layer = replace(chain.layer, total=call.number, other=other.call)
        chain.stages.append("sum")
        return layer, "sum"


class LayerGraph(NamedTuple):
    """The layers that a forward pass calls, and the readers of its parameters."""

    layers: tuple[LayerCall, ...]  # every call of a convolution or a linear layer, in order
    readers: dict[str, list[str]]  # for each parameter and buffer the names of the functions that read it
    calls: tuple[str, ...]  # the names of all functions that were called
    # weights of layers whose input no other layer made: they read the model's input
    first: frozenset[str] = frozenset()
    # weights of layers whose output no other layer reads on the way to the model's output
    last: frozenset[str] = frozenset()

    @property
    def end(self) -> int:
        """Number of a call by which the targets of all layers are there: what follows, as a selection of boxes, is not.

        It may be beyond the last call.
        """
        return max((layer.ready for layer in self.layers), default=0) + 2


def find_layer_graph(
    model: nn.Module, inputs: Tensor | tuple[Any, ...], norms: Iterable[str] = (), *, stacks: bool = False
) -> LayerGraph:
    """Run a model in eval mode, and find its layers and the functions that read its parameters."""
    finder = LayerFinder(model, norms, stacks=stacks)
    with same_attributes(model), finder.intercepting():
        output = call(model, inputs if isinstance(inputs, tuple) else (inputs,))
    made = frozenset[int]().union(*(finder.origin(tensor).origins for tensor in gather(output)))
    calls = {name: len(readers) for name, readers in finder.readers.items()}
    pairs = [(chain, chain.finished(calls.get(chain.layer.weight, 1))) for chain in finder.chains]
    plain = [layer.rectified and layer.total is None and layer.calls == 1 for _, layer in pairs]
    alone = [of if plain[i] and chain.reads[RECTIFIED] == 1 else None for i, (chain, of) in enumerate(pairs)]
    sources = [None if chain.source is None or of.calls > 1 else alone[chain.source] for chain, of in pairs]
    layers = tuple(replace(layer, source=of) for (_, layer), of in zip(pairs, sources, strict=True))
    first = frozenset(chain.layer.weight for chain in finder.chains if chain.first)
    last = frozenset(finder.chains[i].layer.weight for i in made)
    return LayerGraph(layers, finder.readers, tuple(finder.calls), first, last)


def find_layers(
    model: nn.Module, inputs: Tensor | tuple[Any, ...], norms: Iterable[str] = (), *, stacks: bool = False
) -> tuple[LayerCall, ...]:
    """Return the convolutions and linear layers that a model calls, see `find_layer_graph`."""
    return find_layer_graph(model, inputs, norms, stacks=stacks).layers


def calls_by_weight(layers: Iterable[LayerCall]) -> dict[str, tuple[LayerCall, ...]]:
    """Return the calls of each weight, in order, each with the part of its chain that all of them have."""
    found: dict[str, list[LayerCall]] = {}
    for layer in layers:
        found.setdefault(layer.weight, []).append(layer)
    return {weight: _alike(calls) for weight, calls in found.items()}


def calls_by_use(layers: Iterable[LayerCall]) -> list[tuple[LayerCall, ...]]:
    """Return the calls of each weight in each of the ways in which it is used, as `calls_by_weight` does."""
    uses: dict[WeightUse, list[LayerCall]] = {}
    for layer in layers:
        uses.setdefault(layer.use, []).append(layer)
    return list(map(_alike, uses.values()))


def merge_calls(calls: Sequence[LayerCall]) -> LayerCall:
    """Return all calls of a weight as one layer: the first of them, with the rows of all."""
    selected, recurrent = any(call.selected for call in calls), any(call.recurrent for call in calls)
    return replace(calls[0], rows=sum(call.rows for call in calls), selected=selected, recurrent=recurrent)


def _alike(calls: list[LayerCall]) -> tuple[LayerCall, ...]:
    if len(calls) > 1 and (len({call.total is None for call in calls}) > 1 or not _same_gain(calls)):
        calls = [call if call.total is None else _unsummed(call) for call in calls]
    if len({call.norm for call in calls}) > 1:
        calls = [_unsummed(replace(call, norm=None)) for call in calls]
    rectified = all(call.rectified for call in calls)
    return tuple(replace(call, rectified=rectified) for call in calls)


def _same_gain(calls: list[LayerCall]) -> bool:
    gains = [call.gain for call in calls if call.gain is not None]
    return len(gains) in (0, len(calls)) and all(torch.equal(one, other) for one, other in pairwise(gains))


def _unsummed(layer: LayerCall, *, rectified: bool = False) -> LayerCall:
    """Return a layer without the sum behind it."""
    return replace(
        layer, end=_plain_end(layer), row_norm=None, total=None, other=None, moves=(), gain=None, rectified=rectified
    )


def _plain_end(layer: LayerCall) -> str:
    return "layer" if layer.norm is None else "norm"

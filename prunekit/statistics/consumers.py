"""Consumers: layers that read channels through a weight, found in the running model by the identity of the weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from prunekit.hooks.model_copy import named_tensors
from prunekit.statistics.layers.linear_layers import WEIGHT_FUNCTIONS, CallInterceptor, FunctionCall


@dataclass(frozen=True)
class Consumer:
    """A layer that multiplies its input channels with a weight.

    Attributes:
        weight: its name in the model.
        channels: of its input.
        groups: of channels, each of which is read for itself.
        input_axis: axis of the weight that belongs to the input; 0 if it is stored transposed.
    """

    weight: str
    channels: int
    groups: int = 1
    input_axis: int = 1

    @property
    def path(self) -> str:
        """The key of its statistics: the module's path where the weight is called `weight`, else the weight's name."""
        module, _, name = self.weight.rpartition(".")
        return module if name == "weight" else self.weight

    def columns(self, weight: Tensor) -> Tensor:
        """Return the entries of the weight for each channel, (channels, outputs x taps)."""
        if self.input_axis == 0:
            return weight.flatten(1)
        rows = weight.reshape(self.groups, -1, *weight.shape[1:])  # (groups, outputs of each, channels of each, *taps)
        return rows.movedim(2, 1).flatten(0, 1).flatten(1)


_MIXING = frozenset(
    {"__get__", "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "flip", "roll", "rot90",
     "sort", "bmm", "mv", "dot", "einsum", "outer", "kron", "tensordot", "index_select", "gather", "take_along_dim"}
)  # fmt: skip
"""Functions that move the entries of a weight, or sum over them."""

ConsumerCallback = Callable[[Consumer, Tensor, int], Tensor | None]
"""Gets a consumer, its input or output, and which axis of that holds the channels; returns a replacement or None."""


class ConsumerInterceptor(CallInterceptor):
    """Passes the inputs and outputs of each layer with a weight of the model to callbacks.

    A weight may be computed in the pass, as weight standardization does: a tensor that is made of the model's own
    tensors alone, entry by entry, and has the shape of exactly one of them stands for that one.

    Args:
        model: whose tensors are known by name.
        before: gets each input, before it may be overwritten; may replace it.
        after: gets each output; may replace it.
    """

    def __init__(self, model: nn.Module, before: ConsumerCallback, after: ConsumerCallback) -> None:
        super().__init__(model)
        self._before, self._after = before, after
        self._shapes = {name: tensor.shape for name, tensor in named_tensors(model)}
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}

    def forget(self) -> None:
        """Forget the weights that were computed in a pass."""
        self._made.clear()

    def call(self, call: FunctionCall) -> Any:
        """Pass the input and output of a layer to the callbacks, and make its call."""
        function = WEIGHT_FUNCTIONS.get(call.name)
        if function is None:
            result = call.run()
            self._follow(call, result)
            return result
        values, weight = (call.argument(place, name) for place, name in zip(function[:2], function.names, strict=True))
        name = self._name_of(weight) if isinstance(weight, Tensor) and weight.dim() == function.spatial + 2 else None
        if name is None:
            return call.run()
        groups = call.argument(6, "groups") or 1
        consumer = Consumer(name, values.size(function.axis(values)), int(groups), function.input_axis)
        replaced = self._before(consumer, values, function.axis(values))
        result = (call if replaced is None else call.with_argument(function.inputs, function.names[0], replaced)).run()
        changed = self._after(consumer, result, function.axis(result))
        return result if changed is None else changed

    def _sources(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of the model's tensors that a tensor is made of; none if it is also made of others."""
        name = self.names.get(id(tensor))
        if name is not None:
            return frozenset({name})
        made = self._made.get(id(tensor))
        return frozenset() if made is None else made[1]

    def _name_of(self, weight: Tensor) -> str | None:
        alike = [name for name in self._sources(weight) if self._shapes[name] == weight.shape]
        return alike[0] if len(alike) == 1 else None

    def _follow(self, call: FunctionCall, result: Any) -> None:
        found: frozenset[str] = frozenset()
        for value in (*call.args, *call.named.values()):
            if isinstance(value, Tensor):
                sources = self._sources(value)
                if not sources:
                    return
                found |= sources
        if found and isinstance(result, Tensor) and call.name not in _MIXING:
            self._made[id(result)] = result, found  # referenced, or its id might become another's

"""Layers that read channels through a weight.

They are found in the running model, at the level of torch's functions, by the identity of the weight: nothing is known
about classes of modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from prunekit.channels.cut.model_copy import named_tensors
from prunekit.statistics.layers.linear_layers import CallInterceptor, FunctionCall


@dataclass(frozen=True)
class Consumer:
    """A layer that multiplies its input channels with a weight.

    Attributes:
        weight: its name in the model.
        channels: of its input.
        groups: which read their share of the channels each and nothing else.
        input_axis: which axis of the weight belongs to the input; 0 where it is stored transposed.
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
        """Return what the layer does with each channel: its entries of the weight, (channels, outputs x taps)."""
        if self.input_axis == 0:
            return weight.flatten(1)
        rows = weight.reshape(self.groups, -1, *weight.shape[1:])  # (groups, outputs of each, channels of each, *taps)
        return rows.movedim(2, 1).flatten(0, 1).flatten(1)


class WeightFunction(NamedTuple):
    """A function that multiplies channels with a weight: positions and names of both, and how the weight lies."""

    values: int
    weight: int
    names: tuple[str, str]
    spatial: int
    input_axis: int

    @property
    def is_layer(self) -> bool:
        """Whether it takes a bias too, and a weight that is called one."""
        return self.names == _LAYER

    def axis(self, tensor: Tensor) -> int:
        """Return which axis of an input or output holds the channels."""
        return tensor.dim() - self.spatial - 1


_LAYER, _SUM, _PLAIN = ("input", "weight"), ("mat1", "mat2"), ("input", "other")
WEIGHT_FUNCTIONS = {
    "linear": WeightFunction(0, 1, _LAYER, 0, 1),
    **{f"conv{axes}d": WeightFunction(0, 1, _LAYER, axes, 1) for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": WeightFunction(0, 1, _LAYER, axes, 0) for axes in (1, 2, 3)},
    "addmm": WeightFunction(1, 2, _SUM, 0, 0),
    **{name: WeightFunction(0, 1, _PLAIN, 0, 0) for name in ("mm", "matmul", "__matmul__")},
}
"""The functions, by name."""

_MIXING = frozenset(
    {"__get__", "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "flip", "roll", "rot90",
     "sort", "bmm", "mv", "dot", "einsum", "outer", "kron", "tensordot", "index_select", "gather", "take_along_dim"}
)  # fmt: skip
"""What takes the entries of a weight elsewhere, or sums over them."""

ConsumerCallback = Callable[[Consumer, Tensor, int], Tensor | None]
"""Gets a consumer, a tensor that it reads or makes, and which axis of that holds the channels; returns the one to use
in its place, or None."""


class ConsumerInterceptor(CallInterceptor):
    """Shows what each layer with a weight of the model reads and makes.

    A weight may be computed in the pass, as weight standardization does: what is made of the model's own tensors alone,
    entry by entry, and has the shape of just one of them stands for that.

    Args:
        model: whose tensors are known by name.
        before, after: get what is read, before it may be overwritten, and what is made; may put others in their place.
    """

    def __init__(self, model: nn.Module, before: ConsumerCallback, after: ConsumerCallback) -> None:
        super().__init__(model)
        self._before, self._after = before, after
        self._shapes = {name: tensor.shape for name, tensor in named_tensors(model)}
        self._made: dict[int, tuple[Tensor, frozenset[str]]] = {}

    def forget(self) -> None:
        """Let go of the weights that were computed in a pass."""
        self._made.clear()

    def call(self, call: FunctionCall) -> Any:
        """Look at what a layer reads and make."""
        product = WEIGHT_FUNCTIONS.get(call.name)
        if product is None:
            result = call.run()
            self._follow(call, result)
            return result
        values, weight = (call.argument(place, name) for place, name in zip(product[:2], product.names, strict=True))
        name = self._name_of(weight) if isinstance(weight, Tensor) and weight.dim() == product.spatial + 2 else None
        if name is None:
            return call.run()
        groups = call.argument(6, "groups") or 1
        consumer = Consumer(name, values.size(product.axis(values)), int(groups), product.input_axis)
        replaced = self._before(consumer, values, product.axis(values))
        result = (call if replaced is None else call.with_argument(product.values, product.names[0], replaced)).run()
        changed = self._after(consumer, result, product.axis(result))
        return result if changed is None else changed

    def _sources(self, tensor: Tensor) -> frozenset[str]:
        """Return which of the model's tensors one is or is made of; none if also of others."""
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
            self._made[id(result)] = result, found  # held, or its id might be another's

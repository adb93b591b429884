"""The linear layers of a running model: seen at the level of torch's functions, by the identity of their parameters.

So a layer is found however its module calls it; nothing is known about classes of modules or names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prunekit.channels.cut.model_copy import named_tensors
from prunekit.channels.tracing.storages import is_plain
from prunekit.hooks.owner import HookOwner, after_forward, before_forward
from prunekit.statistics.layers.patches import CONVOLUTIONS, PatchGeometry

_LOOKS = frozenset({"__get__", "dim", "size", "stride", "is_contiguous", "is_floating_point", "_set_grad_enabled"})
"""Functions that compute nothing: asking for a shape is no reading of a value."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a convolution or a linear layer with parameters of the model.

    Attributes:
        weight, bias: names of its parameters.
        call: its number among all calls of torch's functions in one forward pass.
        geometry: of the patches of its input that it reads.
        norm: path of the BatchNorm in eval mode that alone reads its output.
        end: which call makes the end of the chain whose values are compared, before a ReLU: "layer", "norm" or "sum".
        total: number of the call that adds `other` to its output, or to the norm's.
        other: number of the call that made the other summand.
        rectified: whether a ReLU alone reads the end of that chain.
        calls: how often the weight is used in a forward pass.
        selected: whether what it reads was selected by computed values, as boxes by their scores: under masks its
            positions are others.
        recurrent: whether what it reads is made with an earlier call of its own weight.
        transposed: whether the weight lies as (inputs, outputs).
        moves: numbers of the calls between the output, or the norm, and `total` that only move its values: views,
            permutations, slices.
        gain: (outputs,) what a parameter multiplies it by before `total`.
        rows: of its output, see `PatchGeometry`, in the forward pass that found it.
        source: the layer whose rectified end is all that this one reads, and which nothing else reads.
    """

    weight: str
    bias: str | None
    call: int
    geometry: PatchGeometry
    end: str = "layer"
    norm: str | None = None
    total: int | None = None
    other: int | None = None
    rectified: bool = False
    calls: int = 1
    selected: bool = False
    recurrent: bool = False
    transposed: bool = False
    moves: tuple[int, ...] = ()
    gain: Tensor | None = field(default=None, compare=False)
    rows: int = 0
    source: LayerCall | None = None

    @property
    def axes(self) -> tuple[int, int]:
        """Axes of the weight that belong to outputs and to inputs."""
        return (1, 0) if self.transposed else (0, 1)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a view of the weight, outputs first and inputs second."""
        return weight.T if self.transposed else weight

    @property
    def deferred(self) -> bool:
        """Whether the other summand is known only after this layer ran: it is made later, or lies in another order."""
        return self.other is not None and (self.other > self.call or bool(self.moves))

    @property
    def ready(self) -> int:
        """Number of the call before which all is there that this layer is fitted to."""
        return self.total if self.deferred and self.total is not None else self.call


class FunctionCall(NamedTuple):
    """A call of one of torch's functions; `compute` makes it."""

    number: int
    name: str
    function: Any
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    compute: Callable[..., Any]

    def run(self) -> Any:
        """Call the function."""
        return self.compute(self.name, self.function, *self.args, **self.named)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its place or by its name."""
        return self.args[place] if len(self.args) > place else self.named.get(name, default)

    def with_argument(self, place: int, name: str, value: Any) -> FunctionCall:
        """Return the same call with another argument."""
        if len(self.args) > place:
            return self._replace(args=(*self.args[:place], value, *self.args[place + 1 :]))
        return self._replace(named={**self.named, name: value})


class Operands(NamedTuple):
    """What a linear layer is called with; the names are those of the model's parameters.

    `transposed`: whether the weight, as the model has it, lies as (inputs, outputs).
    """

    inputs: Tensor
    matrix: Tensor
    weight: str
    bias: str | None
    transposed: bool


_PLACES = dict.fromkeys(("linear", *CONVOLUTIONS), (0, 1, 2, False)) | {
    "addmm": (1, 2, 0, True),
    "matmul": (0, 1, None, True),
    "__matmul__": (0, 1, None, True),
    "mm": (0, 1, None, True),
}
"""Among a function's arguments: its input, its weight, its bias; and whether the weight lies as (inputs, outputs)."""


class CallInterceptor(TorchFunctionMode):
    """Numbers the calls of torch's functions in forward passes; those inside `norms` count as one each.

    Masked runs compute norms over several channels twice, so calls inside of these say nothing.

    Args:
        model: whose parameters are known by name.
        norms: paths of modules whose insides are not looked at.
    """

    def __init__(self, model: nn.Module, norms: Iterable[str] = ()) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in named_tensors(model)}
        self.number = self._inside = 0
        self._norms = _Insides(self, [model.get_submodule(path) for path in norms])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One forward pass, without gradients, is watched; compiled code runs as it is written."""
        self.number = self._inside = 0
        with torch.no_grad(), self._norms, torch.compiler.set_stance("force_eager"), self:
            yield

    def call(self, call: FunctionCall) -> Any:
        """Return what happens at a call; returns its result."""
        return call.run()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.transformed()
            return function(*args, **named)
        name = getattr(function, "__name__", "")
        if name in _LOOKS:
            looked = self.look(name, function, *args, **named)
            if not isinstance(looked, Tensor):
                return looked
            function = partial(_given, looked)  # a property such as `mT` hands out a tensor
        if self._inside:
            return self.compute(name, function, *args, **named)
        self.number += 1
        return self.call(FunctionCall(self.number, name, function, args, named, self.compute))

    def transformed(self) -> None:
        """What happens at a call within a transform of functions, such as vmap, where tensors aren't what they seem."""

    def look(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call one that computes nothing."""
        return function(*args, **named)

    def compute(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call one of torch's functions, those inside `norms` too."""
        return function(*args, **named)

    def enter(self) -> None:
        """A module begins whose calls do not count."""
        self._inside += 1

    def leave(self, given: tuple[Any, ...], result: Any) -> None:
        """It ends: all that it did is one call, with what the module was given."""
        self._inside -= 1
        if not self._inside:
            self.number += 1
            with torch._C.DisableTorchFunction():  # as within any other call
                self.call(FunctionCall(self.number, "", None, given, {}, lambda *_: result))

    def operands(self, call: FunctionCall) -> Operands | None:
        """Return what a linear layer is called with; None if it is none, or one whose weight or bias is no
        parameter.
        """
        place = _PLACES.get(call.name)
        if place is None or len(call.args) <= place[1]:
            return None
        inputs, matrix = call.args[place[0]], call.args[place[1]]
        turned = self.turned(matrix)
        matrix = matrix if turned is None else matrix._base
        weight = self.names.get(id(matrix))
        bias = None if place[2] is None else (*call.args, None, None)[place[2]]
        bias = call.named.get("bias") if bias is None else bias
        name = None if bias is None else self.names.get(id(bias))
        usual = is_plain(inputs) and (not place[3] or (not call.named and matrix.dim() == 2 and inputs.dim() >= 2))
        if weight is None or (bias is not None and name is None) or not usual:
            return None
        return Operands(inputs, matrix, weight, name, place[3] != (turned is not None))

    def turned(self, value: Any) -> str | None:
        """Of which matrix of the model's a tensor is the transpose, as `w.t()` is in `x @ w.t()`."""
        base = value._base if isinstance(value, Tensor) and value.dim() == 2 else None
        if base is None or base.dim() != 2 or (value.shape, value.stride()) != (base.shape[::-1], base.stride()[::-1]):
            return None
        return self.names.get(id(base))


def _given(result: Tensor, *_: Any, **__: Any) -> Tensor:
    return result


class _Insides(HookOwner):
    def __init__(self, watch: CallInterceptor, modules: list[nn.Module]) -> None:
        super().__init__()
        self._watch, self._modules = watch, modules

    def register(self) -> None:
        for module in self._modules:
            self.own(before_forward(module, lambda *_: self._watch.enter()))
            self.own(after_forward(module, lambda _, given, result: self._watch.leave(given, result)))

"""Calls of linear layers in a running model, intercepted at the level of torch's functions.

A layer is recognized by the identity of its parameters, however its module calls it; classes and names of modules do
not matter. A weight may also be a stack of matrices, one parameter (matrices, ..., ...), as experts have it: each row
that a call reads is multiplied with one of them. Which one follows from where a view lies in its stack, from the
numbers by which matrices were picked, or from the offsets of a grouped product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prunekit.channels.tracing.storages import is_plain
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.owner import HookOwner, after_forward, before_forward
from prunekit.statistics.patches import CONVOLUTIONS, PatchGeometry
from prunekit.statistics.row_norms import RowNorm
from prunekit.utils.private_torch import in_function_transform, without_torch_function

_LOOKS = frozenset({"__get__", "dim", "size", "stride", "is_contiguous", "is_floating_point", "_set_grad_enabled"})
"""Functions that compute nothing: asking for a shape does not read values."""


class WeightUse(NamedTuple):
    """A way in which a model uses a weight: a tied decoder uses that of its encoder the other way round."""

    weight: str  # its name
    transposed: bool  # whether it is stored as (inputs, outputs)
    blocks: int  # number of parts that read rows of their own, see `LayerCall.blocks`


@dataclass(frozen=True)
class LayerCall:
    """One call of a convolution or a linear layer with parameters of the model."""

    # weight, bias: names of its parameters
    weight: str
    bias: str | None
    call: int  # its number among all calls of torch's functions in one forward pass
    geometry: PatchGeometry  # of the patches of its input that it reads
    # which call makes the end of the chain whose values are compared, before a ReLU: "layer", "norm" or "sum"
    end: str = "layer"
    norm: str | None = None  # path of the BatchNorm in eval mode that is the only reader of its output
    total: int | None = None  # number of the call that adds `other` to its output, or to the norm's
    other: int | None = None  # number of the call that made the other summand
    rectified: bool = False  # whether a ReLU is the only reader of the end of that chain
    calls: int = 1  # how often the weight is used in a forward pass
    # whether its input was selected by computed values, as boxes by their scores: under masks it has other positions
    selected: bool = False
    recurrent: bool = False  # whether its input was made with an earlier call of its own weight
    transposed: bool = False  # whether the weight is stored as (inputs, outputs)
    # numbers of the calls between the output, or the norm, and `total` that only move its values: views, permutations,
    # slices
    moves: tuple[int, ...] = ()
    # (outputs,) factors by which a parameter multiplies it before `total`
    gain: Tensor | None = field(default=None, compare=False)
    rows: int = 0  # of its output, see `PatchGeometry`, in the forward pass that found it
    # the layer whose rectified end is the only input of this one, and is read by nothing else
    source: LayerCall | None = None
    # the norm over the channels of each position that reads the end of the chain; None if none does
    row_norm: RowNorm | None = field(default=None, compare=False)
    read: int | None = None  # number of the call that made its input; None if no call did
    # number of matrices in a weight that is a stack of them, one of which each row is multiplied with; else 0
    stack: int = 0

    @property
    def use(self) -> WeightUse:
        """The weight, and how it is used: calls of one use read as many channels, and sum their moments."""
        return WeightUse(self.weight, self.transposed, self.blocks)

    @property
    def axes(self) -> tuple[int, int]:
        """Axes of the weight that belong to outputs and to inputs."""
        first = 1 if self.stack else 0
        return (first + 1, first) if self.transposed else (first, first + 1)

    @property
    def blocks(self) -> int:
        """Number of parts of the weight that read rows of their own: groups of a convolution, matrices of a stack."""
        return self.stack or self.geometry.groups

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as (outputs, inputs, ...): a view, but for a stack, whose matrices follow each other.

        So a stack is like the weight of a convolution in groups, one of the matrices for each group.
        """
        found = weight.transpose(*self.axes) if self.transposed else weight
        return found.flatten(0, 1) if self.stack else found

    def stored(self, matrix: Tensor) -> Tensor:
        """Return what `matrix` returned, or a tensor of that shape, in the layout that the model has it in."""
        found = matrix.reshape(self.stack, -1, matrix.shape[1]) if self.stack else matrix
        return found.transpose(*self.axes) if self.transposed else found

    def width(self, weight: Tensor) -> int:
        """Return how many input channels the weight has, in each group of a convolution."""
        return weight.shape[self.axes[1]]

    @property
    def deferred(self) -> bool:
        """True if the other summand is known only after this layer ran: it is made later, or has another order."""
        return self.other is not None and (self.other > self.call or bool(self.moves))

    @property
    def ready(self) -> int:
        """Number of the call before which everything that this layer is fitted to is known."""
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


class WeightFunction(NamedTuple):
    """A torch function that multiplies channels with a weight: where its arguments are, how the weight is stored."""

    # inputs, weight, bias: positions of these arguments; `bias` is None if it takes none
    inputs: int
    weight: int
    bias: int | None
    names: tuple[str, str]  # of the first two
    spatial: int  # number of spatial axes
    input_axis: int  # of the weight; 0: it is stored as (inputs, outputs)

    @property
    def is_layer(self) -> bool:
        """True if it is the function of a module, with a weight that is called `weight`."""
        return self.names == _LAYER

    def axis(self, tensor: Tensor) -> int:
        """Return which axis of an input or output holds the channels."""
        return tensor.dim() - self.spatial - 1


_LAYER = ("input", "weight")
WEIGHT_FUNCTIONS = {
    "linear": WeightFunction(0, 1, 2, _LAYER, 0, 1),
    **{name: WeightFunction(0, 1, 2, _LAYER, axes, 1) for name, axes in CONVOLUTIONS.items()},
    **{f"conv_transpose{axes}d": WeightFunction(0, 1, 2, _LAYER, axes, 0) for axes in (1, 2, 3)},
    "addmm": WeightFunction(1, 2, 0, ("mat1", "mat2"), 0, 0),
    **{name: WeightFunction(0, 1, None, ("input", "other"), 0, 0) for name in ("mm", "matmul", "__matmul__")},
}
"""The functions, by name."""


class Operands(NamedTuple):
    """The arguments of a call of a linear layer, parameters by their names in the model."""

    inputs: Tensor  # what it reads
    matrix: Tensor  # the weight, as the model has it
    # weight, bias: names of parameters
    weight: str
    bias: str | None
    transposed: bool  # whether the weight, as the model has it, is stored as (inputs, outputs)
    # the number of the matrix that each row is multiplied with, -1 for none, in the shape of the rows' positions; None
    # if the weight is no stack of matrices
    numbers: Tensor | None = None
    geometry: PatchGeometry = PatchGeometry()  # of what rows of a stack read


class _Stopped(BaseException):
    """Ends a forward pass; no `except Exception` of a model catches it."""


class CallInterceptor(TorchFunctionMode):
    """Intercepts and numbers the calls of torch's functions in forward passes.

    All that a module of `norms` calls counts as one call: masked runs compute norms over several channels twice.
    """

    def __init__(self, model: nn.Module, norms: Iterable[str] = ()) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in named_tensors(model)}
        self.number = self._inside = 0
        self.stopped = False
        modules = [model.get_submodule(path) for path in norms]
        self._norms = HookOwner(partial(self._hook_norms, modules))

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Intercept one forward pass, without gradients, until `stop`; compiled code runs as it is written."""
        self.number = self._inside = 0
        self.stopped = False
        with torch.no_grad(), self._norms, torch.compiler.set_stance("force_eager"), self:
            try:
                yield
            except (_Stopped, Exception):  # a callback from C++ may turn it into another exception
                if not self.stopped:
                    raise

    def stop(self) -> NoReturn:
        """End the pass; what the `with` of `intercepting` has yet to do is left out."""
        self.stopped = True
        raise _Stopped

    def during(self, inputs: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Intercept one forward pass over these inputs."""
        return self.intercepting()

    def call(self, call: FunctionCall) -> Any:
        """Make a call and return its result; subclasses override this."""
        return call.run()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if in_function_transform():
            self.on_transform()
            return function(*args, **named)
        name = getattr(function, "__name__", "")
        if name in _LOOKS:
            answer = self.query(name, function, *args, **named)
            if not isinstance(answer, Tensor):
                return answer
            function = partial(lambda result, *_, **__: result, answer)  # a property such as `mT` hands out a tensor
        if self._inside:
            return self.compute(name, function, *args, **named)
        self.number += 1
        return self.call(FunctionCall(self.number, name, function, args, named, self.compute))

    def on_transform(self) -> None:
        """Take note of a call within a transform of functions, such as vmap, whose tensors are wrapped."""

    def query(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call a function that computes nothing, such as that of a shape."""
        return function(*args, **named)

    def compute(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call any other of torch's functions, also inside `norms`."""
        return function(*args, **named)

    def _hook_norms(self, norms: Iterable[nn.Module], hooks: HookOwner) -> None:
        for norm in norms:
            hooks.own(before_forward(norm, lambda *_: self.enter_norm()))
            hooks.own(after_forward(norm, lambda _, given, result: self.leave_norm(given, result)))

    def enter_norm(self) -> None:
        """Count no calls from here on."""
        self._inside += 1

    def leave_norm(self, given: tuple[Any, ...], result: Any) -> None:
        """Count calls again, and all that the norm did as one call with the norm's arguments."""
        self._inside -= 1
        if not self._inside:
            self.number += 1
            with without_torch_function():  # as within any other call
                self.call(FunctionCall(self.number, "", None, given, {}, lambda *_: result))

    def operands(self, call: FunctionCall) -> Operands | None:
        """Return the arguments of a linear layer or convolution; None of other calls, or without a parameter's name."""
        function = WEIGHT_FUNCTIONS.get(call.name)
        if function is None or call.name.startswith("conv_transpose") or len(call.args) <= function.weight:
            return None
        inputs, matrix = call.args[function.inputs], call.args[function.weight]
        transposed = self.transposed_name(matrix) is not None
        matrix = matrix._base if transposed else matrix
        weight = self.names.get(id(matrix))
        bias = None if function.bias is None else (*call.args, None, None)[function.bias]
        bias = call.named.get("bias") if bias is None else bias
        name = None if bias is None else self.names.get(id(bias))
        usual = is_plain(inputs) and (function.is_layer or (not call.named and matrix.dim() == 2 and inputs.dim() >= 2))
        if weight is None or (bias is not None and name is None) or not usual:
            return None
        return Operands(inputs, matrix, weight, name, function.is_layer == transposed)

    def transposed_name(self, value: Any) -> str | None:
        """Return the name of the matrix that a tensor is the transpose of, as `w.t()` in `x @ w.t()`; None if none."""
        base = value._base if isinstance(value, Tensor) and value.dim() == 2 else None
        if base is None or base.dim() != 2 or (value.shape, value.stride()) != (base.shape[::-1], base.stride()[::-1]):
            return None
        return self.names.get(id(base))


_GROUPED = frozenset({"_grouped_mm", "grouped_mm", "grouped_mm_fallback"})
"""Products of rows, ordered by their matrices, with a stack: its arguments are rows, stack and `offs`."""
_BATCHED = {
    "linear": (0, 1),
    **{name: (found.inputs, found.weight) for name, found in WEIGHT_FUNCTIONS.items() if not found.is_layer},
    "bmm": (0, 1),
    "baddbmm": (1, 2),
}
"""Positions of the two factors of other products."""
_PICKING = {"__getitem__": "", "index_select": "index"}
"""Functions that copy matrices of a stack, by their numbers, and the name of these."""
_COPYING = frozenset({"clone", "contiguous", "to", "type_as", "float", "double", "half", "bfloat16"})
"""Functions that copy a tensor as it is."""
COLUMNS = PatchGeometry((1,), (1,), (0,), (1,))
"""How the right factor of a product is read: as a convolution of size 1 reads (samples, channels, positions)."""


class StackPart(NamedTuple):
    """The matrices of a stack that a tensor holds."""

    name: str  # of the parameter
    stack: Tensor  # the parameter
    numbers: Tensor  # the matrices' places in the stack, in the shape of the tensor's axes before its last two
    swapped: bool = False  # whether the two axes of each matrix are exchanged


class StackParts:
    """Knows which tensors of a forward pass are matrices of a stack."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names, self._owner = names, object()

    def clear(self) -> None:
        """Forget the tensors of an earlier pass."""
        self._owner = object()

    def part(self, value: Any) -> StackPart | None:
        """Return which matrices a tensor holds; None if it holds none."""
        if not isinstance(value, Tensor) or value.dim() < 2:
            return None
        base = value._base
        return self._known(value) or (None if base is None else _viewed(value, base, self._known(base)))

    def follow(self, call: FunctionCall, result: Any) -> None:
        """Note that a result is a copy of matrices."""
        if not (call.name in _PICKING or call.name in _COPYING) or not call.args or not isinstance(result, Tensor):
            return
        given = self.part(call.args[0])
        if given is None or result is call.args[0]:
            return
        numbers: Tensor | None = given.numbers
        if call.name in _PICKING:
            index = call.argument(2 if call.name == "index_select" else 1, _PICKING[call.name])
            first = call.name == "__getitem__" or call.argument(1, "dim") == 0
            picked = first and given.numbers.dim() > 0 and isinstance(index, (Tensor, list))
            numbers = given.numbers[index.cpu() if isinstance(index, Tensor) else index] if picked else None
        if numbers is not None and result.shape == (*numbers.shape, *call.args[0].shape[-2:]):
            found = given._replace(numbers=numbers)
            result._prunekit_part = (self._owner, result._version, found)  # type: ignore[attr-defined]

    def _known(self, value: Tensor) -> StackPart | None:
        """Return the matrices of a whole stack, or of a copy that was followed."""
        name = self._names.get(id(value)) if value.dim() == 3 else None
        if name is not None:
            return StackPart(name, value, torch.arange(len(value)))
        owner, version, found = getattr(value, "_prunekit_part", (None, None, None))
        return found if (owner, version) == (self._owner, value._version) else None

    def operands(self, call: FunctionCall) -> Operands | None:
        """Return the arguments of a call that multiplies rows with matrices of a stack; None of other calls."""
        name = call.name.rpartition(".")[2]
        inputs, weights = (call.args[at] if len(call.args) > at else None for at in _BATCHED.get(name, (0, 1)))
        if not (name in _BATCHED or name in _GROUPED) or not isinstance(inputs, Tensor) or not is_plain(inputs):
            return None
        part = self.part(weights)
        if part is not None and inputs.dim() > 1:
            offsets = call.argument(2, "offs") if name in _GROUPED else None
            numbers = _row_numbers(part.numbers, inputs, offsets)
            transposed = part.swapped if name == "linear" else not part.swapped
            return None if numbers is None else Operands(inputs, part.stack, part.name, None, transposed, numbers)
        part = None if name == "linear" or name in _GROUPED else self.part(inputs)
        if part is not None and inputs.dim() == 3 and isinstance(weights, Tensor) and weights.dim() == 3:
            numbers = part.numbers.expand(max(len(inputs), len(weights)))[:, None].expand(-1, weights.shape[2])
            return Operands(weights, part.stack, part.name, None, part.swapped, numbers, COLUMNS)
        return None


def _viewed(value: Tensor, base: Tensor, known: StackPart | None) -> StackPart | None:
    """Return the matrices that a view of known ones holds; None if it does not hold whole matrices."""
    if known is None or not base.is_contiguous() or not value.numel():
        return None
    rows, columns = base.shape[-2:]
    swapped = _lies(value, (columns, rows), (1, columns))
    if not swapped and not _lies(value, (rows, columns), (columns, 1)):
        return None
    size = rows * columns
    places = torch.tensor(value.storage_offset() - base.storage_offset())
    for length, step in zip(value.shape[:-2], value.stride()[:-2], strict=True):
        places = places[..., None] + torch.arange(length) * step
    if bool((places % size).any()):
        return None
    return known._replace(numbers=known.numbers.flatten()[places // size], swapped=known.swapped != swapped)


def _lies(value: Tensor, shape: tuple[int, int], steps: tuple[int, int]) -> bool:
    """Return whether the last two axes of a view have a shape and strides; those of an axis of length 1 are any."""
    found = zip(value.stride()[-2:], shape, steps, strict=True)
    return tuple(value.shape[-2:]) == shape and all(step == wanted for step, length, wanted in found if length > 1)


def _row_numbers(numbers: Tensor, inputs: Tensor, offsets: Any) -> Tensor | None:
    """Return the number of the matrix that each row of an output is made with, -1 for rows that none makes."""
    if offsets is None and not numbers.dim():
        return numbers.expand(inputs.shape[:-1])
    if offsets is None:
        leading = torch.broadcast_shapes(numbers.shape, inputs.shape[:-2])  # type: ignore[no-untyped-call]
        return numbers[..., None].expand(*leading, inputs.shape[-2])
    if inputs.dim() != 2 or numbers.dim() != 1 or len(offsets) != len(numbers):
        return None
    # in a product of (rows, channels) with a stack, where the rows of each matrix end
    rows, ends = torch.arange(len(inputs)), offsets.cpu().to(torch.int64)
    of = torch.searchsorted(ends, rows, right=True)
    return torch.where(of < len(ends), numbers[of.clamp(max=len(ends) - 1)], -1)

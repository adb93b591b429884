"""The linear layers of a running model: seen at the level of torch's functions, by the identity of their parameters.

So a layer is found however its module calls it; nothing is known about classes of modules or names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prunekit.calibration.patches import CONVOLUTIONS, Reading
from prunekit.channels.copying import named_tensors
from prunekit.hooks import HookOwner

_LOOKS = frozenset({"__get__", "dim", "size", "stride", "is_floating_point", "_set_grad_enabled"})
"""Functions that compute nothing: asking for a shape is no reading of a value."""


@dataclass(frozen=True)
class Layer:
    """One call of a convolution or a linear layer with parameters of the model.

    Attributes:
        weight, bias: names of its parameters.
        call: its number among all calls of torch's functions in one forward pass.
        reading: how it reads its input.
        norm: path of the BatchNorm in eval mode that alone reads its output.
        end: number of the call that makes the end of that chain, before a ReLU.
        total: number of the call that adds `other` to its output, or to the norm's.
        other: number of the call that made the other summand.
        rectified: whether a ReLU alone reads the end of that chain.
        calls: how often the weight is used in a forward pass.
    """

    weight: str
    bias: str | None
    call: int
    reading: Reading
    end: int
    norm: str | None = None
    total: int | None = None
    other: int | None = None
    rectified: bool = False
    calls: int = 1

    @property
    def deferred(self) -> bool:
        """Whether the other summand is made only after this layer ran."""
        return self.other is not None and self.other > self.call

    @property
    def ready(self) -> int:
        """Number of the call before which all is there that this layer is fitted to."""
        return self.total if self.deferred and self.total is not None else self.call


class Call(NamedTuple):
    """A call of one of torch's functions."""

    number: int
    name: str
    function: Any
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def run(self) -> Any:
        """Calls the function."""
        return self.function(*self.args, **self.named)


class CallWatch(TorchFunctionMode):
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
        """One forward pass, without gradients, is watched."""
        self.number = self._inside = 0
        with torch.no_grad(), self._norms, self:
            yield

    def call(self, call: Call) -> Any:
        """What happens at a call; returns its result."""
        return call.run()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _LOOKS:
            looked = self.look(name, function, *args, **named)
            if not isinstance(looked, Tensor):
                return looked
            function = partial(_given, looked)  # a property such as `mT` hands out a tensor
        run = partial(self.compute, name, function)
        if self._inside:
            return run(*args, **named)
        self.number += 1
        return self.call(Call(self.number, name, run, args, named))

    def look(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Calls one that computes nothing."""
        return function(*args, **named)

    def compute(self, name: str, function: Any, /, *args: Any, **named: Any) -> Any:
        """Calls one of torch's functions, those inside `norms` too."""
        return function(*args, **named)

    def enter(self) -> None:
        """A module begins whose calls do not count."""
        self._inside += 1

    def leave(self, result: Any) -> None:
        """It ends: all that it did is one call."""
        self._inside -= 1
        if not self._inside:
            self.number += 1
            with torch._C.DisableTorchFunction():  # as within any other call
                self.call(Call(self.number, "", lambda: result, (), {}))

    def layer_weight(self, call: Call) -> str | None:
        """Name of the weight if the call is a linear layer with a parameter of the model."""
        known = call.name == "linear" or call.name in CONVOLUTIONS
        return self.names.get(id(call.args[1])) if known and len(call.args) > 1 else None


def _given(result: Tensor, *_: Any, **__: Any) -> Tensor:
    return result


class _Insides(HookOwner):
    def __init__(self, watch: CallWatch, modules: list[nn.Module]) -> None:
        super().__init__()
        self._watch, self._modules = watch, modules

    def register(self) -> None:
        for module in self._modules:
            self.own(module.register_forward_pre_hook(lambda *_: self._watch.enter()))
            self.own(module.register_forward_hook(lambda _, __, result: self._watch.leave(result)))

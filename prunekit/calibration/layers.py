"""The linear layers of a running model, and what becomes of their outputs: a norm, a sum with a shortcut, a rectifier.

Seen at the level of torch's functions and by the identity of parameters, so a layer is found however its module calls
it; nothing is known about classes of modules or names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prunekit.calibration.patches import CONVOLUTIONS, Reading, reading
from prunekit.channels.copying import named_tensors
from prunekit.hooks import HookOwner
from prunekit.nested import gather

_LOOKS = frozenset({"__get__", "dim", "size", "stride", "is_floating_point", "_set_grad_enabled"})
"""Functions that compute nothing: asking for a shape is no reading of a value."""
_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


@dataclass(frozen=True)
class Layer:
    """One call of a convolution or a linear layer with parameters of the model.

    Attributes:
        weight, bias: names of its parameters.
        call: its number among all calls of torch's functions in one forward pass.
        reading: how it reads its input.
        norm: path of the BatchNorm in eval mode that alone reads its output.
        total: number of the call that adds `other` to its output, or to the norm's.
        other: number of the call that made the other summand.
        rectified: whether a ReLU alone reads the end of that chain.
        calls: how often the weight is used in a forward pass.
    """

    weight: str
    bias: str | None
    call: int
    reading: Reading
    norm: str | None = None
    total: int | None = None
    other: int | None = None
    rectified: bool = False
    calls: int = 1

    @property
    def deferred(self) -> bool:
        """Whether the other summand is made only after this layer ran."""
        return self.other is not None and self.other > self.call


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
        if self._inside or name in _LOOKS:
            return function(*args, **named)
        self.number += 1
        return self.call(Call(self.number, name, function, args, named))

    def enter(self) -> None:
        """A module begins whose calls do not count."""
        self._inside += 1

    def leave(self, result: Any) -> None:
        """It ends: all that it did is one call."""
        self._inside -= 1
        if not self._inside:
            self.number += 1
            self.call(Call(self.number, "", lambda: result, (), {}))

    def layer_weight(self, call: Call) -> str | None:
        """Name of the weight if the call is a linear layer with a parameter of the model."""
        known = call.name == "linear" or call.name in CONVOLUTIONS
        return self.names.get(id(call.args[1])) if known and len(call.args) > 1 else None


class _Insides(HookOwner):
    def __init__(self, watch: CallWatch, modules: list[nn.Module]) -> None:
        super().__init__()
        self._watch, self._modules = watch, modules

    def register(self) -> None:
        for module in self._modules:
            self.own(module.register_forward_pre_hook(lambda *_: self._watch.enter()))
            self.own(module.register_forward_hook(lambda _, __, result: self._watch.leave(result)))


class _Mark(NamedTuple):
    """On a tensor: which call made its values, and the end of which layer's chain they are."""

    call: int
    version: int
    layer: int | None
    stage: str


@dataclass
class _Draft:
    layer: Layer
    stages: list[str] = field(default_factory=lambda: ["layer"])
    reads: Counter[str] = field(default_factory=Counter)
    rectified: str = ""

    def finished(self, calls: int) -> Layer:
        """The layer, with as much of the chain behind it as nothing else reads from."""
        layer = replace(self.layer, calls=calls, rectified=self._alone(self.rectified) and self._ends(self.rectified))
        if not self._alone("layer"):
            return replace(layer, norm=None, total=None, other=None, rectified=False)
        if "norm" in self.stages and not self._alone("norm"):
            return replace(layer, total=None, other=None, rectified=False)
        return layer

    def _alone(self, stage: str) -> bool:
        return self.reads[stage] == 1

    def _ends(self, stage: str) -> bool:
        return stage == self.stages[-1]


class _Finder(CallWatch):
    """Finds the layers of a forward pass."""

    def __init__(self, model: nn.Module, norms: Iterable[str]) -> None:
        super().__init__(model, norms)
        self.drafts: list[_Draft] = []

    def call(self, call: Call) -> Any:
        inputs = gather((call.args, dict(call.named)))
        marks = [_mark(tensor) for tensor in inputs]
        result = call.run()
        if any(result is tensor and _mark(tensor) is not None for tensor in inputs):
            return result  # dropout in eval mode hands on what it was given
        for mark in marks:
            if mark is not None and mark.layer is not None:
                self.drafts[mark.layer].reads[mark.stage] += 1
        if isinstance(result, Tensor):
            layer, stage = self._role(call, marks)
            result._prunekit_mark = _Mark(call.number, result._version, layer, stage)  # type: ignore[attr-defined]
        return result

    def _role(self, call: Call, marks: list[_Mark | None]) -> tuple[int | None, str]:
        weight = self.layer_weight(call)
        if weight is not None:
            return self._layer(call, weight)
        mark = marks[0] if marks else None
        draft = self.drafts[mark.layer] if mark is not None and mark.layer is not None else None
        if call.name == "batch_norm" and mark is not None and draft is not None and mark.stage == "layer":
            return self._norm(call, mark, draft)
        if call.name in _SUMS:
            return self._sum(call, marks)
        if call.name in {"relu", "relu_"} and mark is not None and draft is not None:
            draft.rectified = mark.stage
        return None, ""

    def _layer(self, call: Call, weight: str) -> tuple[int | None, str]:
        how = reading(call.name, call.args, call.named)
        if how is None:
            return None, ""
        bias = call.args[2] if len(call.args) > 2 else call.named.get("bias")
        self.drafts.append(_Draft(Layer(weight, self.names.get(id(bias)), call.number, how)))
        return len(self.drafts) - 1, "layer"

    def _norm(self, call: Call, mark: _Mark, draft: _Draft) -> tuple[int | None, str]:
        running = self.names.get(id(call.args[1]))
        training = call.args[5] if len(call.args) > 5 else call.named.get("training", False)
        if running is None or training:
            return None, ""
        draft.layer = replace(draft.layer, norm=running.rpartition(".")[0])
        draft.stages.append("norm")
        return mark.layer, "norm"

    def _sum(self, call: Call, marks: list[_Mark | None]) -> tuple[int | None, str]:
        summands = [argument for argument in call.args if isinstance(argument, Tensor)]
        if len(summands) != 2 or summands[0].shape != summands[1].shape or len(marks) != 2 or call.named:
            return None, ""
        ends = [(m.layer, i) for i, m in enumerate(marks) if m and m.layer is not None and m.stage in ("layer", "norm")]
        if not ends:
            return None, ""
        layer, position = max(ends)
        other = marks[1 - position]
        draft = self.drafts[layer]
        if other is None:
            return None, ""
        draft.layer = replace(draft.layer, total=call.number, other=other.call)
        draft.stages.append("sum")
        return layer, "sum"


def _mark(tensor: Tensor) -> _Mark | None:
    mark: _Mark | None = getattr(tensor, "_prunekit_mark", None)
    return mark if mark is not None and mark.version == tensor._version else None


def find_layers(model: nn.Module, images: Tensor, norms: Iterable[str] = ()) -> tuple[Layer, ...]:
    """The convolutions and linear layers that a model in eval mode calls, in the order in which it does.

    Args:
        model: runs on `images`.
        images: a few samples.
        norms: paths of modules whose insides are not looked at: those of a channel map.
    """
    finder = _Finder(model, norms)
    with finder.watching():
        model(images)
    calls = Counter(draft.layer.weight for draft in finder.drafts)
    return tuple(draft.finished(calls[draft.layer.weight]) for draft in finder.drafts)

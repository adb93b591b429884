"""Hooks on chosen layers, which get every tensor that a layer reads or returns, and the gradients of both."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn

from prunekit.channels.tracing.execution import channel_axis
from prunekit.errors import UsageError, nearest
from prunekit.hooks.gradient_hooks import GradientChange, InputGradients, OutputGradients, hook_gradient, tensor_hook
from prunekit.hooks.hook import HookWarning, recomputing, refuse_compiled
from prunekit.hooks.wrappers import unwrapped
from prunekit.inspection.capture.layer_selection import Layers, select_layers
from prunekit.statistics.linear_layers import FunctionCall
from prunekit.statistics.observers import Consumer, ConsumerCallback, ConsumerInterceptor, PassHooks
from prunekit.utils.tensors import gather, map_tensors

What = Literal["input", "output", "grad_input", "grad_output"]


class TensorKey(NamedTuple):
    """The key of one tensor of a layer.

    Attributes:
        path: path of the module, or name of the weight if it has no module of its own.
        what: whether it is an input or an output, or the gradient of one.
        batch: number of the model's forward pass, from 0; None outside of one.
        call: number of the layer's call in that pass, from 0.
        position: its number among all tensors of a nested value: of the positional and then the named arguments, or
            of the result.
    """

    path: str
    what: What
    batch: int | None
    call: int
    position: int

    def __str__(self) -> str:
        return f"{self.what} {self.position} of {self.path}, call {self.call}"


class LayerHooks(PassHooks):
    """Hooks that pass the tensors of chosen layers to `on_tensor`, in the order in which they are computed.

    Args:
        model: the model, which is not compiled.
        layers: see `Layers`.
        what: which tensors.
        every: only the first of so many forward passes is observed.

    Raises:
        UsageError: a glob, a class or a group matches nothing, or `what` is no tensor of a layer.
        ModelError: the model is compiled: hooks added after `torch.compile` are silently ignored.
    """

    purpose = "layers"
    """Name of the call that uses the hooks, with which messages begin."""

    def __init__(self, model: nn.Module, layers: Layers, what: What | Iterable[What], every: int = 1) -> None:
        model = unwrapped(model, offloaded=True, compiled=False)
        super().__init__(model)
        name = self.purpose
        refuse_compiled(model, name)
        self.what = _checked(what, name)
        if every < 1:
            raise UsageError(f"{name}: every: expected a whole number of at least 1, got {every}")
        self._chosen, self._every = select_layers(model, layers, name), every
        self._begun = 0
        self._called: set[str] = set()
        self._idle = True

    def on_tensor(self, key: TensorKey, values: Tensor, axis: int) -> Tensor | None:
        """Return the tensor to use in place of one whose channels are on `axis`; None to leave it."""
        raise NotImplementedError

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the chosen layers."""
        return self._chosen.paths

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self._begun and self._idle:
            names = ", ".join(self.paths[:3]) + (", ..." if len(self.paths) > 3 else "")
            if all(what.startswith("grad") for what in self.what):
                why = f"no gradient came by {names}: run the model with gradients enabled, or none of them ran"
            else:
                why = (
                    f"none of {names} ran while the model did; where a weight is used without its module's being "
                    "called, choose the weight: 'path.weight'"
                )
            warnings.warn(f"{self.purpose}: {why}", HookWarning, stacklevel=2)

    def start_pass(self) -> None:
        """Start a forward pass of the model."""
        self._begun += 1
        self._called.clear()

    def register_hooks(self) -> None:
        """Register hooks on the layers."""
        for path, module in self._chosen.modules.items():
            self._hook(path, module)
        if self._chosen.functional:
            self.intercept_consumers(self._read, self._made, WeightUses)

    def _hook(self, path: str, module: nn.Module) -> None:
        if path in self._chosen.functional:
            self.own_forward_pre(module, lambda *_: self._called.add(path), again=True)
        if "input" in self.what:
            self.own_forward_pre(module, partial(self._before, path), again=True)
        if "output" in self.what:
            self.own_forward(module, partial(self._after, path), again=True)
        if "grad_input" in self.what:
            inputs = InputGradients(self, partial(self.gradients, path, "grad_input", module))
            self.own_forward_pre(module, inputs.before, again=True)
            self.own_forward(module, inputs.after, again=True, always=True)
        if "grad_output" in self.what:
            outputs = OutputGradients(self, partial(self.gradients, path, "grad_output", module))
            self.own_forward(module, outputs.after, again=True)

    def _next(self, path: str, what: What) -> TensorKey | None:
        """Return the key of the next call of a layer; None if this forward pass is not observed."""
        self._idle = False
        inside = self.inside or recomputing()
        call = self.ordinal(path, what)
        if inside and (self._begun - 1) % self._every:
            return None
        return TensorKey(path, what, self._begun - 1 if inside else None, call, 0)

    def _before(self, path: str, module: nn.Module, arguments: Any, named: Any) -> Any:
        return None if recomputing() else self._all(path, "input", module, (arguments, named))

    def _after(self, path: str, module: nn.Module, arguments: Any, named: Any, result: Any) -> Any:
        return None if recomputing() else self._all(path, "output", module, result)

    def _all(self, path: str, what: What, module: nn.Module, value: Any) -> Any:
        key = self._next(path, what)
        if key is None:
            return None
        found = [
            self.on_tensor(key._replace(position=i), tensor, channel_axis(module, tensor.dim()))
            for i, tensor in enumerate(gather(value))
        ]
        if all(tensor is None for tensor in found):
            return None
        replaced = iter(found)
        return map_tensors(value, lambda tensor: _first(next(replaced), tensor))

    def gradients(self, path: str, what: What, module: nn.Module | int) -> GradientChange:
        """Return what changes the gradients of the current call; `module` may be the axis of its channels."""
        key = self._next(path, what)

        def change(gradient: Tensor, index: int) -> Tensor | None:
            if key is None:
                return None
            axis = module if isinstance(module, int) else channel_axis(module, gradient.dim())
            return self.on_tensor(key._replace(position=index), gradient, axis)

        return change

    def _read(self, consumer: Consumer, values: Tensor, axis: int) -> Tensor | None:
        """Return the tensor that a layer reads whose module may not be called; None if it is left."""
        if not self._alone(consumer):
            return None
        read = values
        if "input" in self.what and not recomputing():
            key = self._next(consumer.path, "input")
            read = values if key is None else _first(self.on_tensor(key, values, axis), values)
        if "grad_input" in self.what and read.requires_grad:
            read = read.view_as(read)  # what this reader alone sends back
            hook_gradient(read, tensor_hook(self, self.gradients(consumer.path, "grad_input", axis), 0))
        return None if read is values else read

    def _made(self, consumer: Consumer, values: Tensor, axis: int) -> Tensor | None:
        if not self._alone(consumer):
            return None
        made = values
        if "output" in self.what and not recomputing():
            key = self._next(consumer.path, "output")
            made = values if key is None else _first(self.on_tensor(key, values, axis), values)
        if "grad_output" in self.what and made.grad_fn is not None:
            hook_gradient(made, tensor_hook(self, self.gradients(consumer.path, "grad_output", axis), 0))
        return None if made is values else made

    def _alone(self, consumer: Consumer) -> bool:
        return consumer.path in self._chosen.functional and consumer.path not in self._called


def _first(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one


def _checked(what: What | Iterable[What], name: str) -> Sequence[What]:
    several: list[What] = [what] if isinstance(what, str) else list(what)
    for one in several:
        if one not in get_args(What):
            raise UsageError(f"{name}: what: {one!r} is no tensor of a layer; {nearest(str(one), get_args(What))}")
    if not several:
        raise UsageError(f"{name}: what: expected some of {', '.join(get_args(What))}, got none")
    return tuple(dict.fromkeys(several))


_PARTS = frozenset({"split", "split_with_sizes", "chunk", "narrow", "__getitem__", "unbind"})


class WeightUses(ConsumerInterceptor):
    """A `ConsumerInterceptor` that also finds where parts of a weight are used, in several calls.

    The three projections of cross-attention, for example, are packed into one weight.
    """

    def __init__(self, model: nn.Module, before: ConsumerCallback, after: ConsumerCallback) -> None:
        super().__init__(model, before, after)
        self._parts: dict[int, tuple[Tensor, str]] = {}

    def forget(self) -> None:
        """Forget the weights that were computed in a pass."""
        super().forget()
        self._parts.clear()

    def _name_of(self, weight: Tensor) -> str | None:
        return super()._name_of(weight) or self._parts.get(id(weight), (weight, None))[1]

    def _follow(self, call: FunctionCall, result: Any) -> None:
        super()._follow(call, result)
        name = self.names.get(id(call.args[0])) if call.name in _PARTS and call.args else None
        if name is not None:
            parts = result if isinstance(result, tuple | list) else (result,)
            self._parts |= {id(part): (part, name) for part in parts}  # held, or an id might be another's

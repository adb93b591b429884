"""Hooks on chosen layers, which get every tensor that a layer reads or returns, and the gradients of both.

Layers are chosen by glob, by class, or by channel group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from prunekit.channels.tracing.channel_map import ChannelGroup
from prunekit.channels.tracing.execution import channel_axis
from prunekit.channels.tracing.substitutes import SizedAttention, substitute_of
from prunekit.errors import UsageError, nearest
from prunekit.hooks.gradient_hooks import GradientChange, InputGradients, OutputGradients, hook_gradient, tensor_hook
from prunekit.hooks.hook import HookWarning, never_called, recomputing, refuse_compiled
from prunekit.hooks.model_copy import named_tensors
from prunekit.hooks.wrappers import unwrapped
from prunekit.statistics.layer_stats import Side
from prunekit.statistics.linear_layers import FunctionCall
from prunekit.statistics.observers import Consumer, ConsumerCallback, ConsumerInterceptor, PassHooks
from prunekit.utils.globs import matching
from prunekit.utils.tensors import gather, map_tensors

What = Literal["input", "output", "grad_input", "grad_output"]


class TensorKey(NamedTuple):
    """The key of one tensor of a layer."""

    path: str  # path of the module, or name of the weight if it has no module of its own
    what: What  # whether it is an input or an output, or the gradient of one
    batch: int | None  # number of the model's forward pass, from 0; None outside of one
    call: int  # number of the layer's call in that pass, from 0
    # its number among all tensors of a nested value: of the positional and then the named arguments, or of the result
    position: int

    def __str__(self) -> str:
        return f"{self.what} {self.position} of {self.path}, call {self.call}"


class LayerHooks(PassHooks):
    """Hooks that pass the tensors of chosen layers to `on_tensor`, in the order in which they are computed.

    Only the first of `every` so many forward passes is observed. `look` takes the place of a subclass's `on_tensor`.
    """

    purpose = "layers"  # the call that uses the hooks, with which messages begin

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        what: What | Iterable[What],
        every: int = 1,
        look: Callable[[TensorKey, Tensor, int], Tensor | None] | None = None,
    ) -> None:
        model = unwrapped(model, offloaded=True, compiled=False)
        super().__init__(model)
        name = self.purpose
        refuse_compiled(model, name)
        self.what = _checked(what, name)
        if every < 1:
            raise UsageError(f"{name}: every: expected a whole number of at least 1, got {every}")
        self._chosen, self._every = select_layers(model, layers, name), every
        self._begun, self._look = 0, look
        self._called: set[str] = set()
        self._idle = True

    def on_tensor(self, key: TensorKey, values: Tensor, axis: int) -> Tensor | None:
        """Return the tensor to use in place of one whose channels are on `axis`; None to leave it."""
        if self._look is None:
            raise NotImplementedError
        return self._look(key, values, axis)

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
            self.intercept_consumers(partial(self._uncalled, "input"), partial(self._uncalled, "output"), WeightUses)

    def _hook(self, path: str, module: nn.Module) -> None:
        if path in self._chosen.functional:
            self.own_forward_pre(module, lambda *_: self._called.add(path))
        if "input" in self.what:
            self.own_forward_pre(module, partial(self._seen, path))
        if "output" in self.what:
            self.own_forward(module, partial(self._seen, path))
        if "grad_input" in self.what:
            inputs = InputGradients(self, partial(self.gradients, path, "grad_input", module))
            self.own_forward_pre(module, inputs.before)
            self.own_forward(module, inputs.after, always=True)
        if "grad_output" in self.what:
            outputs = OutputGradients(self, partial(self.gradients, path, "grad_output", module))
            self.own_forward(module, outputs.after)

    def _next(self, path: str, what: What) -> TensorKey | None:
        """Return the key of the next call of a layer; None if this forward pass is not observed."""
        self._idle = False
        inside = self.inside or recomputing()
        call = self.ordinal(path, what)
        if inside and (self._begun - 1) % self._every:
            return None
        return TensorKey(path, what, self._begun - 1 if inside else None, call, 0)

    def _seen(self, path: str, module: nn.Module, arguments: Any, named: Any, *result: Any) -> Any:
        """Show the tensors that a layer reads, or those of its result, and return what replaces them."""
        value: Any = result[0] if result else (arguments, named)
        key = None if recomputing() else self._next(path, "output" if result else "input")
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

    def _uncalled(self, side: Side, consumer: Consumer, values: Tensor, axis: int) -> Tensor | None:
        """Return what a layer whose module may not be called is to read or to return instead; None to leave it."""
        path, found = consumer.path, values
        if path not in self._chosen.functional or path in self._called:
            return None
        if side in self.what and not recomputing() and (key := self._next(path, side)) is not None:
            found = _first(self.on_tensor(key, values, axis), values)
        gradient: What = "grad_input" if side == "input" else "grad_output"
        if gradient in self.what and (found.requires_grad if side == "input" else found.grad_fn is not None):
            # A view of its own has the gradient that this reader alone sends back.
            found = found.view_as(found) if side == "input" else found
            hook_gradient(found, tensor_hook(self, self.gradients(path, gradient, axis), 0))
        return None if found is values else found


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


Layer = str | type[nn.Module] | ChannelGroup
Layers = Layer | Iterable[Layer]
"""Globs over module paths, classes of modules, channel groups, or several of these. A glob that matches no module may
match names of weights, which are then observed where they are used, without a call of a module."""
NEVER_RUN = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class SelectedLayers:
    """Layers by their paths, in the order of the model."""

    modules: dict[str, nn.Module]  # modules that may be called
    # paths of modules whose weight may be used without a call, as in attention, and names of weights that have no
    # module of their own
    functional: frozenset[str]

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all layers: modules in the order of the model, then weights without a module."""
        return (*self.modules, *sorted(self.functional - self.modules.keys()))


def select_layers(model: nn.Module, layers: Layers, key: str) -> SelectedLayers:
    """Return the layers of a model that globs, classes or channel groups select."""
    every = model.named_modules(remove_duplicate=False)  # by every path that they have
    modules = {path: module for path, module in every if path and type(module) not in NEVER_RUN}
    hidden = _hidden(model)
    single = isinstance(layers, (str, type, ChannelGroup)) or not isinstance(layers, Iterable)
    several: list[Any] = [layers] if single else list(layers)  # type: ignore[arg-type]
    wrong = [type(layer).__name__ for layer in several if not isinstance(layer, (str, type, ChannelGroup))]
    if wrong or not several:
        got = wrong[0] if wrong else "none"
        raise UsageError(f"{key}: expected a glob over module paths, a class of modules or a channel group, got {got}")
    found = {path for layer in several for path in _paths(layer, modules, hidden, model, key)}
    seen: set[int] = set()
    called = {}
    for path, module in modules.items():
        if path in found and not never_called(module) and id(module) not in seen:
            seen.add(id(module))
            called[path] = module
    functional = found & hidden | found - modules.keys()
    return SelectedLayers(called, frozenset(name.removesuffix(".weight") for name in functional))


def _paths(layer: Layer, modules: dict[str, nn.Module], hidden: set[str], model: nn.Module, key: str) -> Iterable[str]:
    if isinstance(layer, ChannelGroup):
        return _of_group(layer, modules, hidden, key)
    if isinstance(layer, type):
        found = [path for path, module in modules.items() if isinstance(module, layer)]
        if not found:
            kinds = {type(module).__name__ for module in modules.values()}
            raise UsageError(f"{key}: the model has no {layer.__name__}; {nearest(layer.__name__, kinds)}")
        return found
    known = [*modules, *sorted(hidden - modules.keys())]
    try:
        return matching(layer, known, key)
    except UsageError as error:
        weights = [n for n, tensor in named_tensors(model) if isinstance(tensor, nn.Parameter) and tensor.dim() > 1]
        try:
            return matching(layer, weights, key)
        except UsageError:
            raise error from None


def _of_group(group: ChannelGroup, modules: dict[str, nn.Module], hidden: set[str], key: str) -> Iterator[str]:
    """Yield the layers that compute or scale the channels of a group."""
    found = False
    for name, axis in group.slots:
        path = name.rpartition(".")[0]
        if path in modules and _is_host(modules[path]):  # the channels of its projections are not its own
            path = name if name in hidden else ""
        transposed = path in modules and bool(getattr(modules[path], "transposed", False))
        if (path in modules or path in hidden) and axis == int(transposed):
            found = True
            yield path
    if not found:
        raise UsageError(f"{key}: none of the model's modules makes the channels of group {group.name!r}")


def attention_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of attention's projections, whose modules may not be called, by the names that choose them."""
    hidden = _hidden(model)
    weights = ((name, parameter) for name, parameter in model.named_parameters() if name.endswith("weight"))
    return {path: parameter for name, parameter in weights if (path := name.removesuffix(".weight")) in hidden}


def _hidden(model: nn.Module) -> set[str]:
    """Return the paths of layers in attention modules, whose weights may be used without a call of the layer."""
    hosts = {path for path, module in model.named_modules() if _is_host(module)}
    weights = {name for name, tensor in named_tensors(model) if tensor.dim() == 2 and isinstance(tensor, nn.Parameter)}
    inside = {name for name in weights if any(name.startswith(f"{host}." if host else "") for host in hosts)}
    return {name.removesuffix(".weight") for name in inside}


def _is_host(module: nn.Module) -> bool:
    return substitute_of(type(module)) is not None or isinstance(module, SizedAttention)


def weights_with_channels(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of convolutions, of linear layers and of attention's projections by their paths.

    A weight may be computed, as by `torch.nn.utils.parametrizations`.
    """
    modules = ((path, module) for path, module in model.named_modules() if isinstance(module, (_ConvNd, nn.Linear)))
    of_layers = {path: module.weight.detach() for path, module in modules}
    return of_layers | {path: weight.detach() for path, weight in attention_weights(model).items()}

"""The selection of layers: by glob, by class, or by channel group; and the weights of their channels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from prunekit.channels.tracing.channel_map import ChannelGroup
from prunekit.channels.tracing.substitutes import SizedAttention, substitute_of
from prunekit.errors import UsageError, nearest
from prunekit.hooks.hook import never_called
from prunekit.hooks.model_copy import named_tensors
from prunekit.utils.globs import matching

Layer = str | type[nn.Module] | ChannelGroup
Layers = Layer | Iterable[Layer]
"""Globs over module paths, classes of modules, channel groups, or several of these. A glob that matches no module may
match names of weights, which are then observed where they are used, without a call of a module."""
NEVER_RUN = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class SelectedLayers:
    """Layers by their paths, in the order of the model.

    Attributes:
        modules: modules that may be called.
        functional: paths of modules whose weight may be used without a call, as in attention, and names of weights
            that have no module of their own.
    """

    modules: dict[str, nn.Module]
    functional: frozenset[str]

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all layers: modules in the order of the model, then weights without a module."""
        return (*self.modules, *sorted(self.functional - self.modules.keys()))


def select_layers(model: nn.Module, layers: Layers, key: str) -> SelectedLayers:
    """Return the layers of a model that globs, classes or channel groups select."""
    modules = {path: module for path, module in _named(model).items() if type(module) not in NEVER_RUN}
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


def _named(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by every path that they have, but the model itself."""
    return {path: module for path, module in model.named_modules(remove_duplicate=False) if path}


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


def layers_with_channels(model: nn.Module) -> dict[str, nn.Module]:
    """Return convolutions and linear layers by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, (_ConvNd, nn.Linear))}


def channels_of(model: nn.Module) -> dict[str, int]:
    """Return the number of output channels of each layer whose correlations can be computed, by its path."""
    modules: dict[str, Any] = dict(layers_with_channels(model))
    made = {path: int(getattr(module, "out_channels", 0) or module.out_features) for path, module in modules.items()}
    return made | {path: len(weight) for path, weight in attention_weights(model).items()}


def weights_with_channels(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of convolutions, of linear layers and of attention's projections by their paths."""
    of_layers = {path: weight_of(module) for path, module in layers_with_channels(model).items()}
    return of_layers | {path: weight.detach() for path, weight in attention_weights(model).items()}


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a layer, which may be computed, as by `torch.nn.utils.parametrizations`."""
    return cast(Tensor, module.weight).detach()

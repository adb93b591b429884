"""Layers that read channels through a weight, and hooks that see what each of them is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.calibration.passes import PassHooks
from prunekit.channels.substitutes import SUBSTITUTES, SizedAttention
from prunekit.hooks import never_called, refuse_nested
from prunekit.nested import tensors_in


@dataclass(frozen=True, eq=False)
class Consumer:
    """A layer that multiplies its input channels with a weight.

    Attributes:
        path: of the module; the key of its moments.
        module: a convolution, plain, grouped or transposed, a linear layer, or `nn.MultiheadAttention`, whose packed
            projection of queries, keys and values reads one input.
        weight: its weight's name in the module.
        channels: of its input.
        groups: which read their share of the channels each and nothing else.
    """

    path: str
    module: nn.Module
    weight: str
    channels: int
    groups: int = 1

    @property
    def name(self) -> str:
        """The weight's name in the model."""
        return f"{self.path}.{self.weight}" if self.path else self.weight

    @property
    def input_axis(self) -> int:
        """Which axis of the weight belongs to the input."""
        return 0 if isinstance(self.module, _ConvTransposeNd) else 1

    def axis(self, ndim: int) -> int:
        """Which axis of an input holds the channels."""
        return ndim - len(self.module.kernel_size) - 1 if isinstance(self.module, _ConvNd) else ndim - 1

    def columns(self, weight: Tensor) -> Tensor:
        """What the layer does with each channel: its entries of the weight, (channels, outputs x taps)."""
        if self.input_axis == 0:
            return weight.flatten(1)
        rows = weight.reshape(self.groups, -1, *weight.shape[1:])  # (groups, outputs of each, channels of each, *taps)
        return rows.movedim(2, 1).flatten(0, 1).flatten(1)


def consumers_of(modules: Mapping[str, nn.Module]) -> dict[str, Consumer]:
    """Every layer that reads channels through a weight, by its path, in the order of the modules."""
    found = (_consumer(path, module) for path, module in modules.items())
    return {consumer.path: consumer for consumer in found if consumer is not None}


def _consumer(path: str, module: nn.Module) -> Consumer | None:
    if isinstance(module, nn.Linear):
        return Consumer(path, module, "weight", module.weight.shape[1])
    if isinstance(module, _ConvNd):
        return Consumer(path, module, "weight", module.in_channels, module.groups)
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return Consumer(path, module, "in_proj_weight", module.in_proj_weight.shape[1])
    return None


class ConsumerHooks(PassHooks):
    """Sees the input of every consumer in each forward pass; subclasses say what becomes of it.

    By forward-pre hooks; linear layers inside attention modules that read their weights without calling them (the
    output projection of `nn.MultiheadAttention`, torchvision's window attention) are seen where torch multiplies with
    the weight. Attention's fast path, which hides that, is off inside the `with`.
    """

    def __init__(self, model: nn.Module, exclude: Collection[str] = ()) -> None:
        super().__init__(model)
        found = consumers_of(dict(model.named_modules()))
        self.consumers = {path: consumer for path, consumer in found.items() if path not in exclude}
        self._called: set[str] = set()

    def see(self, consumer: Consumer, values: Tensor) -> None:
        """Takes note of an input, which a later layer may overwrite."""
        raise NotImplementedError

    def watch(self) -> None:
        """Registers the hooks."""
        self.own(_SlowAttention())
        for consumer in self.consumers.values():
            if not never_called(consumer.module):
                self.own_forward_pre(consumer.module, self._before(consumer), again=True)
        for path, module in self._model.named_modules():
            if type(module) in SUBSTITUTES or isinstance(module, SizedAttention):
                self._watch_weights(path, module)

    def begin(self) -> None:
        """Forgets which layers were called."""
        self._called.clear()

    def _before(self, consumer: Consumer) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._called.add(consumer.path)
            inputs = list(tensors_in((arguments, named)))
            shared = not isinstance(module, nn.MultiheadAttention) or all(x is inputs[0] for x in inputs[1:3])
            if inputs and shared:  # attention to something else reads two inputs with one weight
                self._see(consumer, inputs[0])

        return hook

    def _see(self, consumer: Consumer, values: Tensor) -> None:
        if not self.inside or not values.is_floating_point():
            return
        refuse_nested(values, f"input of {consumer.path}")
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            self.see(consumer, values)

    def _watch_weights(self, path: str, attention: nn.Module) -> None:
        inside = [c for c in self.consumers.values() if c.path.startswith(f"{path}." if path else "")]
        running: list[AbstractContextManager[Any]] = []

        def before(*forward: Any) -> None:
            uncalled = {c.module.weight.data_ptr(): c for c in inside if isinstance(c.module, nn.Linear)}
            running.append(_Multiplications(uncalled, self._multiplied))
            running[-1].__enter__()

        def after(*forward: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        self.own_forward_pre(attention, before, again=True)
        self.own_forward(attention, after, again=True, always=True)

    def _multiplied(self, consumer: Consumer, values: Tensor) -> None:
        if consumer.path not in self._called:
            self._see(consumer, values)


class _SlowAttention:
    """Attention's fast path off, until removed."""

    def __init__(self) -> None:
        self._before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def remove(self) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before)


class _Multiplications(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells what is multiplied with some weights, known by where they lie: linear layers, in whatever form."""

    def __init__(self, weights: Mapping[int, Consumer], seen: Callable[[Consumer, Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._seen = weights, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _INPUT_AND_WEIGHT.get(func)
        if place is not None:
            values, weight = args[place[0]], args[place[1]]
            consumer = self._weights.get(weight.data_ptr())
            if consumer is not None and values.shape[-1] == consumer.channels:
                self._seen(consumer, values)
        return func(*args, **(kwargs or {}))


_INPUT_AND_WEIGHT = {
    torch.ops.aten.linear.default: (0, 1),
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
}

"""Forward hooks that measure activations while a model runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from prunekit.calibration.layer_stats import LayerStats, StatsKey, combine
from prunekit.calibration.reduce import summarise
from prunekit.calibration.stats import ChannelStats
from prunekit.channels import channel_axis
from prunekit.context import training_mode
from prunekit.errors import UsageError, nearest
from prunekit.hooks import HookOwner, refuse_compiled

Side = Literal["input", "output"]

PARTS = 16
"""Batches merged at a time; merging each alone costs as much as measuring a small activation."""


class _Measured(NamedTuple):
    """An activation measured in the running forward pass; it is not kept alive by this."""

    tensor: weakref.ref[Tensor]
    version: int
    axis: int
    stats: LayerStats


class StatsCollector(HookOwner):
    """Collects per-channel statistics of a model's activations, as a context manager of forward hooks.

    Every forward pass of `model` inside the `with` counts, in full: every batch, every call of a module that is
    called more than once, every position. Memory is O(channels). Train or eval mode and `no_grad` are the caller's
    business. What runs outside of `model(...)`, such as the second forward of activation checkpointing, is not
    counted, and nor is a forward pass that raises.

    Values are reduced inside the hook, because a later in-place ReLU overwrites what a hook was given.

    Args:
        model: the model, not compiled.
        modules: paths as in `named_modules()`; None: every module without children.
        inputs: whether to measure the first tensor among a module's arguments.
        outputs: whether to measure the first tensor in a module's result.
        axes: channel axis by module path, where `channel_axis` is wrong (an activation after a Linear, say).

    Raises:
        UsageError: a path that is not there; in a hook: an activation whose number of channels changes
            from batch to batch, or an axis that it does not have.
        ModelError: on enter, when the model is compiled: hooks added after `torch.compile` are silently ignored.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        modules: Sequence[str] | None = None,
        inputs: bool = True,
        outputs: bool = True,
        axes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._targets = _targets(model, modules)
        self._sides = {"input": inputs, "output": outputs}
        self._axes = _known(axes or {}, self._targets)
        self._parts: dict[StatsKey, list[LayerStats]] = {}
        self._running: dict[StatsKey, LayerStats] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._measured: dict[int, _Measured] = {}
        self._depth = 0
        self._passes = 0

    def register(self) -> None:
        """Hooks the modules, between a hook that opens and one that closes each forward pass of the model."""
        refuse_compiled(self._model, type(self).__name__)

        # Closures and not bound methods: deepcopy of a model would copy a bound method's owner with it.
        def begin(module: nn.Module, arguments: Any) -> None:
            self._begin()

        def keep(module: nn.Module, arguments: Any, result: Any) -> None:
            if self._depth == 1:
                self._keep()

        def end(module: nn.Module, arguments: Any, result: Any) -> None:
            self._depth -= 1

        self._depth = 0
        self.own(self._model.register_forward_pre_hook(begin))
        for path, module in self._targets.items():
            self._watch(path, module)
        self.own(self._model.register_forward_hook(keep))
        self.own(self._model.register_forward_hook(end, always_call=True))

    def stats(self) -> ChannelStats:
        """The statistics so far; keys are in the order in which activations were first met.

        Raises:
            UsageError: the model has not run inside the `with`.
        """
        if self._passes == 0:
            raise UsageError("no forward pass was seen: call the model itself inside `with StatsCollector(model)`")
        return ChannelStats({key: combine(parts) for key, parts in self._parts.items()})

    def _watch(self, path: str, module: nn.Module) -> None:
        def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._see(path, "input", (*arguments, *named.values()))

        def after(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
            self._see(path, "output", result)

        if self._sides["input"]:
            self.own(module.register_forward_pre_hook(before, with_kwargs=True))
        if self._sides["output"]:
            self.own(module.register_forward_hook(after))

    def _begin(self) -> None:
        if self._depth == 0:
            self._running.clear()
            self._calls.clear()
            self._measured.clear()
        self._depth += 1  # a model may call itself

    def _see(self, path: str, side: Side, value: Any) -> None:
        if self._depth == 0:
            return
        key = StatsKey(path, side, self._calls[path, side])
        self._calls[path, side] += 1
        tensor = first_tensor(value)
        if tensor is None or tensor.ndim < 2:
            return
        axis = self._axes.get(path, channel_axis(self._targets[path], tensor.ndim))
        stats = self._summarise(tensor, _checked_axis(tensor, axis, key))
        self._running[key] = stats

    def _keep(self) -> None:
        """Adds what the finished forward pass showed; one that failed half way counts for nothing."""
        for key, stats in self._running.items():
            parts = self._parts.setdefault(key, [])
            if parts and parts[0].channels != stats.channels:
                raise UsageError(
                    f"{key}: expected {parts[0].channels} channels as before, got {stats.channels}; where the size of "
                    f"the images changes, name the axis that holds the channels: axes={{{key.module!r}: -1}}"
                )
            parts.append(stats)
            if len(parts) == PARTS:
                parts[:] = [combine(parts)]
        self._passes += 1
        self._measured.clear()

    def _summarise(self, tensor: Tensor, axis: int) -> LayerStats:
        """Measures a tensor, or looks it up: most inputs are another module's output, not written to since."""
        if tensor.is_inference():
            return summarise(tensor, axis)  # without a version counter nobody knows whether it was written to
        seen = self._measured.get(id(tensor))
        if seen is not None and seen.tensor() is tensor and (seen.version, seen.axis) == (tensor._version, axis):
            return seen.stats
        stats = summarise(tensor, axis)
        self._measured[id(tensor)] = _Measured(weakref.ref(tensor), tensor._version, axis, stats)
        return stats


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    device: torch.device,
    *,
    modules: Sequence[str] | None = None,
    inputs: bool = True,
    outputs: bool = True,
) -> ChannelStats:
    """Runs a model over batches, in eval mode without gradients, and returns its channel statistics.

    Args:
        model: already on `device`; every module is afterwards in the mode it had.
        batches: tensors, or tuples and lists whose first entry is the model's input.
        modules, inputs, outputs: as for `StatsCollector`.

    Raises:
        UsageError: `batches` is empty, and as for `StatsCollector`.
    """
    collector = StatsCollector(model, modules=modules, inputs=inputs, outputs=outputs)
    with training_mode(model, False), torch.no_grad(), collector:
        for batch in batches:
            images = batch[0] if isinstance(batch, (tuple, list)) else batch
            model(images.to(device, non_blocking=True))
    return collector.stats()


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a value, its tuples, lists and dictionaries included; None without one."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, (tuple, list)):
        return None
    return next((found for entry in value if (found := first_tensor(entry)) is not None), None)


def _targets(model: nn.Module, modules: Sequence[str] | None) -> dict[str, nn.Module]:
    found = dict(model.named_modules())
    if modules is None:
        return {path: module for path, module in found.items() if not any(module.children())}
    for path in modules:
        if path not in found:
            raise UsageError(f"modules: the model has no module {path!r}; {nearest(path, found)}")
    return {path: found[path] for path in modules}


def _known(axes: Mapping[str, int], targets: Mapping[str, nn.Module]) -> dict[str, int]:
    for path in axes:
        if path not in targets:
            raise UsageError(f"axes: {path!r} is not among the measured modules; {nearest(path, targets)}")
    return dict(axes)


def _checked_axis(tensor: Tensor, axis: int, key: StatsKey) -> int:
    if not -tensor.ndim <= axis < tensor.ndim:
        raise UsageError(f"{key}: channel axis {axis} was asked for, but the shape is {tuple(tensor.shape)}")
    return axis % tensor.ndim

"""Gradients of pruned entries: exactly zero by gradient masks, or straight through to values behind the zeros."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.channels.tracing.execution import channel_axis
from prunekit.errors import PlanError
from prunekit.hooks.hook import OwnedHook, never_called, refuse_compiled
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.step_hooks import with_gradients
from prunekit.masks.pruned_entries import BITS, Entries, MaskedTensor, all_or_no_bits, masked_tensors, widest_masks
from prunekit.masks.weight_masks import PrunedValues
from prunekit.planning.plan import Plan

SMALL = 64
"""Positions of a channel below which a mask has an entry for each of them."""


class GradientMasks(HookOwner):
    """Masks that keep the gradients of pruned entries at exactly 0.0, as a context manager.

    Two kinds of hooks: on each module that owns pruned parameters, the gradient of its output is masked along the
    pruned output channels before its own backward runs, also where tensors are overwritten in place later; and each
    pruned parameter's gradient is masked when it has been accumulated, which is exact on every axis. The first keeps
    gradients of a pruned channel, NaN and Inf too, from spreading; the second gives an optimizer masked gradients.
    Gradients that were there on enter are masked by the next backward.

    A module that treats every channel by itself, as BatchNorm does, has no hook of the first kind if its inputs come
    from modules that have one: nothing can spread in it, and behind it the gradient is masked all the same.

    Under `torch.compile` hooks of the first kind are part of the graph. Given the `entries` of weight masks with the
    same plan, the two share their masks' memory, and `update` comes after that of the weight masks.

    Raises:
        PlanError: the plan does not fit the model.
        ModelError: on enter, when the model is compiled, and in a forward pass that leaves these hooks out, because it
            was compiled before: hooks added after `torch.compile` are silently ignored.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, entries: Entries | None = None, changing: bool = False) -> None:
        super().__init__()
        self._model, self._changing = model, changing
        self._entries: Entries = {} if entries is None else entries
        self._shared = entries is not None
        self._spared: Entries | None = None
        self._channel_masks: dict[str, _ChannelMask] = {}
        found = masked_tensors(model, plan, self._entries, buffers=False)
        self._plan, self._masked = plan, widest_masks(model, plan) if changing else found

    def register(self) -> None:
        """Register hooks on the modules' output gradients and the parameters' gradients."""
        refuse_compiled(self._model, type(self).__name__)
        self._unhooked = self._unhooked_modules()
        for path in self._masked:
            self._hook(path)
        self.own_compile_check(self._model)

    def update(self, plan: Plan) -> None:
        """Mask by another plan, between two steps; the hooks stay where they are."""
        if not (self.active and self._changing):
            raise RuntimeError(f"{type(self).__name__}.update: expected active masks that were made with changing=True")
        self._plan = plan
        if not self._shared:
            self._entries.clear()
        masked_tensors(self._model, plan, self._entries, buffers=False)
        if self._spared is not None:
            self._spared = self._of_channels()
        for path, channels in self._channel_masks.items():
            channels.use(_dropped_outputs(path, plan))

    def spare_single_weights(self, spare: bool) -> None:
        """Leave the gradients of masked single weights as they are from now on, or mask them again."""
        if spare != (self._spared is not None):
            self._spared = self._of_channels() if spare else None

    def _of_channels(self) -> Entries:
        """Return the entries that are pruned with their channels."""
        found: Entries = {}
        masked_tensors(self._model, replace(self._plan, element_masks={}), found, buffers=False)
        return found

    def zero_(self) -> None:
        """Write exact zeros into the gradients of all pruned entries, those of single weights too."""
        for module, masked in self._masked.values():
            for tensor in masked:
                pruned = self._entries.get(tensor.name)
                gradient = tensor.of(module).grad
                if pruned is not None and gradient is not None:
                    pruned.zero_gradient_(gradient)

    def _hook(self, path: str) -> None:
        module, masked = self._masked[path]
        dropped = _dropped_outputs(path, self._plan)
        if (dropped is not None or self._changing) and not never_called(module) and path not in self._unhooked:
            self._channel_masks[path] = channels = _ChannelMask(path, module, dropped)
            self.own_output_gradients(module, channels.change, traced=channels.traced)
        for tensor in masked:
            if tensor.attribute in module._parameters:
                self._mask_parameter(module, tensor)

    def _unhooked_modules(self) -> set[str]:
        """Return channelwise modules whose inputs all come from modules with hooks on their outputs."""
        chart = self._plan.channel_map
        leaves = {path: mod for path, (mod, _) in self._masked.items() if not any(True for _ in mod.children())}
        vectors = {path for path, mod in leaves.items() if all(one.ndim == 1 for one in mod.parameters())}
        channelwise = vectors - chart.norms.keys()  # all their parameters are one number for each channel
        others = self._masked.keys() - channelwise
        made = [labels for (path, side, _), labels in chart.activations.items() if side == "output" and path in others]
        known = np.unique(np.concatenate([np.zeros(1, np.int64), *made]))  # 0: locked
        read: dict[str, list[bool]] = {path: [] for path in channelwise}
        for (path, side, _), labels in chart.activations.items():
            if side == "input" and path in channelwise:
                read[path].append(bool(np.isin(labels, known).all()))
        return {path for path, calls in read.items() if calls and all(calls)}

    def _mask_parameter(self, module: nn.Module, masked: MaskedTensor) -> None:
        hooked: weakref.ref[Tensor] | None = None

        def zero(parameter: Tensor) -> None:
            pruned = (self._entries if self._spared is None else self._spared).get(masked.name)
            if pruned is not None and parameter.grad is not None:
                pruned.zero_gradient_(parameter.grad)

        def watch(*_: Any) -> None:
            nonlocal hooked
            parameter = masked.of(module)
            if parameter.requires_grad and (hooked is None or hooked() is not parameter):
                hooked = weakref.ref(parameter)
                self.own_parameter_gradient(parameter, zero)

        watch()
        # load_state_dict(assign=True) puts other parameters in the place of those that are hooked
        self.own(nn.Module.register_load_state_dict_post_hook(module, OwnedHook(self, watch)))  # type: ignore[no-untyped-call]


def _dropped_outputs(path: str, plan: Plan) -> Tensor | None:
    """Return bool (channels,), True where a module's output channel is pruned in each of its calls; None if nowhere."""
    calls = [labels for key, labels in plan.channel_map.activations.items() if key[:2] == (path, "output")]
    if not calls or any(labels.shape != calls[0].shape for labels in calls):
        return None
    dropped = np.logical_and.reduce([~plan.keep[labels] for labels in calls])
    return torch.from_numpy(dropped) if dropped.any() else None


class _ChannelMask:
    """A mask of the gradient of a module's first result, along its pruned channels: bool (channels,), None for none."""

    def __init__(self, path: str, module: nn.Module, dropped: Tensor | None) -> None:
        self._path, self._module = path, module
        self.use(dropped)

    def use(self, dropped: Tensor | None) -> None:
        """Mask these channels from now on."""
        self._dropped = dropped
        self._masks: dict[tuple[torch.device, torch.dtype, int | torch.Size], tuple[int, Tensor]] = {}
        tensors = itertools.chain(self._module.parameters(), self._module.buffers())  # a table of positions is a buffer
        device = next(tensors).device
        self._kept = None if dropped is None else ~dropped.to(device)

    def change(self, gradient: Tensor, index: int) -> Tensor | None:
        """Return the masked gradient; a `GradientChange`."""
        dropped = self._dropped
        if index or dropped is None:  # the plan knows the channels of a module's first result
            return None
        shape = gradient.shape  # and no `len`, which is slow for tensors
        small = shape.numel() < SMALL * shape[0] * dropped.numel() and gradient.is_contiguous()
        key = gradient.device, gradient.dtype, shape[1:] if small else len(shape)
        if key not in self._masks:
            axis, along = self._along(gradient)
            self._require_channels(gradient, axis, dropped.numel())
            mask = all_or_no_bits(~dropped, gradient.device, BITS[gradient.element_size()]).view(along)
            if small and axis % len(shape):  # a few positions are too short an inner loop
                mask = mask.expand(1, *shape[1:]).contiguous()
            self._masks[key] = axis, mask
        axis, mask = self._masks[key]
        self._require_channels(gradient, axis, dropped.numel())
        if gradient.requires_grad:  # of a second-order gradient: in operations that have one
            return gradient.masked_fill(mask == 0, 0)
        return gradient.view(mask.dtype).bitwise_and(mask).view(gradient.dtype)

    def traced(self, result: Tensor) -> Tensor:
        """Return the result with pruned channels detached, so that their gradients stop here."""
        kept = self._kept
        if kept is None or not result.requires_grad:
            return result
        axis, shape = self._along(result)
        self._require_channels(result, axis, len(kept))
        return torch.where(kept.to(result.device).view(shape), result, result.detach())

    def _along(self, tensor: Tensor) -> tuple[int, list[int]]:
        """Return the channel axis, and the shape with which a vector lies along it."""
        axis = channel_axis(self._module, tensor.ndim)
        return axis, [-1 if position == axis else 1 for position in range(tensor.ndim)]

    def _require_channels(self, tensor: Tensor, axis: int, channels: int) -> None:
        if tensor.shape[axis] != channels:
            raise PlanError(
                f"{self._path}: expected {channels} output channels on axis {axis}, got shape "
                f"{tuple(tensor.shape)}; was the plan made for another model?"
            )


class StraightThrough(HookOwner):
    """Straight-through gradients: values behind masked single weights, trained with the gradients of the zeros.

    (Zhou et al. 2021, "Learning N:M fine-grained structured sparse neural networks from scratch", SR-STE.) The values
    are in the model only while the optimizer steps: before it they take the place of the zeros, and a multiple of them
    is added to their gradients; after it they are taken out, and masks that come later write the zeros. So every
    forward pass, average and checkpoint sees zeros, and the optimizer has momentum and weight decay of all weights.
    Gradients of these weights must not be masked. Enter it before the weight masks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._decay = decay  # how much of the values is added to their gradients
        self._values: dict[str, _LearnedValues] = {}
        self._shown = False

    def register(self) -> None:
        """Register hooks before and after the optimizer's step."""
        self.own(self._optimizer.register_step_pre_hook(OwnedHook(self, with_gradients(self._show, self._see_zeros))))
        self.own(self._optimizer.register_step_post_hook(OwnedHook(self, self._hide)))

    def use(self, plan: Plan, values: PrunedValues) -> None:
        """Train the values of the entries that a plan's masks of single weights prune, from now on."""
        channels = replace(plan, element_masks={})
        self._values.clear()
        for name, kept in plan.element_masks.items():
            whole = values.whole(name)
            if whole is not None:
                left = channels.mask(name)
                pruned = (~kept if left is None else ~kept & left).to(whole.device).expand(whole.shape)
                self._values[name] = _LearnedValues(whole.masked_fill_(~pruned, 0), pruned)

    def write_to(self, values: PrunedValues) -> None:
        """Hold the values as they are now."""
        for name, learned in self._values.items():
            values.replace(name, learned.values, learned.pruned)

    def _see_zeros(self) -> None:
        """Put the zeros back ahead of a closure, which an optimizer may call again after it has stepped."""
        self._hide()
        for weight, learned in self._weights():
            learned.hide(weight)

    def _weights(self) -> Iterator[tuple[Tensor, _LearnedValues]]:
        for name, learned in self._values.items():
            yield self._model.get_parameter(name), learned

    @torch.no_grad()
    def _show(self, *_: Any) -> None:
        """Put the values where the zeros are, and add the decay to their gradients."""
        scale = getattr(self._optimizer, "grad_scale", None)  # of a fused optimizer, which divides by it
        for weight, learned in self._weights():
            learned.show(weight)
            if self._decay and weight.grad is not None:
                added = learned.values if scale is None else learned.values * scale.to(weight.device)
                weight.grad.add_(added.to(weight.grad.dtype), alpha=self._decay)
        self._shown = True

    @torch.no_grad()
    def _hide(self, *_: Any) -> None:
        """Take the values out of the weights; the zeros are left to the masks."""
        if self._shown:
            for weight, learned in self._weights():
                learned.take(weight)
        self._shown = False


class _LearnedValues:
    """The values behind the zeros of one weight; as bits, which takes half the time of choosing by conditions."""

    def __init__(self, values: Tensor, pruned: Tensor) -> None:
        self._use(values, pruned)

    def _use(self, values: Tensor, pruned: Tensor) -> None:
        self.values, self.pruned = values, pruned  # in the weight's shape; values are +0.0 where it is not pruned
        bits = BITS[values.element_size()]
        self._pruned, self._kept = (all_or_no_bits(one, values.device, bits) for one in (pruned, ~pruned))

    def show(self, weight: Tensor) -> None:
        """Write the values into the weight."""
        self._like(weight)
        self.hide(weight).bitwise_or_(self._bits(self.values))

    def take(self, weight: Tensor) -> None:
        """Take the values as they are in the weight now."""
        torch.bitwise_and(self._bits(weight.data), self._pruned, out=self._bits(self.values))

    def hide(self, weight: Tensor) -> Tensor:
        """Write zeros into the weight; return its bits."""
        return self._bits(weight.data).bitwise_and_(self._kept)

    def _bits(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._kept.dtype)

    def _like(self, weight: Tensor) -> None:
        """Follow a weight that was moved, or is of another type now."""
        if (weight.device, weight.dtype) != (self.values.device, self.values.dtype):
            self._use(self.values.to(weight.device, weight.dtype), self.pruned.to(weight.device))

"""Straight-through gradients: masked single weights learn on behind their zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.hooks.hook import OwnedHook
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.step_hooks import with_gradients
from prunekit.masks.pruned_entries import BITS, all_or_no_bits
from prunekit.masks.weight_masks import PrunedValues
from prunekit.planning.plan import Plan


class StraightThrough(HookOwner):
    """Values behind masked single weights, which the optimizer trains with the gradients of the zeros in their place.

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

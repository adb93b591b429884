"""Gradient masks: no gradient reaches what a plan prunes."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels import channel_axis
from prunekit.errors import PlanError
from prunekit.hooks import GradientChange, HookOwner, OwnedHook, never_called, refuse_compiled
from prunekit.masking.targets import BITS, Entries, MaskedTensor, all_or_no_bits, masked_tensors
from prunekit.planning import Plan


class GradientMasks(HookOwner):
    """Keeps gradients of pruned entries at exactly 0.0, as a context manager.

    Two kinds of hooks: on each module that owns pruned parameters, the gradient of its output is masked along the
    pruned output channels before its own backward runs, whatever is written to in place later; and each pruned
    parameter's gradient is masked when it has been accumulated, which is exact on every axis. The first keeps NaN and
    Inf of a pruned channel from spreading, the second is what an optimizer sees. Gradients that were there on enter
    are masked by the next backward.

    Args:
        model: its parameters are not changed.
        plan: which entries are pruned.
        entries: `entries` of weight masks with the same plan: the two then share their masks' memory.

    Raises:
        PlanError: the plan does not fit the model.
        ModelError: on enter, when the model is compiled: hooks added after `torch.compile` are silently ignored.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, entries: Entries | None = None) -> None:
        super().__init__()
        self._model = model
        self._plan = plan
        self._masked = masked_tensors(model, plan, {} if entries is None else entries, buffers=False)

    def register(self) -> None:
        """Hooks the modules' output gradients and the parameters' gradients."""
        refuse_compiled(self._model, type(self).__name__)
        for path, (module, masked) in self._masked.items():
            dropped = _dropped_outputs(path, self._plan)
            if dropped is not None and not never_called(module):
                self.own_output_gradients(module, _mask_channels(path, module, dropped))
            for tensor in masked:
                self._watch(module, tensor)

    def _watch(self, module: nn.Module, masked: MaskedTensor) -> None:
        hooked: weakref.ref[Tensor] | None = None

        def zero(parameter: Tensor) -> None:
            if parameter.grad is not None:
                masked.entries.zero_gradient_(parameter.grad)

        def watch(*_: Any) -> None:
            nonlocal hooked
            parameter = masked.of(module)
            if parameter.requires_grad and (hooked is None or hooked() is not parameter):
                hooked = weakref.ref(parameter)
                self.own_parameter_gradient(parameter, zero)

        watch()
        # load_state_dict(assign=True) puts other parameters in the place of those that are hooked
        self.own(module.register_load_state_dict_post_hook(OwnedHook(self, watch)))  # type: ignore[no-untyped-call]


def _dropped_outputs(path: str, plan: Plan) -> Tensor | None:
    """Bool (channels,), True where a module's output channel is pruned in each of its calls; None if nowhere."""
    calls = [labels for key, labels in plan.channel_map.activations.items() if key[:2] == (path, "output")]
    if not calls or any(labels.shape != calls[0].shape for labels in calls):
        return None
    dropped = np.logical_and.reduce([~plan.keep[labels] for labels in calls])
    return torch.from_numpy(dropped) if dropped.any() else None


def _mask_channels(path: str, module: nn.Module, dropped: Tensor) -> GradientChange:
    masks: dict[tuple[torch.device, torch.dtype, int], tuple[int, Tensor]] = {}

    def change(gradient: Tensor, index: int) -> Tensor | None:
        if index:  # the plan knows the channels of a module's first result
            return None
        key = gradient.device, gradient.dtype, gradient.ndim
        if key not in masks:
            axis = channel_axis(module, gradient.ndim)
            shape = [-1 if position == axis else 1 for position in range(gradient.ndim)]
            bits = all_or_no_bits(~dropped, gradient.device, BITS[gradient.element_size()])
            masks[key] = axis, bits.view(shape)
        axis, mask = masks[key]
        if gradient.shape[axis] != len(dropped):
            raise PlanError(
                f"{path}: expected {len(dropped)} output channels on axis {axis}, got shape {tuple(gradient.shape)}; "
                "was the plan made for another model?"
            )
        if gradient.requires_grad:  # of a second-order gradient: in operations that have one
            return gradient.masked_fill(mask == 0, 0)
        return gradient.view(mask.dtype).bitwise_and(mask).view(gradient.dtype)

    return change

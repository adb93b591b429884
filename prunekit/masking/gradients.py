"""Gradient masks: no gradient reaches what a plan prunes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels import channel_axis
from prunekit.errors import PlanError
from prunekit.hooks import HookOwner, refuse_compiled
from prunekit.masking.targets import MaskedTensor, masked_tensors
from prunekit.planning import Plan


class GradientMasks(HookOwner):
    """Keeps gradients of pruned entries at exactly 0.0, as a context manager.

    Two kinds of hooks: on each module that owns pruned parameters, the gradient of its output is masked along the
    pruned output channels before its own backward runs (by a full-backward pre-hook, or by a hook on the output where
    that is written to in place later); and each pruned parameter's gradient is masked when it has been accumulated,
    which is exact on every axis. The first keeps NaN and Inf of a pruned channel from spreading, the second is what
    an optimizer sees. Gradients that were there on enter are masked by the next backward.

    Args:
        model: its parameters are not changed.
        plan: which entries are pruned.

    Raises:
        PlanError: the plan does not fit the model.
        ModelError: on enter, when the model is compiled: hooks added after `torch.compile` are silently ignored.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self._model = model
        self._plan = plan
        self._masked = masked_tensors(model, plan, buffers=False)

    def register(self) -> None:
        """Hooks the modules' output gradients and the parameters' gradients."""
        refuse_compiled(self._model, type(self).__name__)
        for path, (module, masked) in self._masked.items():
            dropped = _dropped_outputs(path, self._plan)
            if dropped is not None:
                chart = self._plan.channel_map
                # What reads the model's own input has no gradient there, and older torch warns of such hooks.
                unsafe = path in chart.rewritten or (path, "input", 0) not in chart.activations
                self.own_output_gradient(module, _mask_channels(path, module, dropped), rewritten=unsafe)
            for tensor in masked:
                self._watch(tensor, tensor.of(module))

    def _watch(self, masked: MaskedTensor, parameter: Tensor) -> None:
        def zero(parameter: Tensor) -> None:
            if parameter.grad is not None:
                masked.entries.zero_(parameter.grad)

        if parameter.requires_grad:
            self.own(parameter.register_post_accumulate_grad_hook(zero))  # type: ignore[no-untyped-call]


def _dropped_outputs(path: str, plan: Plan) -> Tensor | None:
    """Bool (channels,), True where a module's output channel is pruned in each of its calls; None if nowhere."""
    calls = [labels for key, labels in plan.channel_map.activations.items() if key[:2] == (path, "output")]
    if not calls or any(labels.shape != calls[0].shape for labels in calls):
        return None
    dropped = np.logical_and.reduce([~plan.keep[labels] for labels in calls])
    return torch.from_numpy(dropped) if dropped.any() else None


def _mask_channels(path: str, module: nn.Module, dropped: Tensor) -> Callable[[Tensor], Tensor]:
    on_device: dict[torch.device, Tensor] = {}

    def change(gradient: Tensor) -> Tensor:
        axis = channel_axis(module, gradient.ndim)
        if gradient.shape[axis] != len(dropped):
            raise PlanError(
                f"{path}: expected {len(dropped)} output channels on axis {axis}, got shape {tuple(gradient.shape)}; "
                "was the plan made for another model?"
            )
        if gradient.device not in on_device:
            on_device[gradient.device] = dropped.to(gradient.device)
        shape = [-1 if index == axis else 1 for index in range(gradient.ndim)]
        return gradient.masked_fill(on_device[gradient.device].view(shape), 0)

    return change

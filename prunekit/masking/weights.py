"""Weight masks: what a plan prunes is exactly zero, whoever writes to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.hooks import HookOwner, refuse_compiled
from prunekit.masking.targets import MaskedTensor, masked_tensors
from prunekit.planning import Plan


class WeightMasks(HookOwner):
    """Keeps the pruned entries of a model's parameters and buffers at exactly 0.0, as a context manager.

    They are zeroed on enter, after every step of `optimizer`, after `load_state_dict`, and before every forward of the
    module that owns them. Every forward writes: a version counter would not tell (fused optimizers, `.data` and EMA
    writes do not move it). Writing all of resnet34's 21 million weights takes 10 ms on one CPU core, 2 to 3 % of a
    training step on 64 images of 32 pixels.

    Buffers count too: `running_mean` is 0 where a channel is pruned, `running_var` is left as it is.

    Leaving the masks removes the hooks and leaves the zeros, unless `restore` is set.

    Args:
        model: changed in place, and only where the plan prunes.
        plan: which entries are pruned.
        optimizer: the optimizer in use, or a wrapper with an `optimizer` attribute such as Accelerate's. Without it
            the entries are zero in every forward pass, but not between a step and the next one.
        restore: whether leaving brings back the values that the pruned entries had on enter. What was trained
            meanwhile stays.

    Raises:
        PlanError: the plan does not fit the model.
        ModelError: on enter, when the model is compiled: hooks added after `torch.compile` are silently ignored.
    """

    def __init__(self, model: nn.Module, plan: Plan, optimizer: Optimizer | None = None, *, restore: bool = False):
        super().__init__()
        self._model = model
        self._optimizer = None if optimizer is None else inner_optimizer(optimizer)
        self._masked = masked_tensors(model, plan, buffers=True)
        self._restore = restore

    def register(self) -> None:
        """Zeroes the pruned entries and registers what keeps them so."""
        refuse_compiled(self._model, type(self).__name__)
        if self._restore:
            self.own(_DenseValues(list(self._masked.values())))
        for module, masked in self._masked.values():
            self._watch(module, masked)
        if self._optimizer is not None:

            def after_step(optimizer: Optimizer, arguments: Any, named: Any) -> None:
                self._zero()

            self.own(self._optimizer.register_step_post_hook(after_step))
        self._zero()

    def _zero(self) -> None:
        for module, masked in self._masked.values():
            _zero(module, masked)

    def _watch(self, module: nn.Module, masked: list[MaskedTensor]) -> None:
        # Closures that act on the module they are given, and not bound methods: deepcopy of a model copies its hooks,
        # and must neither copy this owner with them nor keep masking a copy after the owner has left.
        def zero(module: nn.Module, *_: Any) -> None:
            if self.active:
                _zero(module, masked)

        self.own(module.register_forward_pre_hook(zero))
        self.own(module.register_load_state_dict_post_hook(zero))  # type: ignore[no-untyped-call]


class _DenseValues:
    """What the pruned entries held on enter; `remove` writes it back."""

    def __init__(self, masked: list[tuple[nn.Module, list[MaskedTensor]]]) -> None:
        self._saved: list[tuple[nn.Module, MaskedTensor, Tensor]] = []
        for module, tensors in masked:
            for tensor in tensors:
                values = tensor.of(module).detach()
                self._saved.append((module, tensor, values[tensor.entries.dropped(values)]))

    def remove(self) -> None:
        while self._saved:
            module, tensor, values = self._saved.pop()
            dense = tensor.of(module).detach()
            dense[tensor.entries.dropped(dense)] = values.to(dense.device, dense.dtype)


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that really steps, inside wrappers that keep it in `.optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


@torch.no_grad()
def _zero(module: nn.Module, masked: list[MaskedTensor]) -> None:
    for tensor in masked:
        tensor.zero_(module)

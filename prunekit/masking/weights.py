"""Weight masks: what a plan prunes is exactly zero, whoever writes to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from prunekit.channels.narrowed import NarrowNorms
from prunekit.hooks import HookOwner, OwnedHook, never_called, refuse_compiled
from prunekit.masking.targets import Entries, MaskedTensor, masked_tensors
from prunekit.masking.untouched import MaskedModule
from prunekit.planning import Plan


class WeightMasks(HookOwner):
    """Keeps the pruned entries of a model's parameters and buffers at exactly 0.0, as a context manager.

    They are zeroed on enter, after every step of `optimizer`, after `load_state_dict`, and before every forward of the
    model, or of a module that is called by itself, if they may have been written to since (see `Untouched`): by another
    optimizer, by `.data` and EMA writes, by whoever. Where nothing was, a forward pass on the CPU costs nearly what it
    costs without masks; on other devices every forward writes.

    Buffers count too: `running_mean` is 0 where a channel is pruned, `running_var` is left as it is.

    Norms over several channels (LayerNorm, GroupNorm, RMSNorm) see only the kept ones, as in the compact model: see
    `NarrowNorms`. Each of them that loses channels runs twice.

    Leaving the masks removes the hooks and leaves the zeros, unless `restore` is set. A model with such norms then
    computes something else: its norms average over the zeros too.

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
        self.entries: Entries = {}
        self._model = model
        self._optimizer = None if optimizer is None else inner_optimizer(optimizer)
        self._found = masked_tensors(model, plan, self.entries, buffers=True)
        self._masked = {path: MaskedModule(module, masked) for path, (module, masked) in self._found.items()}
        self._restore = restore
        self._norms = NarrowNorms(model, plan.channel_map, plan.keep)

    def register(self) -> None:
        """Zeroes the pruned entries and registers what keeps them so."""
        refuse_compiled(self._model, type(self).__name__)
        if self._restore:
            self.own(_DenseValues(list(self._found.values())))
        self._norms.__enter__()
        self.own(self._norms)
        self._running = 0
        self.own_forward_pre(self._model, self._begin, again=True)
        for path, masked in self._masked.items():
            self._watch(path, masked)
        self.own_forward(self._model, self._end, again=True, always=True)
        if self._optimizer is not None:
            self.own(self._optimizer.register_step_post_hook(OwnedHook(self, self._zero)))
        self.own(register_optimizer_step_post_hook(OwnedHook(self, self._after_any_step)))
        self._zero()

    def _begin(self, *_: Any) -> None:
        # All at once, and not each before its own module: among the convolutions the same few reads take ten times
        # as long, because nothing is in the cache any more.
        if self._running == 0:
            for masked in self._masked.values():
                masked.zero_if_touched_()
        self._running += 1  # a model may call itself

    def _end(self, *_: Any) -> None:
        self._running = max(0, self._running - 1)  # the masks may have been entered while the model ran

    def _after_any_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if optimizer is not self._optimizer:
            for masked in self._masked.values():
                masked.forget()

    def _zero(self, *_: Any) -> None:
        for masked in self._masked.values():
            masked.zero_()

    def _watch(self, path: str, masked: MaskedModule) -> None:
        def before(*_: Any) -> None:
            if self._running == 0:  # called by itself, or recomputed by activation checkpointing
                masked.zero_if_touched_()

        # A module that is only read from, as attention reads its output projection, is masked before its parent runs.
        unread = never_called(masked.module)
        runs = self._model.get_submodule(path.rpartition(".")[0]) if unread else masked.module
        self.own_forward_pre(runs, before, again=True)
        self.own(masked.module.register_load_state_dict_post_hook(OwnedHook(self, masked.zero_)))  # type: ignore[no-untyped-call]


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

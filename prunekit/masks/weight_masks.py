"""Weight masks: what a plan prunes is exactly zero, whoever writes to it.

What pruned entries held when they were pruned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.distributed.process_group import is_sharded
from prunekit.errors import ArtifactError, ModelError, UsageError
from prunekit.hooks.hook import OwnedHook, never_called, refuse_compiled
from prunekit.hooks.owner import HookOwner
from prunekit.masks.mask_targets import Entries, MaskedTensor, masked_tensors, widest_masks
from prunekit.masks.write_detection import FIXED_AT_ZERO, MaskedModule
from prunekit.planning.plan import Plan, require_plan


class HeldValues:
    """The values at all pruned entries of a model's parameters and buffers, taken when it is made.

    The variances of BatchNorms are among them: the masks leave them, but a channel that is zero has none, and they
    would be next to nothing when it comes back.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._tensors: dict[str, tuple[nn.Module, MaskedTensor]] = {}
        self.values: dict[str, Tensor] = {}
        """By tensor name: (pruned entries,), in the order of their indices."""
        for module, tensors in masked_tensors(model, plan, {}, buffers=True, variances=True).values():
            for tensor in tensors:
                whole = tensor.of(module).detach()
                self._tensors[tensor.name] = module, tensor
                self.values[tensor.name] = whole[tensor.entries.dropped(whole)]

    def write_back(self) -> None:
        """Write the values to where they were."""
        with torch.no_grad():
            for name, (module, tensor) in self._tensors.items():
                whole = tensor.of(module).detach()
                whole[tensor.entries.dropped(whole)] = self.values[name].to(whole.device, whole.dtype)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Hold other values of the same entries, as a run that is resumed does.

        Raises:
            ArtifactError: they are not of these entries.
        """
        if {name: value.shape for name, value in values.items()} != {n: v.shape for n, v in self.values.items()}:
            raise ArtifactError("held values: expected those of what the plan prunes; were they of another plan?")
        self.values = {name: value.to(self.values[name].device) for name, value in values.items()}


class WeightMasks(HookOwner):
    """Keeps the pruned entries of a model's parameters and buffers at exactly 0.0, as a context manager.

    They are zeroed on enter, after every step of `optimizer`, after `load_state_dict`, and before every forward of the
    model, or of a module that is called by itself, if they may have been written to since (see `Untouched`): by another
    optimizer, by `.data` and EMA writes, by whoever. Where nothing was, a forward pass on the CPU costs nearly what it
    costs without masks; on other devices every forward writes. With `GradientMasks` that share their `entries`, as in
    `masked`, steps of torch's SGD and Adam write zeros there themselves, and are followed by a look (see `Resting`).

    Buffers count too: `running_mean` is 0 where a channel is pruned, `running_var` is left as it is.

    Norms over several channels (LayerNorm, GroupNorm, RMSNorm) see only the kept ones, as in the compact model: see
    `NarrowNorms`. Each of them that loses channels runs twice.

    Of a model that `fully_shard` has spread over processes, each zeroes its own shards; then it is the whole model
    that is to be called, and the values of pruned entries cannot be held.

    Leaving the masks removes the hooks and leaves the zeros, unless `restore` is set. A model with such norms then
    computes something else: its norms average over the zeros too.

    Args:
        model: changed in place, and only where the plan prunes.
        plan: which entries are pruned.
        optimizer: the optimizer in use, or a wrapper with an `optimizer` attribute such as Accelerate's. Without it
            the entries are zero in every forward pass, but not between a step and the next one.
        restore: whether leaving brings back the values that the pruned entries had on enter, and the variances of
            their BatchNorms. What was trained meanwhile stays.
        changing: whether `update` will put other plans in force. Then the hooks are on every module that some plan may
            prune, so that their order among all hooks stays, and what is pruned is held (see `update`),
            which takes as much memory as it took in the model.

    Raises:
        PlanError: the plan does not fit the model.
        ModelError: on enter, when the model is compiled: hooks added after `torch.compile` are silently ignored; or
            when it is sharded and values are to be held.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: Optimizer | None = None,
        *,
        restore: bool = False,
        changing: bool = False,
    ) -> None:
        super().__init__()
        self.entries: Entries = {}
        self._model, self._plan = model, plan
        self._optimizer = None if optimizer is None else optimizer_of(model, optimizer)
        found = masked_tensors(model, plan, self.entries, buffers=True)
        self._masked = {
            path: MaskedModule(module, found[path][1] if path in found else [])
            for path, (module, _) in (widest_masks(model, plan) if changing else found).items()
        }
        self._restore, self._changing = restore, changing
        self._held: HeldValues | None = None
        self._norms = NarrowNorms(model, plan.channel_map, plan.keep)

    def register(self) -> None:
        """Zero the pruned entries and register what keeps them so."""
        refuse_compiled(self._model, type(self).__name__)
        sharded = is_sharded(self._model)
        if sharded and (self._restore or self._changing):
            raise ModelError("WeightMasks: a sharded model's pruned values cannot be held; give restore=False")
        if self._restore or self._changing:
            self._held = HeldValues(self._model, self._plan)
            self.own_undo(self._let_go)
        self.own_context(self._norms)
        self._running = 0
        if sharded:  # before shards are put together: what is written to the whole is lost
            self.own_forward_pre(self._model, self.zero_, again=True, first=True)
        else:
            self.own_forward_pre(self._model, self._begin, again=True)
            for path, masked in self._masked.items():
                self._watch(path, masked)
            self.own_forward(self._model, self._end, again=True, always=True)
        if self._optimizer is not None:
            known = type(self._optimizer) in FIXED_AT_ZERO and not sharded
            if known:
                self.own(self._optimizer.register_step_pre_hook(OwnedHook(self, self._before_step)))
            after = self._after_step if known else self.zero_
            self.own(self._optimizer.register_step_post_hook(OwnedHook(self, after)))
        self.own(register_optimizer_step_post_hook(OwnedHook(self, self._after_any_step)))
        self.zero_()

    def update(self, plan: Plan) -> None:
        """Put another plan in force, between two steps; the hooks stay where they are.

        What the plan before pruned and this one keeps comes back with the values that it had when it was pruned, as in
        Zhu & Gupta 2017 and Sanh et al. 2020; its gradients were zero meanwhile, and so nothing else has moved it.

        Args:
            plan: of the same channel map.

        Raises:
            RuntimeError: the masks are not active, or were not made to change.
            PlanError: the plan does not fit the model.
        """
        if not (self.active and self._changing) or self._held is None:
            raise RuntimeError(f"{type(self).__name__}.update: expected active masks that were made with changing=True")
        require_plan(plan)
        self._held.write_back()
        self._plan = plan
        self.entries.clear()
        found = masked_tensors(self._model, plan, self.entries, buffers=True)
        for path, masked in self._masked.items():
            masked.replace(found[path][1] if path in found else [])
        self._norms.remove()
        self._norms = NarrowNorms(self._model, plan.channel_map, plan.keep)
        self.own_context(self._norms)
        self._held = HeldValues(self._model, plan)
        self.zero_()

    @property
    def held(self) -> HeldValues:
        """The values that pruned entries had when they were pruned.

        Raises:
            RuntimeError: the masks are not active, or hold nothing.
        """
        if self._held is None:
            raise RuntimeError(f"{type(self).__name__}.held: expected active masks made with restore or changing")
        return self._held

    def _let_go(self) -> None:
        """Write back what is held when the masks are left, if they were asked to."""
        held, self._held = self._held, None
        if held is not None and self._restore:
            held.write_back()

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
            written = _written_by(optimizer)
            for masked in self._masked.values():
                masked.forget(written)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for masked in self._masked.values():
            masked.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        alone = _steps_alone(optimizer)
        for masked in self._masked.values():
            masked.zero_moved_(optimizer, alone=alone)

    def zero_(self, *_: Any) -> None:
        """Write exact zeros to all that is pruned, now."""
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
        self.own(nn.Module.register_load_state_dict_post_hook(masked.module, OwnedHook(self, masked.zero_)))  # type: ignore[no-untyped-call]


def _steps_alone(optimizer: Optimizer) -> bool:
    """Return whether no hook of somebody else's may have written to weights around a step."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    tables = *own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    return all(isinstance(hook, OwnedHook) for table in tables for hook in table.values())


def _written_by(optimizer: Optimizer) -> frozenset[int] | None:
    """Return the addresses of the storages that a step may have written to; None: anything, as of an optimizer not
    torch's own.
    """
    if not type(optimizer).__module__.startswith("torch.optim.") or not _steps_alone(optimizer):
        return None
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def optimizer_of(model: nn.Module, optimizer: Any) -> Optimizer:
    """Return the optimizer that really steps, which has to be one of the model's.

    Raises:
        UsageError: it is none, or has none of the model's parameters.
    """
    inner = inner_optimizer(optimizer)
    if not isinstance(inner, Optimizer):
        raise UsageError(
            "optimizer: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`, got "
            f"{type(optimizer).__name__}"
        )
    own = {id(parameter) for parameter in model.parameters()}
    if own and not any(id(parameter) in own for group in inner.param_groups for parameter in group["params"]):
        raise UsageError(
            f"optimizer: expected one of this {type(model).__name__}'s parameters, but this {type(inner).__name__} has "
            "none of them; make it from model.parameters(), after the model was moved or given other parameters"
        )
    return inner


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that really steps, inside wrappers that keep it in `.optimizer`."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer

"""Weight masks: pruned entries are exactly zero after an optimizer's step, and after any other write.

Where nothing was written, a forward pass skips the mask (`WriteDetector`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.distributed.process_group import is_sharded
from prunekit.errors import ArtifactError, ModelError
from prunekit.hooks.hook import OwnedHook, never_called, refuse_compiled
from prunekit.hooks.owner import HookOwner
from prunekit.hooks.step_hooks import optimizer_of
from prunekit.masks.pruned_entries import (
    Entries,
    MaskedTensor,
    Masks,
    PrunedEntries,
    is_transformed,
    masked_tensors,
    widest_masks,
    zero_bits_,
)
from prunekit.planning.plan import Plan, require_plan

PROBES = 2
"""Pruned entries that are looked at before every forward; each may cost a read from memory."""


class WriteDetector:
    """Remembers a tensor as it was when its pruned entries were zeroed.

    Four things tell of a write. Another tensor, or other memory, stands in its place (`.to()`, `.double()`,
    `load_state_dict(assign=True)`). Its version counter has moved (any in-place operation, under `no_grad` too). An
    optimizer has stepped, whose parameters do not matter (fused ones move no counter): `forget`. Or one of a few pruned
    entries is not zero: writes through `.data` move no counter either, but overwrite everything.
    Only a write through `.data` that picks entries and spares those is detected no sooner than after the next step.

    A check takes a microsecond, where writing the zeros of a large weight takes half a millisecond. Tensors for which
    this may not hold always count as written to: those on other devices (reading an entry would wait for all queued
    work), subclasses (the shards of a distributed tensor), and those without memory or counter of their own.
    """

    __slots__ = ("_address", "_bits", "_entries", "_indices", "_masks", "_tensor", "_values", "_version")

    def __init__(self, entries: PrunedEntries) -> None:
        self._entries = entries
        self._indices: list[tuple[int, ...]] = []
        self._tensor: weakref.ref[Tensor] | None = None  # not kept alive; None: none is remembered
        self._address = self._version = 0
        self._bits: Tensor
        self._masks: Masks
        self._values: Any

    def zero_(self, tensor: Tensor) -> None:
        """Write exact zeros into the pruned entries, and remember the tensor."""
        if torch.compiler.is_compiling():  # each remembered version would be compiled again
            self._entries.zero_(tensor)
        elif self._is_same(tensor):  # as after nearly every step
            zero_bits_(self._bits, self._masks)
            self._version = tensor._version
        else:
            self._entries.zero_(tensor)
            self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_inference()
        if not plain or is_transformed(tensor):
            self._tensor = None
            return
        self._indices = self._indices or self._entries.some(PROBES, tensor.shape)
        self._tensor, self._address, self._version = weakref.ref(tensor), tensor.data_ptr(), tensor._version
        self._masks = self._entries.masks(tensor)
        self._bits = tensor.data.view(self._masks[0].dtype)
        self._values = self._bits.numpy()

    def unwritten(self, tensor: Tensor) -> bool:
        """Return whether nothing can have been written to the tensor since it was zeroed."""
        return self._is_same(tensor) and tensor._version == self._version and self._probes_are_zero()

    def forget(self) -> None:
        """Count the tensor as written to."""
        self._version = -1

    def _is_same(self, tensor: Tensor) -> bool:
        """Return whether this is the remembered tensor, in the same memory."""
        return self._tensor is not None and self._tensor() is tensor and tensor.data_ptr() == self._address

    def _probes_are_zero(self) -> bool:
        for index in self._indices:  # noqa: SIM110  # `all` over a generator takes twice as long
            if self._values[index]:
                return False
        return True


class WeightMasks(HookOwner):
    """Masks that keep the pruned entries of a model's weights and buffers at exactly 0.0, as a context manager.

    They are zeroed on enter, after every step of `optimizer`, after `load_state_dict`, and before every forward of the
    model, or of a module that is called by itself, if they may have been written to since (see `WriteDetector`): by
    another optimizer, by `.data` and EMA writes, by anything. Where nothing was written, a forward pass on the CPU
    costs nearly what it costs without masks; on other devices every forward writes.

    Buffers count too: `running_mean` is 0 where a channel is pruned, `running_var` is left as it is.

    Norms over several channels (LayerNorm, GroupNorm, RMSNorm) see only the kept ones, as in the compact model: see
    `NarrowNorms`. Each of them that loses channels runs twice.

    Each process zeroes its own shards of a model that `fully_shard` has spread over processes; then the whole model has
    to be called, and the values of pruned entries cannot be held.

    Leaving the masks removes the hooks and keeps the zeros, unless `restore` is set. A model with such norms then
    computes something else: its norms average over the zeros too.

    The optimizer may be in a wrapper that keeps it in `.optimizer`. Without one the entries are zero in every forward
    pass, but not between a step and the next one. With `restore`, leaving brings back the values that the pruned
    entries had on enter, and the variances of their BatchNorms; kept weights stay as they were trained. With
    `changing`, `update` may be called: the hooks are then on every module that some plan may prune, so that their order
    among all hooks stays, and the pruned values are held, which takes as much memory as they took in the model.

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
        self._held: PrunedValues | None = None
        self._norms = NarrowNorms(model, plan.channel_map, plan.keep)

    def register(self) -> None:
        """Zero the pruned entries and register the hooks that keep them zero."""
        refuse_compiled(self._model, type(self).__name__)
        sharded = is_sharded(self._model)
        if sharded and (self._restore or self._changing):
            raise ModelError("WeightMasks: a sharded model's pruned values cannot be held; give restore=False")
        if self._restore or self._changing:
            self._held = PrunedValues(self._model, self._plan)
            self.own_undo(self._restore_values)
        self.own_context(self._norms)
        self._running = 0
        if sharded:  # before shards are gathered: writes to the gathered tensor are lost
            self.own_forward_pre(self._model, self.zero_, first=True)
        else:
            self.own_forward_pre(self._model, self._begin)
            for path, masked in self._masked.items():
                self._zero_before_forward(path, masked)
            self.own_forward(self._model, self._end, always=True)
        if self._optimizer is not None:
            self.own(self._optimizer.register_step_post_hook(OwnedHook(self, self.zero_)))
        self.own(register_optimizer_step_post_hook(OwnedHook(self, self._after_other_step)))
        self.zero_()

    def update(self, plan: Plan, *, from_zero: bool = False) -> None:
        """Mask by another plan, between two steps; the hooks stay where they are.

        Entries that the plan before pruned and this one keeps come back with the values that they had when they were
        pruned, as in Zhu & Gupta 2017 and Sanh et al. 2020; with `from_zero` single weights begin at zero instead
        (Evci et al. 2020). Their gradients were zero meanwhile.
        """
        if not (self.active and self._changing) or self._held is None:
            raise RuntimeError(f"{type(self).__name__}.update: expected active masks that were made with changing=True")
        require_plan(plan)
        self._held.write_back()
        if from_zero:
            self._zero_returning(plan)
        self._plan = plan
        self.entries.clear()
        found = masked_tensors(self._model, plan, self.entries, buffers=True)
        for path, masked in self._masked.items():
            masked.replace(found[path][1] if path in found else [])
        self._norms.remove()
        self._norms = NarrowNorms(self._model, plan.channel_map, plan.keep)
        self.own_context(self._norms)
        self._held = PrunedValues(self._model, plan)
        self.zero_()

    @torch.no_grad()
    def _zero_returning(self, plan: Plan) -> None:
        for name, before in self._plan.element_masks.items():
            parameter = self._model.get_parameter(name)
            returning = ~before if name not in plan.element_masks else ~before & plan.element_masks[name]
            parameter.masked_fill_(returning.to(parameter.device), 0)

    @property
    def held(self) -> PrunedValues:
        """The values that pruned entries had when they were pruned."""
        if self._held is None:
            raise RuntimeError(f"{type(self).__name__}.held: expected active masks made with restore or changing")
        return self._held

    def _restore_values(self) -> None:
        """Write the held values back when the masks are left, if `restore` is set."""
        if self._held is not None and self._restore:
            self._held.write_back()
        self._held = None

    def _begin(self, *_: Any) -> None:
        # All at once, and not each before its own module: among the convolutions the same few reads take ten times
        # as long, because nothing is in the cache any more.
        if self._running == 0:
            for masked in self._masked.values():
                masked.zero_if_written_()
        self._running += 1  # a model may call itself

    def _end(self, *_: Any) -> None:
        self._running = max(0, self._running - 1)  # the masks may have been entered while the model ran

    def _after_other_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if optimizer is not self._optimizer:
            for masked in self._masked.values():
                masked.forget()

    def zero_(self, *_: Any) -> None:
        """Write exact zeros into all pruned entries."""
        for masked in self._masked.values():
            masked.zero_()

    def _zero_before_forward(self, path: str, masked: MaskedModule) -> None:
        def before(*_: Any) -> None:
            if self._running == 0:  # called by itself, or recomputed by activation checkpointing
                masked.zero_if_written_()

        # A module that is only read from, as attention reads its output projection, is masked before its parent runs.
        unread = never_called(masked.module)
        runs = self._model.get_submodule(path.rpartition(".")[0]) if unread else masked.module
        self.own_forward_pre(runs, before)
        self.own(nn.Module.register_load_state_dict_post_hook(masked.module, OwnedHook(self, masked.zero_)))  # type: ignore[no-untyped-call]


class MaskedModule:
    """A module whose own tensors have pruned entries; writes the zeros there, and skips writes that are not needed."""

    def __init__(self, module: nn.Module, tensors: list[MaskedTensor]) -> None:
        self.module = module
        self.replace(tensors)

    def replace(self, tensors: list[MaskedTensor]) -> None:
        """Mask these tensors from now on, as another plan does."""
        self._watched = [(tensor, WriteDetector(tensor.entries)) for tensor in tensors]

    def zero_(self, *_: Any) -> None:
        """Write exact zeros into the pruned entries."""
        for tensor, writes in self._watched:
            writes.zero_(tensor.of(self.module))

    def zero_if_written_(self) -> None:
        """Write the zeros if anything may have been written to since, and always while `torch.compile` traces."""
        if torch.compiler.is_compiling():
            self.zero_()
            return
        for tensor, writes in self._watched:
            if not writes.unwritten(tensor.of(self.module)):
                self.zero_()
                return

    def forget(self) -> None:
        """Count every tensor as written to."""
        for _, writes in self._watched:
            writes.forget()


class PrunedValues:
    """The values at all pruned entries of a model's parameters and buffers when this is made.

    The variances of BatchNorms are among them: the masks do not change them, but the variance of a channel that is zero
    falls to almost nothing by the time it comes back.
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

    def whole(self, name: str) -> Tensor | None:
        """Return the values of a tensor in its shape, zero at entries that are not pruned; None if none are."""
        if name not in self._tensors:
            return None
        module, tensor = self._tensors[name]
        whole = torch.zeros_like(tensor.of(module).detach())
        whole[tensor.entries.dropped(whole)] = self.values[name].to(whole.device, whole.dtype)
        return whole

    def replace(self, name: str, whole: Tensor, where: Tensor) -> None:
        """Hold other values of some of a tensor's pruned entries; values and entries (bool) in the tensor's shape."""
        module, tensor = self._tensors[name]
        pruned = tensor.entries.dropped(tensor.of(module).detach())
        self.values[name] = torch.where(where[pruned], whole[pruned], self.values[name])

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Hold other values of the same entries, as a run that is resumed does."""
        if {name: value.shape for name, value in values.items()} != {n: v.shape for n, v in self.values.items()}:
            raise ArtifactError("held values: expected those of the plan's pruned entries; are they of another plan?")
        self.values = {name: value.to(self.values[name].device) for name, value in values.items()}

"""Whether a masked tensor may have been written to since its zeros were: what lets a forward pass skip the mask.

Steps of an optimizer that leave pruned entries at zero by themselves: what lets weight masks skip the write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from prunekit.masks.mask_targets import LastSeen, MaskedTensor, Masks, PrunedEntries, is_transformed, zero_bits_

FIXED_AT_ZERO = (SGD, Adam, AdamW)
"""Exactly these, no subclass: each entry's step depends on that entry alone, and is +0.0 where the weight, its gradient
and its state are."""


class Resting:
    """What an optimizer keeps of one parameter (momentum, moments), known to be zero where the parameter is pruned.

    A step then writes zeros over zeros there, if the gradient was masked too. The state is searched once; from then on
    it is zero because every such step leaves it so, as long as it is the same memory with the same version counters
    before a step as after the one before. State that was not zero, as when masks come after momentum, is searched again
    after 1, 2, 4, ... steps.
    """

    __slots__ = ("_entries", "_patience", "_state", "_waited")

    def __init__(self, entries: PrunedEntries) -> None:
        self._entries = entries
        self._state: list[LastSeen] | None = None
        self._patience = self._waited = 0

    def before_step(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Return whether the optimizer's state is zero where the parameter is pruned."""
        if self._state is None:
            return False
        now = _state(optimizer, parameter)
        pairs = zip(self._state, now, strict=False)
        return len(now) == len(self._state) and all(seen.unwritten(tensor) for seen, tensor in pairs)

    def masked_gradient(self, parameter: Tensor) -> bool:
        """Return whether the gradient that a step has just used was zero there; looked at after the step, which
        keeps it.
        """
        return parameter.grad is not None and self._entries.is_masked(parameter.grad)

    def rested(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """A step left all as it was: whatever it wrote to is known by its new version counter."""
        self._state = [LastSeen(tensor) for tensor in _state(optimizer, parameter)]

    def moved(self, optimizer: Optimizer, parameter: Tensor, *, search: bool) -> None:
        """A step may have written anything; what it left is searched where that is wanted and the next may rest."""
        self._state = None
        if not (search and self.masked_gradient(parameter)):
            return
        self._waited += 1
        if self._waited < self._patience:
            return
        state = _state(optimizer, parameter)
        if any(self._entries.any_in(tensor) for tensor in state):
            self._patience, self._waited = max(1, 2 * self._patience), 0
        else:
            self._state = [LastSeen(tensor) for tensor in state]


def _state(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """Return tensors that the optimizer keeps for each entry of a parameter."""
    kept = optimizer.state.get(parameter, {})
    return [value for value in kept.values() if isinstance(value, Tensor) and value.shape == parameter.shape]


PROBES = 2
"""Pruned entries that are looked at before every forward; each may cost a read from memory."""


class Untouched:
    """Remembers a tensor as it was when its pruned entries were zeroed.

    Four things tell of a write. Another tensor, or other memory, stands in its place (`.to()`, `.double()`,
    `load_state_dict(assign=True)`). Its version counter has moved (any in-place operation, under `no_grad` too). An
    optimizer has stepped (fused ones move no counter), unless it is one of torch's with other parameters: `forget`. Or
    one of a few pruned entries is not zero: writes through `.data` move no counter either, but overwrite everything.
    Only a write through `.data` that picks entries and spares those is seen no sooner than after the next step.

    Asking takes a microsecond, where writing the zeros of a large weight takes half a millisecond. Tensors of which
    this is not known to hold are never called untouched: those on other devices (reading an entry would wait for all
    queued work), subclasses (the shards of a distributed tensor), and those without memory or counter of their own.
    """

    __slots__ = ("_bits", "_entries", "_indices", "_masks", "_seen", "_values")

    def __init__(self, entries: PrunedEntries) -> None:
        self._entries = entries
        self._indices: list[tuple[int, ...]] = []
        self._seen: LastSeen | None = None
        self._bits: Tensor
        self._masks: Masks
        self._values: Any

    def forget(self, written: frozenset[int] | None) -> None:
        """Take it that the tensor was written to, if it lies in a storage at one of these addresses; None: anyhow."""
        if self._seen is not None and (written is None or self._bits.untyped_storage().data_ptr() in written):
            self._seen.forget()

    def zero_(self, tensor: Tensor) -> None:
        """Write exact zeros into the pruned entries, and remembers the tensor."""
        if torch.compiler.is_compiling():  # what is remembered would have each version compiled anew
            self._entries.zero_(tensor)
        elif self._seen is not None and self._seen.is_still(tensor):  # as after nearly every step: all is at hand
            zero_bits_(self._bits, self._masks)
            self._seen.again(tensor)
        else:
            self._entries.zero_(tensor)
            self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_inference()
        if not plain or is_transformed(tensor):
            self._seen = None
            return
        self._indices = self._indices or self._entries.some(PROBES, tensor.shape)
        self._seen = LastSeen(tensor)
        self._masks = self._entries.masks(tensor)
        self._bits = tensor.data.view(self._masks[0].dtype)
        self._values = self._bits.numpy()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether nothing can have been written to the tensor since then."""
        return self._seen is not None and self._seen.unwritten(tensor) and self._probed()

    def held(self, tensor: Tensor) -> bool:
        """Return whether a write that is known of has left it as it was; from now on nothing was written."""
        if self._seen is None or not self._seen.is_still(tensor) or not self._probed():
            return False
        self._seen.again(tensor)
        return True

    def _probed(self) -> bool:
        for index in self._indices:  # noqa: SIM110  # `all` over a generator takes twice as long
            if self._values[index]:
                return False
        return True


@dataclass(slots=True)
class _Watched:
    """One of a module's tensors, and what is known of it."""

    tensor: MaskedTensor
    untouched: Untouched
    resting: Resting
    rests: bool = False


class MaskedModule:
    """A module with what of its own tensors is pruned."""

    def __init__(self, module: nn.Module, masked: list[MaskedTensor]) -> None:
        self.module = module
        self.replace(masked)

    def replace(self, masked: list[MaskedTensor]) -> None:
        """Another plan prunes something else of the module."""
        self._watched = [_Watched(found, Untouched(found.entries), Resting(found.entries)) for found in masked]

    def zero_(self, *_: Any) -> None:
        """Write exact zeros into the pruned entries."""
        for watched in self._watched:
            watched.untouched.zero_(watched.tensor.of(self.module))

    def forget(self, written: frozenset[int] | None) -> None:
        """Take it that everything in storages at these addresses was written to; None: in any."""
        for watched in self._watched:
            watched.untouched.forget(written)

    def zero_if_touched_(self, *_: Any) -> None:
        """The same where anything may have been written since, and always while `torch.compile` traces."""
        if torch.compiler.is_compiling():
            self.zero_()
            return
        module = self.module
        for watched in self._watched:
            if not watched.untouched.holds(watched.tensor.of(module)):
                self.zero_()
                return

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at what a step of one of `FIXED_AT_ZERO` finds; not while `torch.compile` traces it."""
        if torch.compiler.is_compiling():
            return
        for watched in self._watched:
            tensor = watched.tensor.of(self.module)
            watched.rests = watched.resting.before_step(optimizer, tensor) and watched.untouched.holds(tensor)

    def zero_moved_(self, optimizer: Optimizer, *, alone: bool) -> None:
        """After that step: writes the zeros, but where it wrote zeros itself (see `Resting`).

        Args:
            alone: nothing but the step can have written.
        """
        if torch.compiler.is_compiling():
            self.zero_()
            return
        for watched in self._watched:
            tensor, resting = watched.tensor.of(self.module), watched.resting
            if alone and watched.rests and resting.masked_gradient(tensor) and watched.untouched.held(tensor):
                resting.rested(optimizer, tensor)
            else:
                watched.untouched.zero_(tensor)
                resting.moved(optimizer, tensor, search=alone and watched.untouched.holds(tensor))
            watched.rests = False

"""Write detection: whether a masked tensor may have been written to since its pruned entries were zeroed.

Where nothing was written, a forward pass skips the mask (`WriteDetector`), and so does a step of an optimizer that
leaves zeros at zero by itself (`OptimizerZeros`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.masks.pruned_entries import Masks, PrunedEntries, TensorVersion, is_transformed, zero_bits_

PROBES = 2
"""Pruned entries that are looked at before every forward; each may cost a read from memory."""


class WriteDetector:
    """Remembers a tensor as it was when its pruned entries were zeroed.

    Four things tell of a write. Another tensor, or other memory, stands in its place (`.to()`, `.double()`,
    `load_state_dict(assign=True)`). Its version counter has moved (any in-place operation, under `no_grad` too). An
    optimizer has stepped (fused ones move no counter), unless it is one of torch's with other parameters: `forget`. Or
    one of a few pruned entries is not zero: writes through `.data` move no counter either, but overwrite everything.
    Only a write through `.data` that picks entries and spares those is detected no sooner than after the next step.

    A check takes a microsecond, where writing the zeros of a large weight takes half a millisecond. Tensors for which
    this may not hold always count as written to: those on other devices (reading an entry would wait for all queued
    work), subclasses (the shards of a distributed tensor), and those without memory or counter of their own.
    """

    __slots__ = ("_bits", "_entries", "_indices", "_masks", "_values", "_version")

    def __init__(self, entries: PrunedEntries) -> None:
        self._entries = entries
        self._indices: list[tuple[int, ...]] = []
        self._version: TensorVersion | None = None
        self._bits: Tensor
        self._masks: Masks
        self._values: Any

    def zero_(self, tensor: Tensor) -> None:
        """Write exact zeros into the pruned entries, and remember the tensor."""
        if torch.compiler.is_compiling():  # each remembered version would be compiled again
            self._entries.zero_(tensor)
        elif self._version is not None and self._version.same_memory(tensor):  # as after nearly every step
            zero_bits_(self._bits, self._masks)
            self._version.renew(tensor)
        else:
            self._entries.zero_(tensor)
            self._remember(tensor)

    def _remember(self, tensor: Tensor) -> None:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_inference()
        if not plain or is_transformed(tensor):
            self._version = None
            return
        self._indices = self._indices or self._entries.some(PROBES, tensor.shape)
        self._version = TensorVersion(tensor)
        self._masks = self._entries.masks(tensor)
        self._bits = tensor.data.view(self._masks[0].dtype)
        self._values = self._bits.numpy()

    def unwritten(self, tensor: Tensor) -> bool:
        """Return whether nothing can have been written to the tensor since it was zeroed."""
        return self._version is not None and self._version.unwritten(tensor) and self._probes_are_zero()

    def survived(self, tensor: Tensor) -> bool:
        """Return whether the zeros survived a known write; if so the tensor counts as unwritten again."""
        if self._version is None or not self._version.same_memory(tensor) or not self._probes_are_zero():
            return False
        self._version.renew(tensor)
        return True

    def forget(self, written: frozenset[int] | None) -> None:
        """Count the tensor as written to if it lies in a storage at one of these addresses; None: in any case."""
        if self._version is not None and (written is None or self._bits.untyped_storage().data_ptr() in written):
            self._version.forget()

    def _probes_are_zero(self) -> bool:
        for index in self._indices:  # noqa: SIM110  # `all` over a generator takes twice as long
            if self._values[index]:
                return False
        return True


class OptimizerZeros:
    """An optimizer's state of one parameter (momentum, moments), known to be zero where the parameter is pruned.

    A step then writes zeros over zeros there, if the gradient was masked too. The state is searched once; from then on
    it is zero because every such step leaves it so, as long as it is the same memory with the same version counters
    before a step as after the one before. State that was not zero, as when masks come after momentum, is searched again
    after 1, 2, 4, ... steps.
    """

    __slots__ = ("_entries", "_patience", "_versions", "_waited")

    def __init__(self, entries: PrunedEntries) -> None:
        self._entries = entries
        self._versions: list[TensorVersion] | None = None
        self._patience = self._waited = 0

    def unwritten(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        """Return whether the optimizer's state is still zero where the parameter is pruned, before a step."""
        if self._versions is None:
            return False
        state = _entrywise_state(optimizer, parameter)
        pairs = zip(self._versions, state, strict=False)
        return len(state) == len(self._versions) and all(version.unwritten(tensor) for version, tensor in pairs)

    def gradient_masked(self, parameter: Tensor) -> bool:
        """Return whether the gradient that a step has just used, and left, was zero at the pruned entries."""
        return parameter.grad is not None and self._entries.is_masked(parameter.grad)

    def renew(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Take the state as it is after a step that wrote zeros over zeros."""
        self._versions = [TensorVersion(tensor) for tensor in _entrywise_state(optimizer, parameter)]

    def forget(self) -> None:
        """Count the state as written to."""
        self._versions = None

    def search(self, optimizer: Optimizer, parameter: Tensor) -> None:
        """Search the state for values at pruned entries, unless too few steps passed since some were found."""
        self._waited += 1
        if self._waited < self._patience:
            return
        state = _entrywise_state(optimizer, parameter)
        if any(self._entries.any_in(tensor) for tensor in state):
            self._patience, self._waited = max(1, 2 * self._patience), 0
        else:
            self._versions = [TensorVersion(tensor) for tensor in state]


def _entrywise_state(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """Return tensors that the optimizer keeps for each entry of a parameter."""
    state = optimizer.state.get(parameter, {})
    return [value for value in state.values() if isinstance(value, Tensor) and value.shape == parameter.shape]

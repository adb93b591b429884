"""Whether a masked tensor may have been written to since its zeros were: what lets a forward pass skip the mask."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.masking.targets import BITS, MaskedTensor, PrunedEntries, is_transformed

PROBES = 2
"""Pruned entries that are looked at before every forward; each may cost a read from memory."""


class Untouched:
    """Remembers a tensor as it was when its pruned entries were zeroed.

    Four things tell of a write. Another tensor, or other memory, stands in its place (`.to()`, `.double()`,
    `load_state_dict(assign=True)`). Its version counter has moved (any in-place operation, under `no_grad` too). An
    optimizer has stepped, whichever it was: `forget` (fused ones move no counter). Or one of a few pruned entries is
    not zero: writes through `.data` move no counter either, but overwrite everything. Only a write through `.data`
    that picks entries and spares those is seen no sooner than after the next step.

    Asking takes a microsecond, where writing the zeros of a large weight takes half a millisecond. Tensors of which
    this is not known to hold are never called untouched: those on other devices (reading an entry would wait for all
    queued work), subclasses (the shards of a distributed tensor), and those without memory or counter of their own.
    """

    __slots__ = ("_address", "_entries", "_indices", "_tensor", "_values", "_version")

    def __init__(self, entries: PrunedEntries) -> None:
        self._entries = entries
        self._indices: list[tuple[int, ...]] = []
        self.forget()

    def forget(self) -> None:
        """Takes it that the tensor was written to."""
        self._tensor: weakref.ref[Tensor] | None = None
        self._address = self._version = -1
        self._values: Any = None

    def remember(self, tensor: Tensor) -> None:
        """Notes that the pruned entries have just been zeroed."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_inference()
        if not plain or is_transformed(tensor):
            self.forget()
            return
        self._indices = self._indices or self._entries.some(PROBES, tensor.shape)
        self._tensor, self._address, self._version = weakref.ref(tensor), tensor.data_ptr(), tensor._version
        self._values = tensor.detach().view(BITS[tensor.element_size()]).numpy()

    def holds(self, tensor: Tensor) -> bool:
        """Whether nothing can have been written to the tensor since then."""
        if self._tensor is None or self._tensor() is not tensor:
            return False
        if tensor._version != self._version or tensor.data_ptr() != self._address:
            return False
        for index in self._indices:  # noqa: SIM110  # `all` over a generator takes twice as long
            if self._values[index]:
                return False
        return True


class MaskedModule:
    """A module with what of its own tensors is pruned."""

    def __init__(self, module: nn.Module, masked: list[MaskedTensor]) -> None:
        self.module = module
        self._masked = [(tensor, Untouched(tensor.entries)) for tensor in masked]

    @torch.no_grad()
    def zero_(self, *_: Any) -> None:
        """Writes exact zeros into the pruned entries."""
        for masked, untouched in self._masked:
            tensor = masked.of(self.module)
            masked.entries.zero_(tensor)
            if not torch.compiler.is_compiling():  # each version would be compiled anew
                untouched.remember(tensor)

    def forget(self) -> None:
        """Takes it that everything was written to."""
        for _, untouched in self._masked:
            untouched.forget()

    def zero_if_touched_(self, *_: Any) -> None:
        """The same where anything may have been written since, and always while `torch.compile` traces."""
        if torch.compiler.is_compiling():
            self.zero_()
            return
        module = self.module
        for masked, untouched in self._masked:
            if not untouched.holds(masked.of(module)):
                self.zero_()
                return

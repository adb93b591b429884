"""Whether a masked tensor may have been written to since its zeros were: what lets a forward pass skip the mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prunekit.masking.targets import BITS, MaskedTensor, PrunedEntries, is_transformed

PROBES = 8
"""Pruned entries that are looked at before every forward."""


class Untouched:
    """Remembers a tensor as it was when its pruned entries were zeroed.

    Four things tell of a write. Another tensor, or other memory, stands in its place (`.to()`, `.double()`,
    `load_state_dict(assign=True)`). Its version counter has moved (any in-place operation, under `no_grad` too). An
    optimizer has stepped, whichever it was: `forget` (fused ones move no counter). Or one of a few pruned entries,
    spread over the tensor, is not zero: writes through `.data` move no counter either, but overwrite everything. Only
    a write through `.data` that picks entries and spares those is seen no sooner than after the next step.

    Reading these takes half a microsecond, where writing the zeros of a large weight takes half a millisecond. Tensors
    of which this is not known to hold are never called untouched: those on other devices (reading an entry would wait
    for all queued work), subclasses (the shards of a distributed tensor), and everything while `torch.compile` traces
    (each version would be compiled anew).
    """

    def __init__(self, entries: PrunedEntries) -> None:
        self._entries = entries
        self._indices: list[tuple[int, ...]] = []
        self._state: tuple[int, int, int] | None = None
        self._values: Any = None

    def remember(self, tensor: Tensor) -> None:
        """Notes that the pruned entries have just been zeroed."""
        if not torch.compiler.is_compiling():
            self._state = _state(tensor)
            if self._state is not None:
                self._indices = self._indices or self._entries.some(PROBES, tensor.shape)
                self._values = tensor.detach().view(BITS[tensor.element_size()]).numpy()

    def forget(self) -> None:
        """Takes it that the tensor was written to."""
        self._state = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether nothing can have been written to the tensor since then."""
        if torch.compiler.is_compiling() or self._state is None or self._state != _state(tensor):
            return False
        for index in self._indices:  # noqa: SIM110  # `all` over a generator takes twice as long
            if self._values[index]:
                return False
        return True


def _state(tensor: Tensor) -> tuple[int, int, int] | None:
    known = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and not tensor.is_inference()
    if not known or is_transformed(tensor):  # which has no memory of its own
        return None
    return (id(tensor), tensor.data_ptr(), tensor._version)


class MaskedModule:
    """A module with what of its own tensors is pruned."""

    def __init__(self, module: nn.Module, masked: list[MaskedTensor]) -> None:
        self.module = module
        self._masked = [(tensor, Untouched(tensor.entries)) for tensor in masked]

    @torch.no_grad()
    def zero_(self) -> None:
        """Writes exact zeros into the pruned entries."""
        for masked, untouched in self._masked:
            tensor = masked.of(self.module)
            masked.entries.zero_(tensor)
            untouched.remember(tensor)

    def forget(self) -> None:
        """Takes it that everything was written to."""
        for _, untouched in self._masked:
            untouched.forget()

    def zero_if_touched_(self) -> None:
        """The same where anything may have been written since."""
        for masked, untouched in self._masked:
            if not untouched.holds(masked.of(self.module)):
                self.zero_()
                return

"""Whether a masked tensor may have been written to since its zeros were: what lets a forward pass skip the mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prunekit.masking.targets import BITS, MaskedTensor, PrunedEntries

PROBES = 8
"""Pruned entries that are looked at before every forward."""


class Untouched:
    """Remembers a tensor as it was when its pruned entries were zeroed.

    Three things tell of a write. Another tensor, or other memory, stands in its place (`.to()`, `.double()`,
    `load_state_dict(assign=True)`). Its version counter has moved (any in-place operation of autograd's, or under
    `no_grad`). Or one of a few pruned entries, spread over the tensor, is not zero: writes through `.data` and by fused
    optimizers move no counter, and they write everything. Only a write through `.data` that picks entries and spares
    those is seen no sooner than after the next step.

    Reading these takes half a microsecond, where writing the zeros of a large weight takes half a millisecond. Tensors
    of which this is not known to hold are never called untouched: those on other devices (reading an entry would wait
    for all queued work), subclasses (the shards of a distributed tensor), and everything while `torch.compile` traces
    (each version would be compiled anew).
    """

    def __init__(self, entries: PrunedEntries) -> None:
        self._indices = entries.some(PROBES)
        self._state: tuple[int, int, int] | None = None
        self._values: Any = None

    def remember(self, tensor: Tensor) -> None:
        """Notes that the pruned entries have just been zeroed."""
        if not torch.compiler.is_compiling():
            self._state = _state(tensor)
            if self._state is not None:
                self._values = tensor.detach().view(BITS[tensor.element_size()]).numpy()

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
    return (id(tensor), tensor.data_ptr(), tensor._version) if known else None


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

    def zero_if_touched_(self) -> None:
        """The same where anything may have been written since."""
        for masked, untouched in self._masked:
            if not untouched.holds(masked.of(self.module)):
                self.zero_()
                return

"""Steps of an optimizer that leave pruned entries at zero by themselves: what lets weight masks skip the write."""

from __future__ import annotations

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from prunekit.masking.last_seen import LastSeen
from prunekit.masking.targets import PrunedEntries

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
        """Whether the optimizer's state is zero where the parameter is pruned."""
        if self._state is None:
            return False
        now = _state(optimizer, parameter)
        pairs = zip(self._state, now, strict=False)
        return len(now) == len(self._state) and all(seen.unwritten(tensor) for seen, tensor in pairs)

    def masked_gradient(self, parameter: Tensor) -> bool:
        """Whether the gradient that a step has just used was zero there; looked at after the step, which keeps it."""
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
    """Tensors that the optimizer keeps for each entry of a parameter."""
    kept = optimizer.state.get(parameter, {})
    return [value for value in kept.values() if isinstance(value, Tensor) and value.shape == parameter.shape]

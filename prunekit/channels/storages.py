"""Which tensors of a traced run lie in one piece of memory, and which operator made each."""

from __future__ import annotations

from typing import Any

import torch


class Storages:
    """Notes every operator of a run; its tensors are held, so that no piece of memory is taken for another."""

    def __init__(self) -> None:
        self._shared: set[int] = set()
        self._makers: dict[int, Any] = {}
        self._made: Any = None
        self._alive: list[torch.Tensor] = []

    def note(self, operator: Any, target: Any, inputs: list[torch.Tensor], outs: tuple[torch.Tensor, ...]) -> None:
        """Called behind an operator.

        Args:
            operator: how the run remembers it.
            target: the tensor it wrote in place, None if there is none.
        """
        # what torch makes of nothing it hands out detached, only because it is held here: nobody else has the first
        handed_out = operator.name == "aten.detach" and inputs[0] is self._made
        if target is None and not handed_out:
            sources = {_key(tensor) for tensor in inputs}
            self._shared |= {key for key in map(_key, outs) if key in sources}
            if len(outs) == 1:
                self._makers[_key(outs[0])] = operator
        self._made = outs[0] if outs and not inputs else None
        self._alive.extend(outs)

    def shared(self, tensor: torch.Tensor) -> bool:
        """Whether there are views of a tensor's memory."""
        return _key(tensor) in self._shared

    def maker(self, tensor: torch.Tensor) -> Any:
        """The operator whose only result a tensor was at first, None if there is none."""
        return self._makers.get(_key(tensor))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

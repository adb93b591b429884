"""Layers that are not called as modules: where a weight is used, whole or in parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prunekit.calibration.consumers import ReadWatch, See
from prunekit.calibration.layers import Call

_PARTS = frozenset({"split", "split_with_sizes", "chunk", "narrow", "__getitem__", "unbind"})


class WeightUses(ReadWatch):
    """As `ReadWatch`, and also where parts of a weight are used, in several calls.

    So are the three projections of cross-attention, which are packed into one weight.
    """

    def __init__(self, model: nn.Module, before: See, after: See) -> None:
        super().__init__(model, before, after)
        self._parts: dict[int, tuple[Tensor, str]] = {}

    def forget(self) -> None:
        """Lets go of the weights that were computed in a pass."""
        super().forget()
        self._parts.clear()

    def _name_of(self, weight: Tensor) -> str | None:
        return super()._name_of(weight) or self._parts.get(id(weight), (weight, None))[1]

    def _follow(self, call: Call, result: Any) -> None:
        super()._follow(call, result)
        name = self.names.get(id(call.args[0])) if call.name in _PARTS and call.args else None
        if name is not None:
            parts = result if isinstance(result, tuple | list) else (result,)
            self._parts |= {id(part): (part, name) for part in parts}  # held, or an id might be another's

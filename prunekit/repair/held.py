"""Tensors that are needed again later in a forward pass, and no longer than that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from prunekit.calibration.layers import Layer


class HeldSummands:
    """What is added to layers' outputs, held from the call that made it until its last layer has used it."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._uses = Counter(layer.other for layer in layers if layer.other is not None)
        self._tensors: dict[int, Tensor] = {}

    def note(self, number: int, result: object) -> None:
        """Holds the result of a call if some layer needs it."""
        if number in self._uses and isinstance(result, Tensor):
            self._tensors[number] = result

    def take(self, layer: Layer) -> Tensor | None:
        """The other summand of a layer, given out for the last time to the last of its layers."""
        if layer.other is None:
            return None
        self._uses[layer.other] -= 1
        found = self._tensors.get(layer.other)
        if self._uses[layer.other] <= 0:
            self._tensors.pop(layer.other, None)
        return found

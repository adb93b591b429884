"""Lifetimes of the tensors of a forward pass, and the memory that is live at each of its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

TensorKey = tuple[int, int]
"""Where a tensor was made: the step of the call, 0 for the model's inputs, and its number among those made there."""


@dataclass
class Lifetimes:
    """First and last uses of the tensors of one forward pass.

    A step is one call of any of torch's functions.

    Attributes:
        samples: how many the pass was over.
        steps: by the number of a call, as `CallInterceptor` counts them, the steps before it.
    """

    samples: int = 1
    steps: dict[int, int] = field(default_factory=dict)
    _last: dict[TensorKey, int] = field(default_factory=dict)
    _pinned: set[TensorKey] = field(default_factory=set)
    _memory: dict[TensorKey, int] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)

    def born(self, key: TensorKey, tensor: Tensor, inputs: Iterable[tuple[TensorKey, Tensor]] = ()) -> None:
        """Record a tensor as it is made; it may be a view of one of the inputs."""
        storage = tensor.untyped_storage()
        shared = [self._memory[other] for other, given in inputs if given.untyped_storage()._cdata == storage._cdata]
        if not shared:
            self._sizes.append(storage.nbytes())
        self._memory[key] = shared[0] if shared else len(self._sizes) - 1
        self._last[key] = key[0]

    def read(self, keys: Iterable[TensorKey], step: int) -> None:
        """Record tensors that a call reads."""
        for key in keys:
            self._last[key] = max(step, self._last.get(key, 0))

    def pin(self, key: TensorKey) -> None:
        """Record a tensor that is read again whenever a pass continues, so that it is live from then on."""
        self._pinned.add(key)

    def live(self, step: int) -> Iterator[TensorKey]:
        """Return tensors that were made up to a step and are read later."""
        return (key for key, last in self._last.items() if key[0] <= step and (step < last or key in self._pinned))

    def held_bytes(self) -> dict[int, float]:
        """Return the memory of a sample's live tensors before each call, by the number of the call."""
        held = self._summed(0)
        return {number: float(held[step]) / self.samples for number, step in self.steps.items()}

    def peak_bytes(self) -> float:
        """Return the most memory that a sample's tensors take while any call runs, its result included."""
        return float(self._summed(1).max()) / self.samples

    def _summed(self, beyond: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the memory at each step of tensors that live until `beyond` steps after their last use."""
        spans: dict[int, tuple[int, int]] = {}
        end = 1 + max([0, *self._last.values(), *self.steps.values()])
        for key, memory in self._memory.items():
            first, last = spans.get(memory, (key[0], key[0]))
            until = end if key in self._pinned else self._last[key] + beyond
            spans[memory] = (min(first, key[0]), max(last, until))
        changes = np.zeros(2 + max((last for _, last in spans.values()), default=0), dtype=np.int64)
        for memory, (first, last) in spans.items():
            changes[first] += self._sizes[memory]
            changes[last] -= self._sizes[memory]
        total: np.ndarray[tuple[int], np.dtype[np.int64]] = np.cumsum(changes)
        padding = max(0, 1 + max(self.steps.values(), default=0) - len(total))
        return np.pad(total, (0, padding))

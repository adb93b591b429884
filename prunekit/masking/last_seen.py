"""A tensor as it was when it was last looked at."""

from __future__ import annotations

import weakref

from torch import Tensor


class LastSeen:
    """Which tensor, in which memory, at which version counter; it keeps none of them alive.

    Writes through `.data` and fused optimizers move no version counter.
    """

    __slots__ = ("_address", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._address, self._version = weakref.ref(tensor), tensor.data_ptr(), tensor._version

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor in the same memory."""
        return self._tensor() is tensor and tensor.data_ptr() == self._address

    def unwritten(self, tensor: Tensor) -> bool:
        """Whether it is, and its version counter has not moved."""
        return self.is_still(tensor) and tensor._version == self._version

    def again(self, tensor: Tensor) -> None:
        """Takes the version that it has now."""
        self._version = tensor._version

    def forget(self) -> None:
        """Takes it that it was written to."""
        self._version = -1

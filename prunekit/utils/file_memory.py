"""Tensors whose memory is a temporary file, for what is too large to keep and is read a piece at a time."""

from __future__ import annotations

import mmap
import tempfile
from math import prod

import torch
from torch import Tensor


class FileMemory:
    """Makes tensors of zeros: the first in memory, those beyond a limit in a temporary file.

    The system reads the file where a tensor is used, and writes it where memory is short. It goes with the last tensor.

    Args:
        limit: bytes in memory.

    Example:
        >>> from prunekit.utils.file_memory import FileMemory
        >>> memory = FileMemory(limit=0)
        >>> matrix = memory.zeros((2, 2), torch.float64)
        >>> matrix += 1
        >>> memory.release()
        >>> matrix.sum()
        tensor(4., dtype=torch.float64)
    """

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._maps: list[mmap.mmap] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return zeros; on other devices than the CPU, and where there is no room for a file, in memory."""
        size = prod(shape) * dtype.itemsize
        if size <= self._left or size == 0 or (device is not None and device.type != "cpu"):
            self._left -= size
            return torch.zeros(shape, dtype=dtype, device=device)
        try:
            with tempfile.TemporaryFile() as file:
                file.truncate(size)
                self._maps.append(mmap.mmap(file.fileno(), size))
        except OSError:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(self._maps[-1], dtype=dtype).view(shape)

    def release(self) -> None:
        """Give the memory of tensors in the file back until they are used again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for one in self._maps:
                one.madvise(mmap.MADV_DONTNEED)

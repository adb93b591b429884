"""Tensors whose memory is a temporary file, for what is too large to keep and is read a piece at a time."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

BLOCK = 2**28
"""Bytes of a file, unless a tensor is larger."""
ALIGNED = 64


class FileMemory:
    """Keeps tensors: the first in memory, those beyond a limit in temporary files.

    The system reads a file where a tensor is used, and writes it where memory is short. Files go with their tensors.

    Args:
        limit: bytes in memory.

    Example:
        >>> import torch
        >>> from prunekit.utils.file_memory import FileMemory
        >>> memory = FileMemory(limit=0)
        >>> matrix = memory.keep(torch.ones(2, 2, dtype=torch.float64))
        >>> memory.release()
        >>> matrix.sum()
        tensor(4., dtype=torch.float64)
    """

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._maps: list[mmap.mmap] = []
        self._used = 0

    def keep(self, tensor: Tensor, *, shared: bool = False) -> Tensor:
        """Return a strided tensor itself while there is memory, then a copy.

        On other devices than the CPU, and where there is no room for a file, it is the tensor itself.
        """
        found = None
        if tensor.device.type == "cpu" and not tensor.requires_grad and not self._fits(tensor.nbytes):
            found = self._mapped(tensor)
        if found is None:
            return tensor.clone() if shared else tensor
        return found.copy_(tensor)

    def release(self) -> None:
        """Give the memory of tensors in files back until they are used again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for one in self._maps:
                one.madvise(mmap.MADV_DONTNEED)

    def _fits(self, size: int) -> bool:
        fits = size <= self._left or size == 0
        self._left -= size if fits else 0
        return fits

    def _mapped(self, like: Tensor) -> Tensor | None:
        """Return a tensor of zeros in a file; None if there is no room for it."""
        size, start = like.nbytes, -(-self._used // ALIGNED) * ALIGNED
        if not self._maps or start + size > len(self._maps[-1]):
            try:
                self._maps.append(mapped_file(max(size, BLOCK)))
            except OSError:
                return None
            start = 0
        self._used = start + size
        memory = torch.frombuffer(self._maps[-1], dtype=like.dtype, count=like.numel(), offset=start)
        return memory.view(like.shape)


def mapped_file(size: int) -> mmap.mmap:
    """Return a mapped file of zeros, whose room on the disk is reserved where the system can do that."""
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)

"""Errors for want of memory: recognized, and raised again with the size of the batch that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from prunekit.distributed.process_group import size
from prunekit.errors import MemoryShortageError
from prunekit.training.run_state import Position

MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""What torch's allocators and CUDA's libraries say where they raise a plain `RuntimeError`."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory, on the CPU or on a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | MemoryShortageError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


@contextmanager
def naming_batch(batch: int, shape: Sequence[int], device: torch.device, at: Position) -> Iterator[None]:
    """Add to errors for want of memory how large the batch was, and what helps.

    Raises:
        MemoryShortageError: in place of such an error.
    """
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        each = "" if size() == 1 else f", {-(-batch // size())} of them in each of {size()} processes"
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is said'}"
        raise MemoryShortageError(
            f"out of memory on {device} in epoch {at.epoch}, step {at.trained or 1}: a batch of {batch} images of "
            f"{'x'.join(map(str, shape))}{each} does not fit ({said}); `prunekit finetune RECIPE --find-batch-size` "
            "names the largest data.batch that does; `accumulate: 2` with half of data.batch makes the same steps in "
            "less memory"
        ) from error

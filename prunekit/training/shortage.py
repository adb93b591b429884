"""Memory that is too small for a batch: known for what it is, and said with the size of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from prunekit.distributed.group import size
from prunekit.errors import MemoryShortageError
from prunekit.training.position import Position

SAID = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""How torch's allocators and CUDA's libraries put it where they raise a plain `RuntimeError`."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, of the CPU or of a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | MemoryShortageError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAID)


@contextmanager
def naming_batch(batch: int, shape: Sequence[int], device: torch.device, at: Position) -> Iterator[None]:
    """Says of errors for want of memory how large the batch was, and what helps.

    Raises:
        MemoryShortageError: in the place of such an error.
    """
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        each = "" if size() == 1 else f", {-(-batch // size())} of them in each of {size()} processes"
        raise MemoryShortageError(
            f"out of memory on {device} in epoch {at.epoch}, step {at.trained or 1}: a batch of {batch} images of "
            f"{'x'.join(map(str, shape))}{each} does not fit ({_first_line(error)}); `prunekit finetune RECIPE "
            "--find-batch-size` names the largest data.batch that does; `accumulate: 2` with half of data.batch makes "
            "the same steps in less memory"
        ) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is said'}"

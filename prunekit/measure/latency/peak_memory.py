"""Peak memory of a model that is ready to run."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

RESOLUTION = 2**24
"""Bytes of resident memory; fewer are dominated by what allocators and libraries keep for themselves."""
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


class PeakMemory:
    """The peak of memory that a session and one forward pass add to that in use when this object was made.

    On CUDA it is counted by torch's allocator; on the CPU it is the growth of the process's resident memory, which
    Linux tells. Make it in a process of its own: it gives freed memory back to the system, and resets its peak.

    Args:
        device: "cpu", "cuda" or "cuda:n".
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.before = self.settle()

    def of(self, run: Callable[[], object]) -> int | None:
        """Return the bytes, after one more run of the session; None if unknown, or not known exactly."""
        if self.before is None or self.settle() is None:
            return None
        run()
        found = self.peak() - self.before
        return found if self.device.type == "cuda" or found >= RESOLUTION else None

    def settle(self) -> int | None:
        """Return the bytes in use, from which the next peak is counted; None if unknown."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return int(torch.cuda.memory_allocated(self.device))
        if sys.platform != "linux":  # others do not tell, and Windows has no library without a name
            return None
        with suppress(OSError, AttributeError, KeyError):  # a C library that does not trim, or a closed /proc
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
            return _resident("VmRSS")
        return None

    def peak(self) -> int:
        """Return the most bytes in use since the last `settle`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return int(torch.cuda.max_memory_allocated(self.device))
        return _resident("VmHWM")


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[key].split()[0]) * 1024

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
"""Bytes of resident memory below which what allocators and libraries keep for themselves decides."""
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


class PeakMemory:
    """What a session and one forward take, at the peak, above what was taken when this object was made.

    On CUDA that is what torch's allocator handed out; on the CPU the growth of the process's resident memory, where
    Linux tells, so make it in a process of its own: it gives freed memory back to the system, and starts its peak anew.

    Args:
        device: "cpu", "cuda" or "cuda:n".
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.before = self._settle()

    def of(self, run: Callable[[], object]) -> int | None:
        """Bytes, once more running what was built meanwhile; None where the system does not tell, or not exactly."""
        if self.before is None or self._settle() is None:
            return None
        run()
        found = self._peak() - self.before
        return found if self.device.type == "cuda" or found >= RESOLUTION else None

    def _settle(self) -> int | None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return int(torch.cuda.memory_allocated(self.device))
        if sys.platform != "linux":  # elsewhere the system does not tell, and Windows has no library without a name
            return None
        with suppress(OSError, AttributeError, KeyError):  # a C library that does not trim, or a /proc that is closed
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
            return _resident("VmRSS")
        return None

    def _peak(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return int(torch.cuda.max_memory_allocated(self.device))
        return _resident("VmHWM")


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[key].split()[0]) * 1024

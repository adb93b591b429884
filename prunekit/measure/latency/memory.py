"""Peak memory of a model that is ready to run.

Where weights lie in memory: a matter of chance, which may be worth more than what is measured.

A process lays a model out once, and all that it measures is of that layout, however narrow the interval is (Mytkowicz
et al., "Producing wrong data without doing anything obviously wrong!", 2009). Laid out anew every other round, what a
process measures is of many layouts (Curtsinger and Berger, "Stabilizer", 2013). How much faster mobilenet_v2 at a
quarter of its width is in eager came out 2.6 % apart between twelve processes with a layout each, 12 % between eight in
another hour, and 1.0 % between ten that moved it (standard deviations; AMD EPYC, one thread, batch 1, 224 px).
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

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


MOST_BYTES = 2**21
"""Of the gap before a model's tensors, which lie one after the other as those of a model that was just built do: with
gaps between them small ones would need more pages than they do."""


class Placement:
    """Called, it lays a module's parameters and buffers elsewhere in memory; nothing but their addresses changes.

    The gap before them stays until the next call: that the next ones lie elsewhere is up to it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.random, self.gap = module, random.Random(), torch.empty(0)

    def __call__(self) -> None:
        self.gap = torch.empty(self.random.randrange(MOST_BYTES), dtype=torch.uint8)
        tensors = list(_movable(self.module))
        with torch.no_grad():
            elsewhere = [_copy(tensor) for tensor in tensors]  # all before any is free: none goes where one was
        for tensor, data in zip(tensors, elsewhere, strict=True):
            tensor.data = data


def _copy(tensor: Tensor) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return tensor.data.clone()


@contextmanager
def placements(*modules: nn.Module) -> Iterator[list[Placement]]:
    """Of a user's own modules: their tensors are back where they were when it is left, as others may share them."""
    before = {tensor: tensor.data for module in modules for tensor in _movable(module)}
    try:
        yield [Placement(module) for module in modules]
    finally:
        for tensor, data in before.items():
            tensor.data = data


def _movable(module: nn.Module) -> Iterator[Tensor]:
    """Yield tensors on the CPU that have their memory for themselves; a copy of others would be laid out otherwise."""
    for tensor in (*module.parameters(), *module.buffers()):
        plain = tensor.layout == torch.strided and type(tensor.data) is Tensor and tensor.device.type == "cpu"
        if plain and torch.ops.aten.is_non_overlapping_and_dense(tensor):
            yield tensor

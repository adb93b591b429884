"""The machine that a figure was measured on: its CPU, clock and load, and what else ran."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from prunekit.measure.evidence import Contention
from prunekit.measure.quota import periods, quota, share_held_back

BUSY = 0.2
"""Cores that a process keeps busy to be named."""
WINDOW_S = 0.3
"""Shortest time over which counters of CPU time, which tick every 10 ms, say how busy the cores were."""
ANSWER_S = 10.0
"""That a driver may take to tell a clock."""
IDLE = ("idle", "iowait", "guest", "guest_nice")


def cpu_name() -> str:
    """The CPU's model."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Logical cores that this process may use."""
    return len(_allowed())


def _allowed() -> Collection[int]:
    """Numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def clock_mhz(device: str = "cpu") -> float | None:
    """Current clock of the CPU, the mean over all cores, or of a GPU; None where the system does not tell.

    Args:
        device: "cpu", "cuda" or "cuda:n"; others do not tell.
    """
    if device.startswith("cuda"):
        return _gpu_clock_mhz(device)
    with suppress(NotImplementedError, OSError, RuntimeError):
        found = psutil.cpu_freq() if device == "cpu" else None
        return None if found is None else float(found.current)
    return None


def _gpu_clock_mhz(device: str) -> float | None:
    """What NVIDIA's driver tells of the multiprocessors; by the GPU's UUID, since CUDA may number GPUs otherwise."""
    import torch  # not above: what hands out the tests reads cores and quotas here, and needs no torch

    uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.current.sm", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout)
    return None


def surroundings() -> dict[str, Any]:
    """The machine right now; it takes a third of a second, in which this process sleeps.

    Returns:
        cpu, cores, cpu_quota (cores; None where there is none), clock_mhz, load_average (1, 5 and 15 minutes),
        other_busy_cores, and of the busy_processes pid, name and cores.
    """
    before, load = _cpu_seconds(), Load()
    with load.watched():
        time.sleep(WINDOW_S)
    after = _cpu_seconds()
    used = {pid: (after[pid][1] - before[pid][1]) / load.seconds for pid in before.keys() & after.keys()}
    busy = [
        {"pid": pid, "name": after[pid][0], "cores": round(share, 2)}
        for pid, share in sorted(used.items(), key=lambda item: -item[1])
        if share >= BUSY and pid != os.getpid()
    ]
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "cpu_quota": quota(),
        "clock_mhz": clock_mhz(),
        "load_average": list(psutil.getloadavg()),
        "other_busy_cores": round(load.others, 2),
        "busy_processes": busy,
    }


class Load:
    """What kept a block from the cores while it ran.

    Attributes:
        others: of the cores that this process may use, those that others kept busy: their CPU time over the time that
            passed; time that the host of a virtual machine took counts too.
        held_back: share of the time slices in which a CPU quota stopped this process.
        seconds: that passed; at least a third of one.
    """

    others = 0.0
    held_back = 0.0
    seconds = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the block; a short one is followed by a sleep, or the counters would be too coarse."""
        start, system, own, before = time.perf_counter(), _system_seconds(), time.process_time(), periods()
        yield
        time.sleep(max(0.0, WINDOW_S - (time.perf_counter() - start)))
        self.seconds = time.perf_counter() - start
        taken = _system_seconds() - system - (time.process_time() - own)
        self.others = max(0.0, taken / self.seconds)
        self.held_back = share_held_back(before, periods())

    def contention(self, threads: int) -> Contention:
        """What the block had to share the cores with, as a model's threads."""
        return Contention(threads, cores(), self.others, quota() or math.inf, self.held_back)


def _system_seconds() -> float:
    """CPU time that all processes have taken so far on the cores that this one may use."""
    each, allowed = psutil.cpu_times(percpu=True), _allowed()
    # In some containers the list is the container's own, and affinity has the numbers of the host.
    numbered = len(each) == os.cpu_count() and max(allowed) < len(each)
    ours = [each[core] for core in allowed] if numbered else each
    return float(sum(value for one in ours for name, value in one._asdict().items() if name not in IDLE))


def _cpu_seconds() -> dict[int, tuple[str, float]]:
    """Process id -> its name and the CPU time that it has taken so far."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            found[process.pid] = (str(process.info["name"]), float(times.user + times.system))
    return found

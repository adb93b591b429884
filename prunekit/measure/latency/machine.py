"""The machine that a figure was measured on: its CPU, clock, load and CPU quota, and the peak of memory.

The quota of a container or a batch job (cgroups of Linux, versions 1 and 2) is a share of every period of usually
100 ms. A process that has used it up is stopped until the next one: a forward pass takes as long as ever, or 100 ms
longer.
"""

import ctypes
import gc
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from prunekit.measure.latency.timing import Contention
from prunekit.measure.measurement_effort import current_effort

BUSY = 0.2
"""Cores that a process must keep busy to be named."""
WINDOW_S = 0.3
"""Shortest time over which counters of CPU time, which tick every 10 ms, are exact enough. A shorter time, as in tests,
counts as this one: a single tick in it would look like a busy core."""
DRIVER_S = 10.0
"""Limit of time for a driver to tell a clock."""
IDLE = ("idle", "iowait", "guest", "guest_nice")
GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def describe_machine() -> dict[str, Any]:
    """Return the machine and its load right now; it is watched for a third of a second.

    Returns:
        cpu, cores, cpu_quota (cores; None without one), clock_mhz, load_average (1, 5 and 15 minutes),
        other_busy_cores, and busy_processes with pid, name and cores.
    """
    before, load = _cpu_seconds(), Load()
    with load.watched():
        time.sleep(current_effort().load_s)
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
        "cpu_quota": cpu_quota(),
        "clock_mhz": clock_mhz(),
        "load_average": list(psutil.getloadavg()),
        "other_busy_cores": round(load.others, 2),
        "busy_processes": busy,
    }


def _cpu_seconds() -> dict[int, tuple[str, float]]:
    """Return the name and the CPU time so far of every process, by its id."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            found[process.pid] = (str(process.info["name"]), float(times.user + times.system))
    return found


class Load:
    """The load of the CPU by other processes while a block ran."""

    # how many of the cores that this process may use others kept busy: their CPU time over the time that passed; time
    # that the host of a virtual machine took counts too
    others = 0.0
    throttled = 0.0  # share of the periods in which a CPU quota stopped this process
    seconds = 0.0  # that passed; at least a third of one

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the load during the block; a short one is followed by a sleep, as the counters are coarse."""
        start, system, own, before = time.perf_counter(), system_seconds(), time.process_time(), quota_periods()
        yield
        time.sleep(max(0.0, current_effort().load_s - (time.perf_counter() - start)))
        self.seconds = max(WINDOW_S, time.perf_counter() - start)
        taken = system_seconds() - system - (time.process_time() - own)
        self.others = max(0.0, taken / self.seconds)
        self.throttled = throttled_share(before, quota_periods())

    def contention(self, threads: int) -> Contention:
        """Return the contention for a model with this many threads."""
        return Contention(threads, cores(), self.others, cpu_quota() or math.inf, self.throttled)


def system_seconds() -> float:
    """Return the CPU time so far of all processes on the cores that this one may use."""
    each, allowed = psutil.cpu_times(percpu=True), _allowed()
    # In some containers the list is the container's own, and affinity has the numbers of the host.
    numbered = len(each) == os.cpu_count() and max(allowed) < len(each)
    ours = [each[core] for core in allowed] if numbered else each
    return float(sum(value for one in ours for name, value in one._asdict().items() if name not in IDLE))


def cpu_name() -> str:
    """Return the name of the CPU's model."""
    with suppress(OSError):  # no such file outside of Linux, and in some containers it is closed
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of logical cores that this process may use."""
    return len(_allowed())


def _allowed() -> Collection[int]:
    """Return the numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def clock_mhz(device: str = "cpu") -> float | None:
    """Return the current clock of the CPU (mean over all cores) or of a GPU; None if unknown."""
    if device.startswith("cuda"):
        return _gpu_clock_mhz(device)
    with suppress(NotImplementedError, OSError, RuntimeError):
        found = psutil.cpu_freq() if device == "cpu" else None
        return None if found is None else float(found.current)
    return None


def _gpu_clock_mhz(device: str) -> float | None:
    """Return the clock of the multiprocessors; the driver is asked by UUID, as CUDA may number GPUs otherwise."""
    uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.current.sm", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=DRIVER_S).stdout)
    return None


def cpu_quota() -> float | None:
    """Return the cores that the processes of this container may keep busy together; None if that is not limited."""
    return min((cores for folder in _groups() if (cores := _cores(folder)) is not None), default=None)


class Periods(NamedTuple):
    """Numbers of periods of a control group's quota: in which it ran, and in which it was stopped then."""

    ran: int
    throttled: int


def quota_periods() -> dict[Path, Periods]:
    """Return the periods so far of this process's groups that have a quota."""
    return {folder: _periods(folder) for folder in _groups() if _cores(folder) is not None}


def throttled_share(before: dict[Path, Periods], after: dict[Path, Periods]) -> float:
    """Return the share of the periods between two readings in which this process was stopped; 0 without a quota."""
    passed = [
        (after[folder].ran - start.ran, after[folder].throttled - start.throttled)
        for folder, start in before.items()
        if folder in after
    ]
    return max((throttled / ran for ran, throttled in passed if ran > 0), default=0.0)


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's control group and of all groups around it, as far as they can be seen."""
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = GROUPS / controllers
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # outside of this container
            parts = []
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _cores(folder: Path) -> float | None:
    """Return a group's quota: `50000 100000` or `max 100000` in version 2; in version 1 two files, -1 for no quota."""
    given = _read(folder / "cpu.max").split() or [
        _read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    with suppress(ValueError):
        share, period = (int(number) for number in given)
        return share / period if share > 0 else None
    return None


def _periods(folder: Path) -> Periods:
    found = dict(line.split(maxsplit=1) for line in _read(folder / "cpu.stat").splitlines() if " " in line)
    return Periods(int(found.get("nr_periods", 0)), int(found.get("nr_throttled", 0)))


def _read(file: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    with suppress(OSError):
        return file.read_text(encoding="ascii")
    return ""


RESOLUTION = 2**24
"""Bytes of resident memory; fewer are dominated by what allocators and libraries keep for themselves."""
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


class PeakMemory:
    """The peak of memory that a session and one forward pass add to that in use when this object was made.

    On CUDA it is counted by torch's allocator; on the CPU it is the growth of the process's resident memory, which
    Linux tells. Make it in a process of its own: it gives freed memory back to the system, and resets its peak.
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

"""The machine that a figure was measured on: its CPU, clock and load, and what else ran.

The CPU quota of a container or a batch system's job: how many cores it is given, and how often it was held back.

Such a quota (cgroups of Linux, versions 1 and 2) is a share of every period of usually 100 ms. A process that has used
it up stands still until the next one: a forward takes as long as ever, or 100 ms longer.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from prunekit.measure.latency.timing import Contention

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Periods(NamedTuple):
    """Periods in which a group ran, since it was made."""

    ran: int
    held_back: int
    """Of these; the group had used up its quota before they ended."""


def quota() -> float | None:
    """Cores that this process and the others of its container may keep busy; None where that is not limited."""
    return min((cores for folder in _groups() if (cores := _cores(folder)) is not None), default=None)


def periods() -> dict[Path, Periods]:
    """Of this process's group and those that it lies in, as far as they have a quota."""
    return {folder: _periods(folder) for folder in _groups() if _cores(folder) is not None}


def share_held_back(before: dict[Path, Periods], after: dict[Path, Periods]) -> float:
    """Of the periods between two looks, the share in which this process was held back; 0 without a quota."""
    passed = [
        (after[folder].ran - start.ran, after[folder].held_back - start.held_back)
        for folder, start in before.items()
        if folder in after
    ]
    return max((held_back / ran for ran, held_back in passed if ran > 0), default=0.0)


def _groups() -> Iterator[Path]:
    """Yield the folders of this process's group and all that it lies in; in a container without names of its own,
    the topmost.
    """
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = GROUPS / controllers
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # outside of what can be seen here
            parts = []
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _cores(folder: Path) -> float | None:
    """Return a group's quota: version 2 has `max 100000` or `50000 100000` in one file, version 1 two files, and -1."""
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
    """Empty where there is no such file, or none that may be read."""
    with suppress(OSError):
        return file.read_text(encoding="ascii")
    return ""


BUSY = 0.2
"""Cores that a process keeps busy to be named."""
WINDOW_S = 0.3
"""Shortest time over which counters of CPU time, which tick every 10 ms, say how busy the cores were."""
ANSWER_S = 10.0
"""That a driver may take to tell a clock."""
IDLE = ("idle", "iowait", "guest", "guest_nice")


def cpu_name() -> str:
    """Return the CPU's model."""
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
    """Return the numbers of the cores that this process may use."""
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
    """Return what NVIDIA's driver tells of the multiprocessors; by the GPU's UUID, since CUDA may number GPUs
    otherwise.
    """
    import torch  # not above: what hands out the tests reads cores and quotas here, and needs no torch

    uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=clocks.current.sm", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout)
    return None


def surroundings() -> dict[str, Any]:
    """Return the machine right now; it takes a third of a second, in which this process sleeps.

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
        """Watch the block; a short one is followed by a sleep, or the counters would be too coarse."""
        start, system, own, before = time.perf_counter(), _system_seconds(), time.process_time(), periods()
        yield
        time.sleep(max(0.0, WINDOW_S - (time.perf_counter() - start)))
        self.seconds = time.perf_counter() - start
        taken = _system_seconds() - system - (time.process_time() - own)
        self.others = max(0.0, taken / self.seconds)
        self.held_back = share_held_back(before, periods())

    def contention(self, threads: int) -> Contention:
        """Return what the block had to share the cores with, as a model's threads."""
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

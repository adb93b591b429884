"""The CPU quota of a container or a batch system's job: how many cores it is given, and how often it was held back.

Such a quota (cgroups of Linux, versions 1 and 2) is a share of every period of usually 100 ms. A process that has used
it up stands still until the next one: a forward takes as long as ever, or 100 ms longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
    """Folders of this process's group and all that it lies in; in a container without names of its own, the topmost."""
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
    """A group's quota: version 2 has `max 100000` or `50000 100000` in one file, version 1 two files, and -1."""
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

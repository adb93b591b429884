"""Rows of latency in words: where something was timed, why a figure is unstable, why there is none.

Rows of runs by an earlier prunekit have no memory format and nothing about their stability.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prunekit.utils.display import plural

Row = Mapping[str, Any]


def computed(row: Row) -> str:
    """Return the dtype, and the memory format where it is not torch's usual one."""
    layout = row.get("memory_format", "contiguous")
    return str(row.get("dtype", "–")) + ("" if layout == "contiguous" else f" {layout}")


def where(row: Row) -> str:
    """Return a row's setting, e.g. "eager, cpu, batch 1, 2 threads, float32"."""
    threads = plural(row["threads"], "thread")
    return f"{row['runtime']}, {row['device']}, batch {row['batch']}, {threads}, {computed(row)}"


def doubtful(row: Row) -> str:
    """Return what stands behind a figure's interval where it supports no claim."""
    return "" if row.get("stable", True) else " unstable"


def unstable(latency: Iterable[Row], speedup: Iterable[Row]) -> list[str]:
    """Return a line for figures that support no claim, with the reasons: one for those that share setting and
    reasons.
    """
    named = [(f"latency of {row['model']}", row) for row in latency if doubtful(row)]
    named += [(f"speedup of {row['model']}", row) for row in speedup if doubtful(row)]
    together: dict[tuple[str, str], list[str]] = {}
    for name, row in named:
        together.setdefault((where(row), "; ".join(row["doubts"])), []).append(name)
    return [f"unstable ({place}): {', '.join(names)}: {why}" for (place, why), names in together.items()]


def failed(failures: Iterable[Row]) -> list[str]:
    """Return a line for each setting that was not measured, with the reason."""
    return [f"{where(row)}: {row['reason']}" for row in failures]


def surroundings(machine: Row, latency: Iterable[Row] = ()) -> str:
    """Return the machine that was measured on, its clocks and what else ran, in a line; empty where nothing is known.

    Args:
        latency: rows, of which those of other devices than the CPU have the clock of these.
    """
    if not machine:
        return ""
    clocks = [f"{machine[key]:.0f}" for key in ("clock_mhz", "clock_mhz_after") if machine[key] is not None]
    clock = f"clock {' then '.join(clocks)} MHz" if clocks else "clock unknown"
    load = " ".join(f"{value:.1f}" for value in machine["load_average"])
    busy = ", ".join(f"{one['name']} {one['cores']}" for one in machine["busy_processes"])
    quota = "" if machine.get("cpu_quota") is None else f" (a quota of {machine['cpu_quota']:.3g})"
    return (
        f"{machine['cpu']}, {machine['cores']} cores{quota}, {clock}, load average {load}; before, other processes "
        f"kept {machine['other_busy_cores']} cores busy" + (f" ({busy})" if busy else "") + _other_clocks(latency)
    )


def _other_clocks(latency: Iterable[Row]) -> str:
    found: dict[str, list[float]] = {}
    for row in latency:
        if row["device"] != "cpu" and row.get("clock_mhz") is not None:
            found.setdefault(row["device"], []).append(row["clock_mhz"])
    spans = {device: dict.fromkeys(f"{end(clocks):.0f}" for end in (min, max)) for device, clocks in found.items()}
    return "".join(f"; {device} at {' to '.join(span)} MHz right after timing" for device, span in spans.items())

"""Text for the rows of a latency report: the setting of a row, unstable figures, failures, the machine.

Rows of runs by earlier versions have no memory format and nothing about their stability.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prunekit.utils.display import factor, interval, plural

Row = Mapping[str, Any]


def dtype_text(row: Row) -> str:
    """Return the dtype, and the memory format if it is not contiguous."""
    layout = row.get("memory_format", "contiguous")
    return str(row.get("dtype", "–")) + ("" if layout == "contiguous" else f" {layout}")


def setting_text(row: Row) -> str:
    """Return a row's setting, e.g. "eager, cpu, batch 1, 2 threads, float32"."""
    threads = plural(row["threads"], "thread")
    return f"{row['runtime']}, {row['device']}, batch {row['batch']}, {threads}, {dtype_text(row)}"


def speedup_text(row: Row) -> str:
    """Return model, setting and paired speedup of a row with its interval; of an unstable one the interval alone."""
    found = unstable_mark(row).strip() or factor(row["median"])
    return f"{row.get('model', 'pruned')} ({setting_text(row)}): {found} {interval(row['low'], row['high'])}"


def paired(latency: Iterable[Row], speedup: Iterable[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Yield each latency with the speedup of its model and setting; None for the model that the others are over."""
    setting = ("model", "device", "runtime", "batch", "threads", "dtype", "memory_format")
    left = [{"model": "pruned", **row} for row in speedup]
    for row in latency:
        here = {key: row[key] for key in setting if key in row}
        beside = next((one for one in left if here.items() <= {**here, **one}.items()), None)
        left = [one for one in left if one is not beside]
        yield row, beside


def unstable_mark(row: Row) -> str:
    """Return what is written behind the interval of a figure that supports no claim; empty for one that does."""
    return "" if row.get("stable", True) else " unstable"


def unstable_lines(latency: Iterable[Row], speedup: Iterable[Row]) -> list[str]:
    """Return the figures that support no claim with the reasons, a line for each setting and its reasons."""
    named = [(f"latency of {row['model']}", row) for row in latency if unstable_mark(row)]
    named += [(f"speedup of {row['model']}", row) for row in speedup if unstable_mark(row)]
    together: dict[tuple[str, str], list[str]] = {}
    for name, row in named:
        together.setdefault((setting_text(row), "; ".join(row["doubts"])), []).append(name)
    return [f"unstable ({place}): {', '.join(names)}: {why}" for (place, why), names in together.items()]


def failure_lines(failures: Iterable[Row]) -> list[str]:
    """Return a line for each setting that was not measured, with the reason."""
    return [f"{setting_text(row)}: {row['reason']}" for row in failures]


def machine_text(machine: Row, latency: Iterable[Row] = ()) -> str:
    """Return the machine that was measured on, its clocks and load, in a line; empty if unknown."""
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

"""The section on a pruned model's time, which `prunekit explain` writes as a page of its own too."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from prunekit.measure.latency.row_text import Row, paired, unstable_mark
from prunekit.report.figures.canvas import COLORS, are_drawn, canvas, svg, wide_and_narrow
from prunekit.report.headline import Tile
from prunekit.report.rendering import write
from prunekit.report.run_data import Run
from prunekit.report.sections.section import register_section
from prunekit.utils.display import count, digits, factor, interval, share

BARS = 30
OUTSIDE = "between operators"
OTHERS = "all other modules"


@register_section("explanation", about="what keeps the pruned model from its ideal speed", order=30)
def explanation(run: Run) -> Mapping[str, Any] | None:
    """Return causes, modules and operators of what the run explained; None if it explained nothing."""
    found = run.metrics.get("explanation")
    return explained(of_report(found, run.metrics.get("speedup") or ())) if found else None


def write_explanation(folder: Path, result: Mapping[str, Any]) -> Path:
    """Render `explain.html` into a folder, which is created, and return its path."""
    return write(folder / "explain.html", "explain.html", **explained(of_report(result, ())))


def of_report(result: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """Return an explanation that refers to the report's own speedup of its models in its setting, if there is one.

    Its own rounds are there to tell parts of the time apart: two figures for one speedup would confuse.
    """
    ((_, row),) = paired([{**result, "model": "pruned", "runtime": "eager", "dtype": "float32"}], rows)
    earlier = [note for note in result["notes"] if note.startswith(("noisy:", "threads oversubscribed"))]
    doubts = list(result.get("doubts", earlier))  # earlier versions have them among the notes
    if row is None:
        return {**result, "doubts": doubts, "own": True}
    speedup = {key: row[key] for key in ("median", "low", "high")}
    missing = result["pruned_ms"] * (1 - row["median"] / result["macs_ratio"])
    doubts = (row.get("doubts") or ["its interval is wide"]) * bool(unstable_mark(row)) or doubts
    return {**result, "speedup": speedup, "shortfall_ms": missing, "doubts": doubts, "own": False}


def unsettled(result: Mapping[str, Any]) -> str:
    """Return that the times are unstable, why, and what to do; empty if they support conclusions."""
    why = "; ".join(result["doubts"])
    return f"unstable, so that nothing is said about what is faster, or why: {why}" if why else ""


def verdict(result: Mapping[str, Any]) -> str:
    """Return the speedup beside the ideal, of which more than all is no finding."""
    found, ratio = result["speedup"], result["macs_ratio"]
    reached = f"{share(found['median'] / ratio, 0)} of" if found["median"] < ratio else "no less than"
    ideal = f"{reached} the ideal {factor(ratio)}, the ratio of MACs"
    return f"{factor(found['median'])} {interval(found['low'], found['high'])} the dense model's speed, {ideal}"


def explained(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the templates of an explanation: itself, where it was measured, tiles, bars and rows."""
    threads = f"{result['threads']} CPU thread{'s'[: result['threads'] != 1]}"
    return {
        "result": result,
        "unsettled": unsettled(result),
        "where": f"on {result['device']}, batch {result['batch']}, {threads}, eager",
        "tiles": _tiles(result),
        "bars": wide_and_narrow(partial(_bars, module_times(result))) if are_drawn() and not result["doubts"] else None,
        "rows": [operator_cells(row) for row in result["rows"] if row["pruned"] or row["dense"]],
    }


def operator_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of the table of operators.

    Its cells are module, operator, dense and pruned ms, dense and pruned MACs of a sample, achieved and ideal speedup,
    share of the pruned time, and MACs for each byte moved.
    """
    dense, pruned = row["dense"] or {}, row["pruned"] or {}
    macs = [count(side["macs"]) if side.get("macs") else digits(None) for side in (dense, pruned)]
    return (
        row["module"] or "(root)",
        row["operator"],
        digits(dense.get("ms")),
        digits(pruned.get("ms")),
        *macs,
        factor(row["speedup"]),
        factor(row["ideal"]),
        share(row["share"]),
        digits(pruned.get("intensity")),
    )


def module_times(result: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return dense and pruned milliseconds by module, the slowest first, all others together, and those outside."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in result["rows"]:
        for side, name in enumerate(("dense", "pruned")):
            times[row["module"] or "(root)"][side] += row[name]["ms"] if row[name] else 0.0
    names = sorted(times, key=lambda name: -max(times[name]))
    found = {name: (times[name][0], times[name][1]) for name in names[:BARS]}
    if names[BARS:]:
        rest = [times[name] for name in names[BARS:]]
        found[f"{OTHERS} ({len(rest)})"] = sum(one[0] for one in rest), sum(one[1] for one in rest)
    if result["dense_outside_ms"] or result["pruned_outside_ms"]:
        found[OUTSIDE] = result["dense_outside_ms"], result["pruned_outside_ms"]
    return found


def _bars(times: Mapping[str, tuple[float, float]], width: float) -> Markup:
    """Return the milliseconds by module, dense and pruned side by side."""
    from prunekit.report.figures.charts import shortened

    rows = np.arange(len(times))
    with canvas(1, 1, 0.29 * len(times) + 0.9, "explain", width=width) as (figure, (axes,)):
        for side, (name, offset) in enumerate((("dense", -0.2), ("pruned", 0.2))):
            values = [pair[side] for pair in times.values()]
            axes.barh(rows + offset, values, height=0.38, color=COLORS[name], label=name)
        axes.set_yticks(rows, labels=[shortened(name, min(40, round(4.8 * width))) for name in times], fontsize=9)
        axes.set(xlabel="ms of a forward pass", ylim=(len(times) - 0.4, -0.6))
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside upper right", ncols=2)
        return svg(figure, "Milliseconds by module, dense and pruned")


def _tiles(result: Mapping[str, Any]) -> list[Tile]:
    speedup, ratio = result["speedup"], result["macs_ratio"]
    outside, dense = result["pruned_outside_ms"], result["dense_outside_ms"]
    part = share(outside / (outside + result["pruned_operators_ms"]), 0)
    reached = f"; {share(speedup['median'] / ratio, 0)} of it was reached" if speedup["median"] < ratio else ""
    within = f"95 % interval {interval(speedup['low'], speedup['high'])}"
    latency = Tile("Latency", f"{digits(result['pruned_ms'])} ms", f"dense {digits(result['dense_ms'])} ms")
    return [
        Tile("Speedup", factor(speedup["median"]), within if result["own"] else f"as under Latency; {within}"),
        Tile("Ideal", factor(ratio), f"ratio of multiply-accumulates{reached}"),
        *([latency] if result["own"] else []),
        Tile("Outside operators", f"{digits(outside)} ms", f"{part} of the time; dense {digits(dense)} ms"),
    ]

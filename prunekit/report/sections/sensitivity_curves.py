"""Sensitivity: errors of channel groups as a table of colors.

A run whose plan was made from such errors shows them in a section; an analysis has a page of its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray

from prunekit.report.figures.canvas import INK, WIDTH, are_drawn, canvas, colormap, svg, wide_and_narrow
from prunekit.report.figures.charts import shortened
from prunekit.report.headline import Tile, capital, samples, scores, unit
from prunekit.report.run_data import Run
from prunekit.report.sections.section import register_section
from prunekit.utils.display import digits, in_unit, share

WAYS = {"error_fast": "fast, from statistics", "error_measured": "measured, as masked"}
MAX_ROWS = 64
EIGHTHS = range(7, 0, -1)
LOWEST, HIGHEST = 1e-3, 1.0
HEAT = ("#fdfdfb", "#fdeecb", "#fbc766", "#e3812b", "#a93a1c", "#5c1414")

Kept = Mapping[str, int]


@register_section("sensitivity", about="error against kept channels, which a plan was made from", order=150)
def curves_of_plan(run: Run) -> dict[str, Any] | None:
    """Return the errors, with where the plan stands; None if the plan was not made from such errors."""
    if run.sensitivity is None or not ways(run.sensitivity) or not are_drawn():
        return None
    groups = None if run.coupling is None else run.coupling.drop_duplicates("group").set_index("group")
    kept = None if groups is None else groups["kept"].to_dict()
    return {"sensitivity": heatmap(run.sensitivity, kept)}


def values(run: Run) -> dict[str, Any]:
    """Return what the template of the page shows of an analysis."""
    rows = run.sensitivity
    there = rows is not None and bool(ways(rows)) and are_drawn()
    return {
        "facts": run.analysis,
        "tiles": _tiles(run),
        "heatmap": heatmap(rows) if there else None,
        "both": rows is not None and len(ways(rows)) == 2,
    }


def _tiles(run: Run) -> list[Tile]:
    """Return the figures at the top of the page, as far as they are known."""
    facts = run.analysis
    if not facts:
        return []
    tiles = [Tile("Channel groups", str(len(facts["groups"])), f"from {facts['images']} unlabeled {samples(facts)}")]
    if facts["groups"]:
        first = facts["groups"][0]
        half = first["half_fast"] if first["half_measured"] is None else first["half_measured"]
        tiles.append(Tile("Most sensitive", share(half, 0), f"{first['group']}, at half of its channels"))
    if facts["dense"]:
        loss = f"loss {digits(facts['dense']['loss'])}, " if facts["dense"]["loss"] is not None else ""
        detail = f"dense, {loss}{facts['measured_images']} validation {samples(facts)}"
        for name, label in scores(facts):
            tiles.append(Tile(capital(label), in_unit(facts["dense"].get(name), unit(facts, name)), detail))
    if facts["agreement"] is not None:
        tiles.append(Tile("Fast against measured", f"{facts['agreement']:.2f}", "rank correlation over groups"))
    return tiles


def ways(rows: pd.DataFrame) -> list[str]:
    """Return the kinds of errors in the table."""
    return [way for way in WAYS if rows[way].notna().any()]


def most_sensitive(rows: pd.DataFrame) -> list[str]:
    """Return groups by their error at half of the channels, the largest first.

    It is the measured error if there is one, else the fast total.
    """
    halves = rows[rows["kept"] == np.maximum(1, rows["channels"] // 2)].set_index("group")
    by = "error_measured" if rows["error_measured"].notna().any() else "error_total"
    return list(halves.sort_values(by, ascending=False, kind="stable").index)


def heatmap(rows: pd.DataFrame, kept: Kept | None = None) -> tuple[Markup, int, int]:
    """Return the error of every group at seven shares of its channels, in percent of the variance."""
    names, shown = list(rows["group"].drop_duplicates()), ways(rows)
    chosen = sorted(most_sensitive(rows)[:MAX_ROWS], key=names.index)
    by_group = {name: frame.set_index("kept") for name, frame in rows[rows["group"].isin(chosen)].groupby("group")}
    sizes = {name: int(by_group[name]["channels"].iloc[0]) for name in chosen}
    tables = {way: np.array([_errors(by_group[name][way], sizes[name]) for name in chosen]) for way in shown}
    marks = None if kept is None else [kept.get(name, sizes[name]) / sizes[name] for name in chosen]
    drawn = wide_and_narrow(lambda width: _heatmap(tables, sizes, marks, width))
    return drawn, len(chosen), len(names)


def _heatmap(
    tables: Mapping[str, NDArray[np.float64]], sizes: Mapping[str, int], marks: Sequence[float] | None, width: float
) -> Markup:
    """Draw tables of colors beside each other, or below each other and in larger letters where it is narrow."""
    narrow = width < WIDTH
    rows, columns = (len(tables), 1) if narrow else (1, len(tables))
    height = rows * (0.2 * len(sizes) + 0.9)
    with canvas(columns, rows, height, "heatmap", width=width) as (figure, panels):
        for axes, (way, errors) in zip(panels, tables.items(), strict=True):
            _cells(axes, errors, 9 if narrow else 7.5)
            axes.set_title(WAYS[way])
            if marks is not None:
                _mark(axes, marks)
        labels = [shortened(f"{name} ({size})", 26 if narrow else 40) for name, size in sizes.items()]
        for axes in panels[: rows if narrow else 1]:
            axes.set_yticks(range(len(sizes)), labels=labels, fontsize=9 if narrow else 7.5)
        return svg(figure, "Error of every channel group against the share of its channels kept", lit=True)


def _errors(by_kept: pd.Series, size: int) -> list[float]:
    return [float(by_kept.get(max(1, size * eighths // 8) if eighths > 1 else 1, math.nan)) for eighths in EIGHTHS]


def _cells(axes: Any, errors: NDArray[np.float64], size: float) -> None:
    """Draw a table of colors with numbers in it, with labels of a size in points."""
    from matplotlib.colors import LogNorm

    edges = np.arange(errors.shape[1] + 1) - 0.5, np.arange(errors.shape[0] + 1) - 0.5
    norm, heat = LogNorm(LOWEST, HIGHEST, clip=True), colormap(*HEAT)
    axes.pcolormesh(*edges, np.maximum(errors, LOWEST), norm=norm, cmap=heat, edgecolors="white", linewidth=0.8)
    for row, column in np.argwhere(np.isfinite(errors)):
        color = _legible(heat(norm(max(errors[row, column], LOWEST))))
        text = _percent(errors[row, column])
        axes.text(column, row, text, ha="center", va="center", fontsize=size - 1, color=color)
    shares = [share(eighths / 8, 0) for eighths in EIGHTHS[:-1]]
    axes.set_xticks(range(len(EIGHTHS)), labels=[*shares, "one"], fontsize=size)
    axes.set(ylim=(errors.shape[0] - 0.5, -0.5), xlabel="channels kept", yticks=[])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _legible(background: Sequence[float]) -> str:
    """Return the color of text, dark or white, that stands out more from a background (WCAG 2.1's luminance)."""
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in background[:3]]
    return INK if float(np.dot(parts, (0.2126, 0.7152, 0.0722))) > 0.22 else "white"


def _percent(error: float) -> str:
    if error < 0.0005:
        return "0"
    return f"{100 * error:.1f}" if error < 0.0995 else f"{100 * error:.0f}"


def _mark(axes: Any, shares: Sequence[float]) -> None:
    """Mark where a plan is, at the bottom of each row, so that numbers stay legible."""
    places, rows = [8 * (1 - share) - 1 for share in shares], np.arange(len(shares)) + 0.34
    axes.plot(places, rows, "^", color=INK, markersize=4.5, markeredgecolor="white", markeredgewidth=0.7, clip_on=False)
    axes.set_xlim(-1.4, len(EIGHTHS) - 0.4)

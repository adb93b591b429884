"""The figure of gradient flow: the size of each layer's gradients, and how it changes over training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from prunekit.measure.measurement_effort import current_effort
from prunekit.report.figures import canvas as figures
from prunekit.report.figures.charts import evenly, shortened
from prunekit.utils.files import atomic_file

COLUMNS = ("step", "epoch", "layer", "p10", "median", "p90", "zeros")
MOST_LAYERS = 64
PHASES = (("first tenth of training", "#64748b", -0.17), ("last tenth", "#0f766e", 0.17))
COLORS = "viridis"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#eef0f4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,
}


def shown_layers(rows: pd.DataFrame) -> list[str]:
    """Return the layers of a figure in the order of the model: as many as are legible, evenly spread."""
    return evenly(list(rows["layer"].drop_duplicates()), MOST_LAYERS)


def flow_height(rows: pd.DataFrame) -> float:
    """Return the height of a figure of these rows in inches."""
    return 0.19 * len(shown_layers(rows)) + 1.6


def draw_flow(figure: Figure, rows: pd.DataFrame, *, narrow: bool = False) -> None:
    """Draw two panels that share the layers: percentiles at the beginning and the end, and the median over time."""
    layers = shown_layers(rows)
    rows = rows[rows["layer"].isin(layers)]
    left, right = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.15))
    _percentiles(left, rows, layers)
    drawn = _over_time(right, rows, layers)
    labels, size = [shortened(layer, 22 if narrow else 34) for layer in layers], 9 if narrow else 7.5
    for axes in (left, right) if narrow else (left,):
        axes.set_yticks(range(len(layers)), labels=labels, fontsize=size)
        axes.set_ylim(len(layers) - 0.4, -0.6)
    right.tick_params(axis="y", left=False)
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=right, location="right", aspect=40, pad=0.02)
        _plain_log(bar.ax.yaxis)
        bar.outline.set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper right", ncols=2)


def flow_figures(rows: pd.DataFrame | None) -> list[tuple[str, Markup, int, int]]:
    """Return for each training run its name, its figure, the number of layers shown, and the number of all layers."""
    if rows is None or rows.empty or not current_effort().figures:
        return []
    return [
        (str(name), _svg(str(name), part), len(shown_layers(part)), part["layer"].nunique())
        for name, part in rows.groupby("run", sort=False)
    ]


def _svg(name: str, rows: pd.DataFrame) -> Markup:
    def drawn(width: float) -> Markup:
        narrow = width < figures.WIDTH
        with matplotlib.rc_context({**figures.STYLE, "svg.hashsalt": f"gradients-{name} {width}"}):
            height = flow_height(rows) * (2 if narrow else 1)
            figure = Figure(figsize=(width, height), layout="constrained")
            FigureCanvasSVG(figure)
            draw_flow(figure, rows, narrow=narrow)
            return figures.svg(figure, f"Percentiles of the gradients of each layer, {name}")

    return figures.wide_and_narrow(drawn)


def write_flow(path: Path, rows: pd.DataFrame, title: str) -> Path:
    """Write the figure of one training run as a PNG file, atomically."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, flow_height(rows) + 0.35), dpi=120, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        draw_flow(figure, rows)
        with atomic_file(path) as temporary:
            canvas.print_png(temporary)  # type: ignore[no-untyped-call]
    return path


def _percentiles(axes: Any, rows: pd.DataFrame, layers: list[str]) -> None:
    first, last = rows["step"].min(), rows["step"].max()
    tenth = (last - first) / 10
    parts = (rows[rows["step"] <= first + tenth], rows[rows["step"] >= last - tenth])
    # A single record is its own beginning and end.
    for part, (label, color, offset) in list(zip(parts, PHASES, strict=True))[: 1 if first == last else 2]:
        means = part.groupby("layer")[["p10", "median", "p90"]].agg(_geometric).reindex(layers)
        places = np.arange(len(layers)) + offset
        axes.hlines(places, means["p10"], means["p90"], color=color, linewidth=1.6, alpha=0.55)
        axes.plot(means["median"], places, "o", color=color, markersize=3.2, label=label)
    if (rows["p90"] > 0).any():
        axes.set_xscale("log")
        _plain_log(axes.xaxis)
    axes.set(title="Median and 10th to 90th percentile of |gradient|", xlabel="|gradient|")
    axes.grid(axis="x")


def _geometric(values: pd.Series) -> float:
    positive = values[values > 0]
    return float(np.exp(np.log(positive).mean())) if len(positive) else math.nan


def _over_time(axes: Any, rows: pd.DataFrame, layers: list[str]) -> Any:
    table = rows.pivot_table(index="layer", columns="epoch", values="median", dropna=False).reindex(layers)
    values: NDArray[np.float64] = table.to_numpy(dtype=float)
    values = np.where(values > 0, values, np.nan)
    axes.set(title="Median of |gradient| over training", xlabel="epoch")
    if not np.isfinite(values).any():
        return None
    epochs = np.append(0.0, table.columns.to_numpy(dtype=float))
    norm = LogNorm(np.nanmin(values), max(np.nanmax(values), np.nanmin(values) * 1.01))
    return axes.pcolormesh(epochs, np.arange(len(layers) + 1) - 0.5, values, norm=norm, cmap=COLORS, rasterized=True)


def _plain_log(axis: Any) -> None:
    """Label a logarithmic axis like 1e-05: default labels are mathematics, which SVG text shows as source."""
    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())

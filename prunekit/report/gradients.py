"""Gradient flow of each training of a run, as figures of the report."""

from __future__ import annotations

import matplotlib
import pandas as pd
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from prunekit.report.figures import STYLE, WIDTH, svg
from prunekit.report.flow import draw_flow, flow_height, shown_layers


def flow_figures(rows: pd.DataFrame | None) -> list[tuple[str, Markup, int, int]]:
    """For each training its name, its figure, how many layers that shows, and how many there are."""
    if rows is None or rows.empty:
        return []
    return [
        (str(name), _figure(str(name), part), len(shown_layers(part)), part["layer"].nunique())
        for name, part in rows.groupby("run", sort=False)
    ]


def _figure(name: str, rows: pd.DataFrame) -> Markup:
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"gradients-{name}"}):
        figure = Figure(figsize=(WIDTH, flow_height(rows)), layout="constrained")
        FigureCanvasSVG(figure)
        draw_flow(figure, rows)
        return svg(figure, f"Percentiles of the gradients of each layer, {name}")

"""Score against cost of several runs, with the Pareto front of those that can be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from prunekit.report.figures import COLORS, INK, SPARE_COLORS, canvas, svg
from prunekit.report.points import Point, front, fronts, groups

LINES = (COLORS["pruned"], *SPARE_COLORS, COLORS["control"])
"""Of the groups of points that can be compared, in turn."""
MARKS = {"pruned": "o", "deployed": "P", "dense": "D", "control": "s"}
MAX_PANELS = 6
SAME, TEXT = (0.03, 0.03), (0.16, 0.07)
"""Shares of a panel's width and height: of marks that cover each other, and of the text of a label, about."""

Panel = tuple[str, str, Sequence[Point]]
"""Title, name of the cost with its unit, and points."""


def pareto(panels: Sequence[Panel], score: str) -> Markup:
    """A panel for each cost, at most `MAX_PANELS`; `score` is what the scores are called."""
    panels = panels[:MAX_PANELS]
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with canvas(columns, rows, 3.5 * rows + 0.4, "pareto", used=len(panels)) as (figure, all_axes):
        for axes, (title, cost, points) in zip(all_axes, panels, strict=False):
            _panel(axes, points)
            axes.set(title=title, xlabel=cost, ylabel=f"{score}, %")
        figure.legend(handles=_legend(panels), loc="outside upper right", ncols=6)
        names = ", ".join(f"{score} against {cost} ({title})" for title, cost, _ in panels)
        return svg(figure, f"{names}; all figures are in the tables")


def _panel(axes: Any, points: Sequence[Point]) -> None:
    most = max((point.cost for point in points), default=1.0)
    for index, members in enumerate(groups(points)):
        color = LINES[index % len(LINES)]
        best = front(members)
        if len(best) > 1:
            costs, reached = [point.cost for point in best], [point.score for point in best]
            axes.step(costs, reached, where="post", color=color, linewidth=1.1, alpha=0.7, zorder=2)
        for point in members:
            _mark(axes, point, color)
    _labels(axes, points, most)
    costs = [end for point in points for end in (point.cost, *(point.cost_ends or ()))]
    axes.set_xlim(0, 1.12 * max(costs, default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.margins(y=0.12)


def _mark(axes: Any, point: Point, color: str) -> None:
    errors = [_reach(value, ends) for value, ends in ((point.cost, point.cost_ends), (point.score, point.score_ends))]
    axes.errorbar(
        point.cost,
        point.score,
        xerr=errors[0],
        yerr=errors[1],
        fmt=MARKS[point.kind],
        color=color,
        markerfacecolor=color if point.stable else "#ffffff",
        markersize=7,
        elinewidth=0.8,
        capsize=2,
        zorder=3,
    )


def _labels(axes: Any, points: Sequence[Point], most: float) -> None:
    """A label for each mark, one for marks at the same place, and below the mark where it would lie on another."""
    ends = [end for point in points for end in (point.score, *(point.score_ends or ()))]
    span = (max(ends, default=1.0) - min(ends, default=0.0)) or 1.0
    placed: list[tuple[Point, list[str]]] = []
    for point in points:
        same = next((names for other, names in placed if _near(point, other, most, span, SAME)), None)
        if same is None:
            placed.append((point, [point.label]))
        else:
            same.append(point.label)
    for index, (point, names) in enumerate(placed):
        hidden = any(_near(point, other, most, span, TEXT) for other, _ in placed[:index])
        # To the left of marks on the right, so that long names stay within the panel.
        side = {"ha": "right"} if point.cost > 0.6 * most else {"ha": "left"}
        offset = (-7 if side["ha"] == "right" else 7, -13 if hidden else 6)
        at = point.cost, point.score
        axes.annotate(
            ", ".join(names), at, xytext=offset, textcoords="offset points", fontsize=9, color=INK, zorder=4, **side
        )


def _near(one: Point, other: Point, most: float, span: float, reach: tuple[float, float]) -> bool:
    return abs(one.cost - other.cost) <= reach[0] * most and abs(one.score - other.score) <= reach[1] * span


def _reach(value: float, ends: tuple[float, float] | None) -> list[list[float]] | None:
    """How far an interval reaches to either side; a median may lie at its very end, never beyond."""
    return None if ends is None else [[max(0.0, value - ends[0])], [max(0.0, ends[1] - value)]]


def _legend(panels: Sequence[Panel]) -> list[Any]:
    kinds = dict.fromkeys(point.kind for _, _, points in panels for point in points)
    style: dict[str, Any] = {"color": INK, "linestyle": "none", "markersize": 6}
    handles = [Line2D([], [], marker=MARKS[kind], label=kind, **style) for kind in MARKS if kind in kinds]
    if any(len(best) > 1 for _, _, points in panels for best in fronts(points)):
        handles.append(Line2D([], [], color=INK, linewidth=1.1, label="Pareto front"))
    if any(not point.stable for _, _, points in panels for point in points):
        handles.append(Line2D([], [], marker="o", markerfacecolor="#ffffff", label="hollow: unstable", **style))
    return handles

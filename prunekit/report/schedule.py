"""A pruning schedule as a figure: what it means to leave, what its plans leave, and the channels of each change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator

from prunekit.report.figures import COLORS, GRAY, SPARE_COLORS, canvas, svg

if TYPE_CHECKING:
    from prunekit.planning.schedule import Timeline

POINTS = 400
"""Of a curve."""
LINES = (COLORS["pruned"], COLORS["control"], *SPARE_COLORS)


def drawn(changes: pd.DataFrame, summary: Mapping[str, Any] | None) -> Markup:
    """The share of each resource over epochs, planned and actual, and the channels of each change.

    Args:
        changes: as in `schedule.csv`.
        summary: of `metrics.json`; None for a run that has not finished, whose curve is not drawn.
    """
    line = None if summary is None else _timeline(summary)
    with canvas(2, 1, 3.3, "schedule") as (figure, (shares, channels)):
        for index, (resource, rows) in enumerate(changes.groupby("resource", sort=False)):
            color = LINES[index % len(LINES)]
            last = rows["epoch"].iloc[-1] if line is None else line.epochs
            if line is not None and summary is not None:
                steps = np.linspace(0, line.total, POINTS)
                curve = [100 * line.planned(step, summary["final"][resource]) for step in steps]
                shares.plot(steps / line.steps, curve, color=color, linestyle="--", linewidth=1.1)
            epochs, actual = [0, *rows["epoch"], last], [100.0, *(100 * rows["actual"]), 100 * rows["actual"].iloc[-1]]
            shares.step(epochs, actual, where="post", color=color, label=resource)
            shares.plot(rows["epoch"], 100 * rows["actual"], "o", color=color, markersize=3.5)
        once = changes.drop_duplicates("step")
        width = 0.7 * _closest(once["epoch"])
        channels.bar(once["epoch"], once["pruned"], width, color="#e5a13d", label="pruned")
        channels.bar(once["epoch"], -once["regrown"], width, color=COLORS["pruned"], label="came back")
        channels.axhline(0, color=GRAY, linewidth=0.7)
        if line is not None:
            _frame((shares, channels), line)
        shares.set(title="Left of the dense model", xlabel="epoch", ylabel="percent", ylim=(0, 104))
        channels.set(title="Channels at each change of the plan", xlabel="epoch", ylabel="channels")
        channels.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):g}"))
        for axes in (shares, channels):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        shares.legend(loc="upper right")
        if once["regrown"].any():
            channels.legend(loc="upper right")
        return svg(figure, "Pruning schedule: share of the dense model left, and channels pruned, by epoch")


def _timeline(summary: Mapping[str, Any]) -> Timeline:
    from prunekit.planning import ScheduleSettings  # only a page with this figure waits for torch
    from prunekit.planning.schedule import timeline

    settings = ScheduleSettings(**summary["settings"])
    return timeline(settings, epochs=summary["epochs"], steps=summary["steps_per_epoch"])


def _closest(epochs: pd.Series) -> float:
    """The least distance of two changes, of which bars take a part."""
    return float(np.diff(epochs).min()) if len(epochs) > 1 else 0.5


def _frame(panels: tuple[Any, ...], line: Timeline) -> None:
    """The whole training, with the step from which masks are final."""
    final = line.stages[-1].step / line.steps
    for axes in panels:
        axes.set_xlim(-0.02 * line.epochs, 1.02 * line.epochs)
        axes.axvline(final, color=GRAY, linewidth=0.9, linestyle=":")
    panels[0].annotate(
        "masks final", (final, 3), xytext=(4, 0), textcoords="offset points", fontsize=8, color="#6b7280"
    )

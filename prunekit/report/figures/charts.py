"""Charts of the pages, each as SVG elements that stand on their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from prunekit.errors import ArtifactError
from prunekit.report.figures.canvas import (
    COLORS,
    GRAY,
    INK,
    PALE,
    SPARE_COLORS,
    are_drawn,
    canvas,
    stacked,
    svg,
    wide_and_narrow,
)
from prunekit.utils.display import RESOURCES, plural

if TYPE_CHECKING:
    from prunekit.planning.schedules import Timeline


MAX_GROUPS = 24
MAX_COUPLED = 40
LABELS = {"top1": "top-1"}
POINTS = 400
"""Points of the curve of a schedule."""
LINES = (COLORS["pruned"], COLORS["control"], *SPARE_COLORS)


def evenly(names: Sequence[str], most: int) -> list[str]:
    """Return the names, or as many of them as are legible, evenly spread."""
    chosen = np.unique(np.linspace(0, len(names) - 1, min(most, len(names))).round().astype(int))
    return [names[index] for index in chosen]


def shortened(text: str, length: int = 34) -> str:
    """Return a module path, without its beginning if it is too long."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


def figure_or_none(draw: Callable[[pd.DataFrame], Any], frame: pd.DataFrame | None) -> Any:
    """Return the figure of a table; None if the run wrote no rows, or pages have no figures here."""
    return None if frame is None or frame.empty or not are_drawn() else draw(frame)


def _color(name: str, names: list[str]) -> str:
    spare = [other for other in names if other not in COLORS]
    return COLORS.get(name) or SPARE_COLORS[spare.index(name) % len(SPARE_COLORS)]


def widths(layers: pd.DataFrame) -> Markup:
    """Return the output channels of every layer before (pale) and after (solid), in the order of the model.

    Layers without channels after, those of blocks that are gone, are hatched.
    """
    return wide_and_narrow(partial(_widths, layers))


def _widths(layers: pd.DataFrame, width: float) -> Markup:
    from matplotlib.ticker import MaxNLocator

    gone = layers["out_after"].to_numpy() == 0
    with canvas(1, 1, 3.0, "widths", width=width) as (figure, (axes,)):
        index, before = np.arange(len(layers)), layers["out_before"].to_numpy()
        axes.bar(index[~gone], before[~gone], width=0.85, color=PALE, label="dense")
        axes.bar(index, layers["out_after"], width=0.85, color=COLORS["pruned"], label="pruned")
        if gone.any():
            style: dict[str, Any] = {"facecolor": "none", "edgecolor": GRAY, "hatch": "////", "linewidth": 0.6}
            axes.bar(index[gone], before[gone], width=0.85, label="gone with its block", **style)
        axes.set(xlabel="layer, in the order of the model", ylabel="output channels", xlim=(-0.7, len(layers) - 0.3))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper left", ncols=3)
        without = f"; {plural(int(gone.sum()), 'layer')} gone with their blocks" if gone.any() else ""
        return svg(figure, f"Output channels of every layer before and after pruning{without}")


def histograms(scores: pd.DataFrame) -> tuple[Markup, int, int]:
    """Return histograms of the scores of kept and removed channels by group, how many groups, and of how many."""
    names = list(scores["group"].drop_duplicates())
    chosen = evenly(names, MAX_GROUPS)
    rows = math.ceil(len(chosen) / 4)
    height = 1.65 * rows + 0.5
    edges = {"left": 0.03, "right": 0.985, "bottom": 0.25 / height, "top": 1 - 0.6 / height}
    grid = {**edges, "wspace": 0.16, "hspace": 0.45}
    with canvas(4, rows, height, "histograms", grid, len(chosen)) as (figure, panels):
        for axes, name in zip(panels, chosen, strict=False):
            _histogram(axes, name, scores[scores["group"] == name])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper right", ncols=2)
        drawn = stacked(figure, "Histograms of importance scores per channel group", len(chosen), size="small")
        return drawn, len(chosen), len(names)


def _histogram(axes: Any, name: str, group: pd.DataFrame) -> None:
    finite = group[np.isfinite(group["score"].astype(float))]
    kept = finite["kept"].astype(int) == 1
    values = finite["score"].to_numpy(dtype=float)
    edges = np.histogram_bin_edges(values, bins=min(24, max(6, len(values) // 4))) if len(values) else 6
    every, edges = np.histogram(values, edges)
    removed, _ = np.histogram(values[~kept.to_numpy()], edges)
    axes.stairs(removed, edges, fill=True, color="#e5a13d", label="removed")
    axes.stairs(every, edges, baseline=removed, fill=True, color=COLORS["pruned"], label="kept")
    axes.set_title(shortened(f"{name} ({int(kept.sum())} of {len(group)})", 30), fontsize=9.5)
    axes.tick_params(labelsize=9)
    # Ticks are most of what twenty panels take: the ends of the scores, and the most channels in a bin.
    ends, most = (float(edges[0]), float(edges[-1])), int(every.max())
    axes.set_xticks(ends, labels=[f"{end:.3g}" for end in ends])
    axes.set_yticks([most], labels=[str(most)])
    axes.grid(visible=False)


def coupling(slots: pd.DataFrame) -> tuple[Markup, int, int]:
    """Return the modules that have the channels of each group: a row for each group, a column for each module."""
    names = list(slots["group"].drop_duplicates())
    spread = slots.groupby("group")["module"].nunique()
    chosen = sorted(sorted(names, key=lambda name: -int(spread[name]))[:MAX_COUPLED], key=names.index)
    drawn = wide_and_narrow(lambda width: _coupling(slots, chosen, width))
    return drawn, len(chosen), len(names)


def _coupling(slots: pd.DataFrame, chosen: Sequence[str], width: float) -> Markup:
    from matplotlib.ticker import MaxNLocator

    with canvas(1, 1, 0.17 * len(chosen) + 1.1, "coupling", width=width) as (figure, (axes,)):
        for made, color, label in ((True, COLORS["pruned"], "made or scaled"), (False, "#e5a13d", "read")):
            part = slots[((slots["axis"] == 0) == made) & slots["group"].isin(chosen)]
            rows = part["group"].map(chosen.index)
            offset = -0.16 if made else 0.16  # a module may do both
            axes.scatter(part["position"], rows + offset, s=9, marker="s", color=color, label=label)
        first = slots.drop_duplicates("group").set_index("group")
        labels = [f"{name} ({first['kept'][name]} of {first['channels'][name]})" for name in chosen]
        shown = [shortened(label, min(44, round(5.4 * width))) for label in labels]
        axes.set_yticks(range(len(chosen)), labels=shown, fontsize=8.5)
        axes.set(xlabel="module, in the order of the model", ylim=(len(chosen) - 0.4, -0.6))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper right", ncols=2, markerscale=2)
        return svg(figure, "Channel groups and the modules that make or read their channels")


def curves(
    history: pd.DataFrame,
    labels: Mapping[str, str] = LABELS,
    unit: str = "%",
    trainings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Markup:
    """Return loss and validation score by epoch, with a color for each training run, whose start is at epoch 0.

    Starts are in `trainings`, which is that of `metrics.json`.
    """
    from matplotlib.ticker import MaxNLocator

    found = [name for name in history.columns if name.startswith("validation_") and name != "validation_loss"]
    if not found:
        raise ArtifactError("history.csv: expected a column validation_top1, or of another score; the file is damaged")
    column, score = found[0], found[0].removeprefix("validation_")
    label = labels.get(score, score.replace("_", " "))
    names = list(history["run"].drop_duplicates())
    starts = [
        {"run": name, "epoch": 0, "validation_loss": found.get("start_loss"), column: found["start"]}
        for name, found in (trainings or {}).items()
        if name in names and found.get("start") is not None
    ]
    history = pd.concat([pd.DataFrame(starts), history]) if starts else history
    with canvas(2, 1, 3.3, "curves") as (figure, (loss, reached)):
        for name in names:
            rows = history[history["run"] == name]
            style: dict[str, Any] = {"color": _color(name, names), "marker": "o", "markersize": 3}
            loss.plot(rows["epoch"], rows["train_loss"], linestyle="--", linewidth=1.1, **style)
            loss.plot(rows["epoch"], rows["validation_loss"], **style)
            reached.plot(rows["epoch"], rows[column], label=name, **style)
        kind = "cross entropy" if score in LABELS else "loss"
        loss.set(title="Loss (dashed: training, solid: validation)", xlabel="epoch", ylabel=kind)
        reached.set(title=f"Validation {label}", xlabel="epoch", ylabel="percent" if unit == "%" else unit or label)
        losses = history[["train_loss", "validation_loss"]]
        if losses.min().min() > 0 and losses.max().max() > 50 * losses.min().min():  # small ones would lie on the axis
            loss.set_yscale("log")
            _plain_log(loss.yaxis)
        for axes in (loss, reached):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            # A lone epoch would get an axis of thousandths around it.
            axes.set_xlim(history["epoch"].min() - 0.5, history["epoch"].max() + 0.5)
        reached.legend(loc="lower right")
        return stacked(figure, f"Training curves: loss and validation {label} by epoch", 2)


def rates(trainings: Mapping[str, Mapping[str, Any]]) -> Markup | None:
    """Return the held-out loss of each learning rate that was tried, with that of the start, in a panel for each run.

    Trials whose loss was not finite are crosses at the top. None without trials, or where pages have no figures.
    """
    tried = {name: found for name, found in trainings.items() if found.get("rates")}
    if not tried or not are_drawn():
        return None
    with canvas(2, math.ceil(len(tried) / 2), 2.6 * math.ceil(len(tried) / 2), "rates", used=len(tried)) as (
        figure,
        panels,
    ):
        for axes, (name, found) in zip(panels, tried.items(), strict=False):
            start, *rows = found["rates"]
            finite = [(row["rate"], row["held_out_loss"]) for row in rows if row["held_out_loss"] is not None]
            failed = [row["rate"] for row in rows if row["held_out_loss"] is None]
            color = _color(name, list(tried))
            axes.plot(*zip(*finite, strict=True), "o-", color=color, markersize=4) if finite else None
            axes.plot(failed, [0.94] * len(failed), "x", color=INK, transform=axes.get_xaxis_transform())
            for rate, loss in finite:
                if rate == found["lr"]:
                    axes.plot(rate, loss, "o", color=color, markersize=10, fillstyle="none", label=f"taken: {rate:g}")
            if start["held_out_loss"] is not None:
                axes.axhline(start["held_out_loss"], color=GRAY, linestyle="--", linewidth=1.1, label="start")
            axes.set(title=f"Learning rates tried: {name}", xlabel="largest rate", ylabel="held-out loss", xscale="log")
            _plain_log(axes.xaxis)
            axes.legend(loc="upper left")
        return stacked(figure, "Held-out loss of each learning rate that was tried", len(tried))


def frontier(found: Mapping[str, Any]) -> Markup:
    """Return the score of a frontier's points against the MACs that are left, and against the speedup if it is known.

    A second line is of the files in int8, at the speedup in float, from the dense model's on. Bars are 95 % intervals
    of the score, and of a speedup. The dense model is a diamond, the knee a ring; dashed and dotted lines are the
    budgets that were asked for.
    """
    points, about, dense, alone = found["points"], found["score"], found["dense"], found.get("dense_int8")
    sign = 1 if about["lower_is_better"] else -1
    unit = 100 if about["unit"] == "%" else dense if about["lower_is_better"] else 1
    asked = found.get("asked") or {}
    panels = [("macs", "multiply-accumulates left, %", 100.0)]
    if any(point["speedup"] for point in points):
        of = " in float" if any(one.get("int8_score") for one in points) else ""
        panels.append(("speedup", f"speedup{of}, times the dense model", 1.0))
    lines = ("", COLORS["pruned"], "pruned, repaired"), ("int8_", SPARE_COLORS[0], "as files in int8")
    with canvas(2, 1, 3.4, "frontier", used=len(panels)) as (figure, each):
        for axes, (key, label, scale) in zip(each, panels, strict=False):
            rows = [point for point in points if point[key]]
            for prefix, color, name in lines:
                shown = [{"macs": 1.0, "speedup": 1.0, **alone}, *rows] if prefix and alone else rows
                shown = [row for row in shown if row.get(f"{prefix}score") is not None]
                at, reached = [scale * row[key] for row in shown], [row[f"{prefix}score"] for row in shown]
                lost = [[row[f"{prefix}{end}"] for end in ("low", "drop", "high")] for row in shown]
                if shown and all(low is not None for low, _, _ in lost):
                    ends = [[unit * (drop - low), unit * (high - drop)] for low, drop, high in lost]
                    axes.errorbar(at, reached, list(zip(*ends, strict=True))[::sign], color=PALE, fmt="none", zorder=2)
                if shown:
                    axes.plot(at, reached, "o-", color=color, markersize=4.5, zorder=3, label=name)
            if key == "speedup":
                across = [[row[key] - row["speedup_low"], row["speedup_high"] - row[key]] for row in rows]
                at, reached = [row[key] for row in rows], [row["score"] for row in rows]
                axes.errorbar(at, reached, xerr=list(zip(*across, strict=True)), color=PALE, fmt="none", zorder=2)
            axes.plot(scale, dense, "D", color=COLORS["dense"], markersize=6, zorder=3, label="dense")
            if found.get("knee") is not None and points[found["knee"]] in rows:
                knee = points[found["knee"]]
                ring: dict[str, Any] = {"markersize": 11, "fillstyle": "none", "color": INK}
                axes.plot(scale * knee[key], knee["score"], "o", label="knee", **ring)
            if key in asked:
                axes.axvline(
                    scale * asked[key], color=COLORS["control"], linestyle="--", linewidth=1, label="asked for"
                )
            if "max_drop" in asked:
                limit = dense + sign * unit * asked["max_drop"]
                axes.axhline(limit, color=COLORS["control"], linestyle=":", linewidth=1.2, label="max_drop")
            axes.set(xlabel=label, ylabel=f"{about['label']} {about['unit']}".rstrip())
            if key == "macs":
                axes.invert_xaxis()
                axes.set_title("Score against what is left")
                axes.legend(loc="lower left")
            else:
                axes.set_title("Score against speed")
        return stacked(figure, "Score of the frontier's models against MACs and speedup", len(panels))


def latencies(samples: pd.DataFrame) -> Markup:
    """Return every timed run as a dot, with median and the range from p10 to p90, in a panel for each setting."""
    keys = ["device", "runtime", "batch", "threads", "dtype"]
    if "memory_format" in samples.columns:
        layout = samples["memory_format"].map(lambda name: "" if name == "contiguous" else f", {name}")
        samples = samples.assign(model=samples["model"] + layout)
    settings = list(samples.groupby(keys, sort=False, dropna=False))
    rows = math.ceil(len(settings) / 2)
    models = len(samples["model"].drop_duplicates())
    with canvas(2, rows, (0.45 * models + 0.85) * rows, "latencies", used=len(settings)) as (figure, panels):
        for axes, (key, frame) in zip(panels, settings, strict=False):
            _latency_panel(axes, key, frame)
        return stacked(figure, "Latency of every timed run, by device and batch", len(settings))


def _latency_panel(axes: Any, key: tuple[Any, ...], frame: pd.DataFrame) -> None:
    device, runtime, batch, threads, dtype = key
    names = list(frame["model"].drop_duplicates())[::-1]
    jitter = np.random.default_rng(0)
    for row, name in enumerate(names):
        ms = frame.loc[frame["model"] == name, "ms"].to_numpy(dtype=float)
        low, median, high = np.percentile(ms, (10, 50, 90))
        color = _color(name, names)
        axes.plot(ms, row + jitter.uniform(-0.22, 0.22, len(ms)), ".", color=color, alpha=0.45, markersize=4)
        axes.plot([low, high], [row, row], color=color, linewidth=2.5, solid_capstyle="round")
        axes.plot(median, row, "|", color=INK, markersize=17, markeredgewidth=1.8)
    with_threads = f", {threads:g} thread{'s'[: threads != 1]}" if not pd.isna(threads) else ""
    axes.set(title=f"{device}, {runtime}, batch {batch}{with_threads}, {dtype}", xlabel="ms")
    axes.set_yticks(range(len(names)), labels=names)
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)


def schedule(changes: pd.DataFrame, summary: Mapping[str, Any] | None) -> Markup:
    """Return the share of each resource over epochs, planned and actual, and the channels of each change.

    Where a pattern alone is pruned, it is the single weights of each change.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    line = None if summary is None else _timeline(summary)
    with canvas(2, 1, 3.3, "schedule") as (figure, (shares, channels)):
        for index, (resource, rows) in enumerate(changes.groupby("resource", sort=False)):
            color = LINES[index % len(LINES)]
            last = rows["epoch"].iloc[-1] if line is None else line.epochs
            if line is not None and summary is not None:
                steps = np.linspace(0, line.total, POINTS)
                curve = [100 * line.share_at(step, summary["final"][resource]) for step in steps]
                shares.plot(steps / line.steps, curve, color=color, linestyle="--", linewidth=1.1)
            epochs, actual = [0, *rows["epoch"], last], [100.0, *(100 * rows["actual"]), 100 * rows["actual"].iloc[-1]]
            shares.step(epochs, actual, where="post", color=color, label=RESOURCES.get(resource, resource))
            shares.plot(rows["epoch"], 100 * rows["actual"], "o", color=color, markersize=3.5)
        of_channels = changes[changes["resource"] != "weights"]
        what = "weights" if of_channels.empty else "channels"
        once = (changes if of_channels.empty else of_channels).drop_duplicates("step")
        width = 0.7 * (float(np.diff(once["epoch"]).min()) if len(once) > 1 else 0.5)  # of the smallest distance
        channels.bar(once["epoch"], once["pruned"], width, color="#e5a13d", label="pruned")
        channels.bar(once["epoch"], -once["regrown"], width, color=COLORS["pruned"], label="came back")
        channels.axhline(0, color=GRAY, linewidth=0.7)
        if line is not None:
            _frame((shares, channels), line)
        shares.set(title="Left of the dense model", xlabel="epoch", ylabel="percent", ylim=(0, 104))
        channels.set(title=f"{what.capitalize()} at each change of the plan", xlabel="epoch", ylabel=what)
        channels.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):g}"))
        for axes in (shares, channels):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        shares.legend(loc="upper right")
        if once["regrown"].any():
            channels.legend(loc="upper right")
        label = f"Pruning schedule: share of the dense model left, and {what} pruned, by epoch"
        return stacked(figure, label, 2)


def _timeline(summary: Mapping[str, Any]) -> Timeline:
    from prunekit.planning.schedules import timeline
    from prunekit.settings.pruning import ScheduleSettings  # only a page with this figure waits for torch

    settings = ScheduleSettings(**summary["settings"])
    return timeline(settings, epochs=summary["epochs"], steps=summary["steps_per_epoch"])


def _frame(panels: tuple[Any, ...], line: Timeline) -> None:
    """Show the whole training, and the step from which masks are final."""
    final = line.pruning_steps[-1].step / line.steps
    for axes in panels:
        axes.set_xlim(-0.02 * line.epochs, 1.02 * line.epochs)
        axes.axvline(final, color=GRAY, linewidth=0.9, linestyle=":")
    panels[0].annotate(
        "masks final", (final, 3), xytext=(4, 0), textcoords="offset points", fontsize=8, color="#6b7280"
    )


def _plain_log(axis: Any) -> None:
    """Label a logarithmic axis like 1e-05: default labels are mathematics, which SVG text shows as source."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(numticks=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())

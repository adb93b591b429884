"""The page of a latency profile: what layers take by their widths, and how well their sum predicts networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from prunekit.measure.latency import row_text
from prunekit.planning.budgets.cost_model import round_up
from prunekit.report.figures import charts as figures
from prunekit.report.figures.canvas import COLORS, GRAY, INK, are_drawn, canvas, colormap, stacked
from prunekit.report.figures.charts import shortened
from prunekit.report.headline import Tile
from prunekit.report.run_data import Run, records
from prunekit.utils.display import digits, duration, share

MAX_PANELS, COLUMNS = 12, 3
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the other widths at which a fit is drawn."""
DEPTH = ("#f4b266", "#5fb3a8", "#0b4f4a")
"""Colors from a small share of the other widths to all of them."""
KINDS = {"fitted to": ("o", GRAY, 20), "held out": ("o", COLORS["pruned"], 34), "dense": ("D", INK, 34)}
"""How networks are marked: shape, color, size."""
Layer = Mapping[str, Any]
Numbers = NDArray[np.float64]


def values(run: Run) -> dict[str, Any]:
    """Return what the template of the page shows of a profile."""
    facts = run.profile
    drawn = [layer for layer in run.fits.get("layers", []) if layer["widths"]]
    return {
        "facts": facts,
        "tiles": _tiles(facts) if facts else [],
        "where": row_text.setting_text(facts["setting"]) if facts else "",
        "layers": layers(run.fits["layers"]) if drawn and are_drawn() else None,
        "predictions": figures.figure_or_none(lambda rows: predictions(records(rows) or []), run.networks),
        "machine": row_text.machine_text(facts.get("machine", {})),
        "elsewhere": not facts.get("machine"),
    }


def _tiles(facts: Mapping[str, Any]) -> list[Tile]:
    """Return the figures at the top of the page."""
    errors = [abs(check["error"]) for check in facts["checks"]]
    held_out = f"{len(errors)} of {facts['networks']} networks, held out"
    tiles = [
        Tile("Median error of the prediction", share(facts["error"]), held_out),
        Tile("Largest error", share(max(errors)), "on the same networks"),
        Tile("Dense model", f"{digits(facts['dense_ms'])} ms", row_text.setting_text(facts["setting"])),
    ]
    if facts["layers"]:
        first = facts["layers"][0]
        tiles.append(Tile("Costliest layer", share(first["share"]), first["module"] or "(the model's own code)"))
    return [*tiles, Tile("Profiled in", duration(facts["seconds"]), "without what the cache had")]


def layers(found: Sequence[Layer]) -> tuple[Markup, int, int]:
    """Return the milliseconds of the costliest layers against one width, measured and fitted."""
    ranked = together(found)
    chosen, total = ranked[:MAX_PANELS], sum(layer["measured"][0]["ms"] for layer in found)
    rows = math.ceil(len(chosen) / COLUMNS)
    with canvas(COLUMNS, rows, 2.2 * rows + 0.6, "staircases", used=len(chosen)) as (figure, panels):
        for axes, one in zip(panels, chosen, strict=False):
            _panel(axes, one, one.ms / total)
            axes.set_ylabel("ms", fontsize=8)
        figure.legend(handles=_legend(figure), loc="outside upper right", ncols=3)
        label = "Latency of the costliest layers against their widths, measured and fitted"
        return stacked(figure, label, len(chosen), size="middle", lit=True), len(chosen), len(ranked)


def _panel(axes: Any, one: Alike, share: float) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator

    size = int(one.full[one.main])
    along, depth = np.arange(1, size + 1, dtype=float), colormap(*DEPTH)
    for part in SHARES if len(one.widths) > 1 else SHARES[:1]:
        kept = np.tile(np.maximum(1, np.round(part * one.full)), (size, 1))
        kept[:, one.main] = along
        axes.plot(along, one.at(kept), color=depth(part), linewidth=1.3, drawstyle=one.drawn, zorder=2)
    kept, ms = one.points
    axes.scatter(kept[:, one.main], ms, s=11, c=depth(one.others(kept)), edgecolors="white", linewidths=0.4, zorder=3)
    dense = slice(None, None, len(one.layers[0]["measured"]))
    axes.scatter(kept[dense, one.main], ms[dense], s=26, facecolors="none", edgecolors=INK, linewidths=1.1, zorder=4)
    more = f" and {len(one.layers) - 1} alike" if len(one.layers) > 1 else ""
    name = shortened(one.layers[0]["module"] or "(root)", 34 - len(more))
    axes.set_title(f"{name}{more}: {100 * share:.1f} %", fontsize=8.5)
    axes.set_xlabel(one.widths[one.main]["name"], fontsize=8)
    top = max(ms.max(), *(line.get_ydata().max() for line in axes.get_lines()))
    axes.set(xlim=(0, 1.04 * size), ylim=(0, 1.1 * top))
    axes.xaxis.set_major_locator(FixedLocator(sorted({max(1, round(part * size)) for part in SHARES})))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(labelsize=7.5)


def _legend(figure: Any) -> list[Any]:
    from matplotlib.lines import Line2D

    depth = colormap(*DEPTH)
    lines = [Line2D([], [], color=depth(part), linewidth=1.6, label=share(part, 0)) for part in SHARES[::-1]]
    lines[0].set_label("other widths at 25 %")
    ring: dict[str, Any] = {"marker": "o", "linestyle": "none", "markerfacecolor": "none", "markeredgecolor": INK}
    dot: dict[str, Any] = {"marker": "o", "linestyle": "none", "color": depth(1.0), "markersize": 3.5}
    return [*lines, Line2D([], [], **dot, label="measured"), Line2D([], [], **ring, markersize=5, label="dense")]


def predictions(networks: Sequence[Mapping[str, Any]]) -> Markup:
    """Return predicted against measured milliseconds of networks, and the error against the MACs that are left."""
    kinds = ["dense", *("held out" if row["held_out"] else "fitted to" for row in networks[1:])]
    with canvas(2, 1, 3.6, "predictions") as (figure, (whole, errors)):
        for kind, (marker, color, size) in KINDS.items():
            rows = [row for row, of in zip(networks, kinds, strict=True) if of == kind]
            style: dict[str, Any] = {"marker": marker, "color": color, "s": size, "edgecolors": "white", "zorder": 3}
            whole.scatter(
                [one["measured_ms"] for one in rows], [one["predicted_ms"] for one in rows], label=kind, **style
            )
            errors.scatter([100 * one["macs_left"] for one in rows], [100 * one["error"] for one in rows], **style)
        most = 1.06 * max(max(row["measured_ms"], row["predicted_ms"]) for row in networks)
        whole.plot([0, most], [0, most], color=GRAY, linewidth=0.9, zorder=2)
        whole.set(title="Latency of whole networks", xlabel="measured, ms", ylabel="predicted, ms")
        whole.set(xlim=(0, most), ylim=(0, most))
        errors.axhline(0, color=GRAY, linewidth=0.9, zorder=2)
        reach = 1.15 * max(5.0, *(100 * abs(row["error"]) for row in networks))
        errors.set(title="Error of the prediction (above 0: too slow)", ylim=(-reach, reach), xlim=(0, 104))
        errors.set(xlabel="multiply-accumulates left, %", ylabel="percent of the measured time")
        figure.legend(loc="outside upper right", ncols=3)
        label = "Predicted against measured latency of whole networks, and the error of the prediction"
        return stacked(figure, label, 2)


@dataclass(frozen=True)
class Alike:
    """Layers that do the same at the same widths, and so share a fit."""

    layers: tuple[Layer, ...]  # the layers as in `fits.json`, the slowest first
    ms: float  # their time together in the dense model
    main: int  # number of the width on the horizontal axis: the one that changes their time most

    @property
    def widths(self) -> Sequence[Mapping[str, Any]]:
        """Name and channels in the dense model of each width."""
        found: Sequence[Mapping[str, Any]] = self.layers[0]["widths"]
        return found

    @property
    def full(self) -> Numbers:
        """(widths,) in the dense model."""
        return np.array([width["channels"] for width in self.widths], dtype=float)

    @property
    def drawn(self) -> str:
        """Drawing style of the fit: in steps if widths count in blocks or kernels change."""
        stepped = any(step > 1 for term in self.layers[0]["terms"] for step in term["steps"])
        return "steps-mid" if stepped or any(term.get("spans") for term in self.layers[0]["terms"]) else "default"

    def at(self, kept: Numbers) -> Numbers:
        """Return the milliseconds of the fit, (points,), at (points, widths) kept channels."""
        return fitted(self.layers[0], kept)

    @property
    def points(self) -> tuple[Numbers, Numbers]:
        """(layers * networks, widths) kept channels, each layer's dense network first, and the milliseconds."""
        rows = [row for layer in self.layers for row in layer["measured"]]
        return np.array([row["kept"] for row in rows], dtype=float), np.array([row["ms"] for row in rows])

    def others(self, kept: Numbers) -> Numbers:
        """Return the geometric mean of the shares of the other widths, (points,); 1 if there are none."""
        rest = [number for number in range(len(self.widths)) if number != self.main]
        if not rest:
            return np.ones(len(kept))
        shares = np.maximum(kept[:, rest], 1) / self.full[rest]
        return np.asarray(np.exp(np.log(shares).mean(axis=1)), dtype=float)


def together(layers: Sequence[Layer]) -> list[Alike]:
    """Return the layers of at least one width by their fits, those that take most time together first."""
    groups: dict[str, list[Layer]] = {}
    for layer in layers:
        if layer["widths"]:
            groups.setdefault(repr([layer[key] for key in ("constant_ms", "widths", "terms")]), []).append(layer)
    found = [
        Alike(tuple(group), sum(one["measured"][0]["ms"] for one in group), _main(group[0]))
        for group in groups.values()
    ]
    return sorted(found, key=lambda one: -one.ms)


def _main(layer: Layer) -> int:
    full = np.array([width["channels"] for width in layer["widths"]], dtype=float)
    narrow = np.where(np.eye(len(full), dtype=bool), 1.0, full)
    return int(np.argmax(np.abs(fitted(layer, narrow) - fitted(layer, full[None]))))


def fitted(layer: Layer, kept: Numbers) -> Numbers:
    """Return the milliseconds of a layer's fit, (points,), at (points, widths) kept channels."""
    result = np.full(len(kept), float(layer["constant_ms"]))
    for term in layer["terms"]:
        product = np.full(len(kept), float(term["ms"]))
        for width, step in zip(term["widths"], term["steps"], strict=True):
            product = product * round_up(kept[:, width], step)
        for width, low, high in term.get("spans", ()):  # runs of older versions have none
            product = product * ((low <= kept[:, width]) & (kept[:, width] < (math.inf if high is None else high)))
        result += product
    return result

"""The canvas of the pages' figures: style, colors, and how a drawn figure becomes elements of a page.

A page puts the panels of a figure side by side or below each other; see `stacked` and `wide_and_narrow`. Matplotlib
draws them; where it is not installed, pages have no figures and say so (`are_drawn`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from prunekit.measure.measurement_effort import current_effort
from prunekit.utils.availability import missing_packages

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

INK, GRAY, PALE = "#1f2937", "#9ca3af", "#d8dde6"
COLORS = {"dense": "#64748b", "control": "#d97706", "pruned": "#0f766e"}
SPARE_COLORS = ("#7c3aed", "#be123c", "#1d4ed8", "#4d7c0f")
WIDTH = 10.4
NARROW = WIDTH / 2
"""Width in inches of a figure that can be read on a phone without scrolling."""
MARGIN = 2.0
"""Points around what is drawn."""
LINE = 1.38
"""CSS pixels of a legend for each of its points, as panels have on a wide screen."""
THEMED = {
    INK: "var(--ink)", "#6b7280": "var(--soft)", GRAY: "var(--tick)", PALE: "var(--bar)", "#eef0f4": "var(--grid)",
    "#ffffff": "var(--paper)", COLORS["dense"]: "var(--slate)", COLORS["control"]: "var(--orange)",
    COLORS["pruned"]: "var(--teal)", "#e5a13d": "var(--gold)",
    **dict(zip(SPARE_COLORS, ("var(--violet)", "var(--rose)", "var(--blue)", "var(--lime)"), strict=True)),
}  # fmt: skip
"""Colors of figures that follow the page's theme, and its variables (`style.html`)."""
HEAD = Markup('<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"')
METADATA = ("Creator", "Date", "Format", "Type")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "font.family": "sans-serif",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eef0f4",
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "legend.frameon": False,
}


def are_drawn() -> bool:
    """Return whether pages get figures: where they are wanted, and matplotlib is installed."""
    return current_effort().figures and not missing_packages(["matplotlib"])


@contextmanager
def canvas(
    columns: int,
    rows: int,
    height: float,
    name: str,
    grid: Mapping[str, float] | None = None,
    used: int | None = None,
    width: float = WIDTH,
    ratios: Sequence[float] | None = None,
) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure of the page's width and its panels in a flat array.

    `grid` places the panels, as for `Figure.subplots_adjust`; without it they are fitted around their labels, which
    takes as long as drawing. `ratios` are those of the columns' widths, whose panels then share their vertical axis.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Ids in an SVG come from this salt: without one per figure, figures of a page would share clip paths.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"{name} {width}"}):
        figure = Figure(figsize=(width, height), layout="constrained" if grid is None else None)
        shared: dict[str, Any] = {} if ratios is None else {"sharey": True, "width_ratios": ratios}
        panels = np.atleast_1d(figure.subplots(rows, columns, gridspec_kw=dict(grid or {}), **shared)).ravel()
        for axes in [] if used is None else panels[used:]:
            axes.set_axis_off()
        yield figure, panels


def svg(figure: Figure, label: str, *, lit: bool = False) -> Markup:
    """Return a figure as an element of the page."""
    text = _text(figure)
    view_box = re.findall(r'viewBox="[-0-9. ]+"', text.split(">", 1)[0])[0]
    opening = HEAD + Markup(' class="lit"' if lit else "")
    return opening + Markup(f" {view_box}") + Markup(' role="img" aria-label="{}">').format(label) + Markup(_body(text))


def colormap(*colors: str) -> Colormap:
    """Return a map of 0..1 to colors between those given, evenly spread."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(" ".join(colors), colors)


def _text(figure: Figure) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    stream = io.StringIO()
    # `savefig` would draw it twice, the first time for its layout alone, which drawing takes care of.
    FigureCanvasSVG(figure).print_svg(stream, metadata=dict.fromkeys(METADATA))  # type: ignore[no-untyped-call]
    return stream.getvalue().split("<svg", 1)[1]


def _body(text: str) -> str:
    return re.sub("(?<=: )#[0-9a-f]{6}", lambda found: THEMED.get(found[0], found[0]), text.split(">", 1)[1])


def stacked(figure: Figure, label: str, used: int, *, size: str = "", lit: bool = False) -> Markup:
    """Return the panels of a figure, whose grid has one size of panel, and its legend before them."""
    groups, rest = _split(_body(_text(figure)).removesuffix("</svg>\n"))
    panels: list[Any] = figure.axes[:used]
    legends: list[Any] = figure.legends
    boxes = [(axes.get_position().transformed(figure.transFigure), axes.get_tightbbox()) for axes in panels]
    scale, height = 72 / figure.dpi, 72 * figure.get_size_inches()[1]
    # All cells have one size: that of a panel, and the most that any has beside it.
    left, right = (max(values) for values in ([a.x0 - t.x0 for a, t in boxes], [t.x1 - a.x1 for a, t in boxes]))
    below, above = (max(values) for values in ([a.y0 - t.y0 for a, t in boxes], [t.y1 - a.y1 for a, t in boxes]))

    def cells() -> Iterator[Markup]:
        for index, (inner, _) in enumerate(boxes):
            ends = inner.x0 - left, inner.y0 - below, inner.x1 + right, inner.y1 + above
            yield _cell(groups[f"axes_{index + 1}"], [scale * end for end in ends], height)

    legend = Markup()
    if legends:
        ends = [scale * end for end in legends[0].get_window_extent().extents]
        width = Markup(' style="max-width: {}px"').format(round(LINE * (ends[2] - ends[0])))
        kind = Markup(' class="legend lit"' if lit else ' class="legend"')
        legend = _cell(groups["legend_1"], ends, height, kind + width)
    kinds = " ".join(filter(None, ("panels", size, "lit" if lit else "")))
    opening = Markup('<div class="{}" role="img" aria-label="{}">').format(kinds, label)
    shared = Markup('{} width="0" height="0" class="shared" aria-hidden="true">').format(HEAD) + rest + Markup("</svg>")
    return legend + opening + Markup().join(cells()) + shared + Markup("</div>")


def _cell(body: str, ends: list[float], height: float, attributes: str = "") -> Markup:
    """Return a part of a figure; ends in points, from below."""
    left, below, right, above = ends
    box = left - MARGIN, height - above - MARGIN, right - left + 2 * MARGIN, above - below + 2 * MARGIN
    view = " ".join(f"{value:.2f}" for value in box)
    return HEAD + Markup(f'{attributes} viewBox="{view}" aria-hidden="true">{body}</svg>')


def _split(body: str) -> tuple[dict[str, str], Markup]:
    """Return the groups below the figure by their ids, and what they share: styles and clip paths."""
    groups = {
        found[1]: found[0]
        for found in re.finditer(r'^  <g id="((?:axes|legend)_\d+)">\n.*?^  </g>\n', body, re.S | re.M)
    }
    shared = re.findall(r"^ <defs>.*?^ </defs>\n", body, re.S | re.M)
    return groups, Markup("".join(shared))


def wide_and_narrow(draw: Callable[[float], Any]) -> Markup:
    """Return a figure twice, for wide screens and for phones; the page shows one of them."""
    wide, narrow = draw(WIDTH), draw(NARROW)
    return Markup('<div class="roomy">{}</div><div class="tight">{}</div>').format(wide, narrow)

"""The figure of scores against costs of several runs, with the Pareto fronts of those that can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from prunekit.measure.latency.row_text import setting_text
from prunekit.report.figures.canvas import COLORS, INK, SPARE_COLORS, canvas, stacked
from prunekit.report.headline import lower_is_better, model, scores
from prunekit.report.run_data import Run, recipe_of
from prunekit.utils.display import is_number

TEST_KEYS = ("source", "root", "name", "columns", "test_share", "split_seed")
"""Keys of a recipe's `data` that decide on the test samples."""
MACHINE_KEYS = ("platform", "cpu", "cpu_cores", "cuda", "torch")
SHARED = ("dense", "control")
"""Models that several runs may share."""
LINES = (COLORS["pruned"], *SPARE_COLORS, COLORS["control"])
"""Colors of the groups of points that can be compared, in turn."""
MARKS = {"pruned": "o", "deployed": "P", "dense": "D", "control": "s"}
MAX_PANELS = 6
SAME = (0.03, 0.03)
"""Approximate shares of a panel's width and height: of marks that cover each other."""
PANEL = (310.0, 190.0)
"""Approximate width and height of a panel in typographic points, as are those of labels below."""
LETTER, HEIGHT, MARK, MARGIN = 5.9, 11.0, 4.5, 25.0
OFFSETS = (5.0, -15.0, 18.0, -28.0, 31.0, -41.0, 44.0, -54.0, 57.0, -67.0, 70.0, -80.0)
"""Heights at which a label is tried, over its mark; beyond `NEAR` a line leads to it."""
NEAR = 16.0
LEADER: dict[str, Any] = {"arrowstyle": "-", "color": "#9ca3af", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
PAPER: dict[str, Any] = {"boxstyle": "square,pad=0.05", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.8}
"""Behind a label, so that lines below it do not cross its letters."""
MOST_LETTERS = 40


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    letter: str  # name of the run in tables and figures
    run: Run  # its files
    recipe: dict[str, Any]  # its recipe
    tested: tuple[str, ...]  # what its scores depend on; scores of runs with the same are comparable
    machine: tuple[str, ...]  # what its latencies depend on, including `tested`

    @property
    def score(self) -> tuple[str, str]:
        """Name and label of the main score."""
        return scores(self.run.metrics)[0]

    @property
    def lower_is_better(self) -> bool:
        """True if less of the main score is better."""
        return lower_is_better(self.run.metrics, self.score[0])

    @property
    def data(self) -> dict[str, Any]:
        """The recipe's `data`."""
        found = self.recipe.get("data")
        return found if isinstance(found, dict) else {}

    def model(self, name: str) -> dict[str, Any]:
        """Return the figures of one of its models, with the interval of its score; {} if it has no such model."""
        return model(self.run.metrics, name)

    def point(self, kind: str, group: tuple[str, ...], cost: float) -> Point:
        """Return the main score of one of its models against a cost."""
        row, (name, _), lower = self.model(kind), self.score, self.lower_is_better
        sizes = row.get("macs"), row.get("params")
        ends = _ends(row)
        return Point(self.letter, kind, group, sizes, cost, float(row[name]), score_ends=ends, lower_is_better=lower)


def compared_runs(runs: Sequence[Run]) -> list[ComparedRun]:
    """Return the runs with letters, in the order in which they were named."""
    found = []
    for index, run in enumerate(runs):
        recipe, (score, _) = recipe_of(run), scores(run.metrics)[0]
        data = recipe.get("data") if isinstance(recipe.get("data"), dict) else {}
        samples = (run.metrics.get("dense") or {}).get("n_test")
        tested = (score, *(f"{key} {(data or {}).get(key)}" for key in TEST_KEYS), f"{samples} samples")
        machine = (*tested, *(f"{key} {run.environment.get(key)}" for key in MACHINE_KEYS))
        found.append(ComparedRun(letter(index), run, recipe, tested, machine))
    return found


def letter(index: int) -> str:
    """Return a to Z, AA, AB, ... as columns of a spreadsheet are called."""
    return (letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


@dataclass(frozen=True)
class Point:
    """One model: its score against its cost, each with the ends of its interval if it has one."""

    label: str  # letters of the runs, after the kind of the model unless it is pruned
    kind: str  # dense, control, pruned or deployed
    group: tuple[str, ...]  # points with the same group are comparable
    sizes: tuple[Any, Any]  # multiply-accumulates and parameters of the model
    cost: float
    score: float
    cost_ends: tuple[float, float] | None = None
    score_ends: tuple[float, float] | None = None
    stable: bool = True  # whether the cost supports a claim
    lower_is_better: bool = False  # whether less of the score is better

    @property
    def merit(self) -> float:
        """The score, with its sign turned if less is better."""
        return -self.score if self.lower_is_better else self.score


def settings(found: Sequence[ComparedRun]) -> list[str]:
    """Return the settings in which runs were timed, in words; those of most runs first."""
    names = [{setting_text(row) for row in side.run.metrics.get("latency", [])} for side in found]
    order = dict.fromkeys(setting_text(row) for side in found for row in side.run.metrics.get("latency", []))
    return sorted(order, key=lambda name: -sum(name in one for one in names))


def by_macs(found: Sequence[ComparedRun]) -> list[Point]:
    """Return scores against multiply-accumulates; dense models and controls that runs share are one point."""
    points = [
        side.point(kind, side.tested, float(row["macs"]))
        for side in found
        for kind in ("dense", "control", "pruned")
        if is_number((row := side.model(kind)).get("macs")) and is_number(row.get(side.score[0]))
    ]
    return list(once(points))


def by_latency(found: Sequence[ComparedRun], setting: str) -> list[Point]:
    """Return scores against median milliseconds in a setting; a control takes as long as its dense model."""
    return list(once([point for side in found for point in _timed(side, setting)]))


def _timed(side: ComparedRun, setting: str) -> Iterator[Point]:
    rows = {row.get("model"): row for row in side.run.metrics.get("latency", []) if setting_text(row) == setting}
    for kind in ("dense", "control", "pruned", "deployed"):
        row, reached = rows.get("dense" if kind == "control" else kind), side.model(kind).get(side.score[0])
        if row is not None and is_number(row.get("median_ms")) and is_number(reached):
            ends, stable = _ends(row, "low_ms", "high_ms"), bool(row.get("stable", True))
            yield replace(side.point(kind, side.machine, float(row["median_ms"])), cost_ends=ends, stable=stable)


def _ends(row: Mapping[str, Any], low: str = "low", high: str = "high") -> tuple[float, float] | None:
    below, above = row.get(low), row.get(high)
    return (float(below), float(above)) if is_number(below) and is_number(above) else None


def once(points: Sequence[Point]) -> Iterator[Point]:
    """Yield the points, but one alone for a dense model or a control that several runs share.

    Runs share a model if group, score and sizes are equal. Each of them measured its latency again: the point gets the
    middle one, with a bar from the lowest end to the highest.
    """
    together: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        model = (point.score, point.sizes) if point.kind in SHARED else point.label
        together.setdefault((point.kind, point.group, model), []).append(point)
    for alike in together.values():
        alike.sort(key=lambda point: point.cost)
        middle, ends = alike[(len(alike) - 1) // 2], [point.cost_ends for point in alike if point.cost_ends]
        label = joined(sorted((point.label for point in alike), key=lambda name: (len(name), name)))
        yield replace(
            middle,
            label=label if middle.kind == "pruned" else f"{middle.kind} {label}",
            cost_ends=(min(low for low, _ in ends), max(high for _, high in ends)) if ends else None,
            stable=all(point.stable for point in alike),
        )


def joined(letters: Sequence[str]) -> str:
    """Return the letters of runs, in order, as one text: A+B+D; four or more in a row as A–D."""
    tens = [[(ord(each) - ord("A") + 1) * 26**place for place, each in enumerate(reversed(name))] for name in letters]
    numbers = [*map(sum, tens)]
    parts: list[str] = []
    start = 0
    for end in range(1, len(letters) + 1):
        if end < len(letters) and numbers[end] == numbers[end - 1] + 1:
            continue
        row = letters[start:end]
        parts += [f"{row[0]}–{row[-1]}"] if len(row) > 3 else row
        start = end
    return "+".join(parts)


def groups(points: Sequence[Point]) -> list[list[Point]]:
    """Return groups of points that can be compared with each other."""
    together: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        together.setdefault(point.group, []).append(point)
    return list(together.values())


def front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front of one group of points, the cheapest first.

    It has the points that support a claim, and for which no other has a better score at no more cost.
    """
    best: list[Point] = []
    for point in sorted((one for one in points if one.stable), key=lambda one: (one.cost, -one.merit)):
        if not best or point.merit > best[-1].merit:
            best.append(point)
    return best


def fronts(points: Sequence[Point]) -> list[list[Point]]:
    """Return the front of each of the groups."""
    return [front(group) for group in groups(points)]


Panel = tuple[str, str, Sequence[Point]]
"""Title, name of the cost with its unit, and points."""


def pareto(panels: Sequence[Panel], score: str, unit: str = "%") -> Markup:
    """Return a panel for each cost, at most `MAX_PANELS`; `score` is what the scores are called."""
    panels = panels[:MAX_PANELS]
    columns = 2
    rows = math.ceil(len(panels) / columns)
    with canvas(columns, rows, 3.5 * rows + 0.4, "pareto", used=len(panels)) as (figure, all_axes):
        for axes, (title, cost, points) in zip(all_axes, panels, strict=False):
            _panel(axes, points)
            axes.set(title=title, xlabel=cost, ylabel=f"{score}, {unit}".rstrip(", "))
        figure.legend(handles=_legend(panels), loc="outside upper right", ncols=4)
        names = ", ".join(f"{score} against {cost} ({title})" for title, cost, _ in panels)
        return stacked(figure, f"{names}; all figures are in the tables", len(panels))


def _panel(axes: Any, points: Sequence[Point]) -> None:
    from matplotlib.ticker import MaxNLocator

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
    """Label the marks where a label covers no other label and no mark; marks at one place have a label together."""
    ends = [end for point in points for end in (point.score, *(point.score_ends or ()))]
    span = (max(ends, default=1.0) - min(ends, default=0.0)) or 1.0
    placed: list[tuple[Point, list[str]]] = []
    for point in points:
        same = next((names for other, names in placed if _near(point, other, most, span, SAME)), None)
        if same is None:
            placed.append((point, [point.label]))
        else:
            same.append(point.label)
    at = [_place(point, most, min(ends, default=0.0), span) for point, _ in placed]
    taken = [Box(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in at]
    for (point, names), (x, y) in zip(placed, at, strict=True):
        text = ", ".join(names)
        text = text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"
        right, offset, box = _free((x, y), LETTER * len(text), taken)
        taken.append(box)
        axes.annotate(
            text,
            (point.cost, point.score),
            xytext=(7 if right else -7, offset),
            textcoords="offset points",
            ha="left" if right else "right",
            fontsize=9,
            color=INK,
            zorder=4,
            bbox=PAPER,
            arrowprops=LEADER if abs(offset) > NEAR else None,
        )


def _place(point: Point, most: float, least: float, span: float) -> tuple[float, float]:
    """Return about where a point is in its panel, in typographic points; layout is not known before it is drawn."""
    return PANEL[0] * point.cost / (1.12 * most or 1.0), PANEL[1] * (0.1 + 0.8 * (point.score - least) / span)


def _free(at: tuple[float, float], width: float, taken: Sequence[Box]) -> tuple[bool, float, Box]:
    """Return the nearest place for a label of a mark that covers no other: whether it is to the right, and how high."""
    x, y = at
    first = x + 7 + width <= PANEL[0]  # else long names would leave the panel
    choices = [(right, offset) for offset in OFFSETS for right in ((True, False) if first else (False,))]
    for right, offset in choices:
        left = x + 7 if right else x - 7 - width
        box = Box(left, y + offset, left + width, y + offset + HEIGHT)
        if left >= -MARGIN and not any(box.covers(other) for other in taken):
            return right, offset, box
    return first, OFFSETS[0], Box(x, y, x, y)


@dataclass(frozen=True)
class Box:
    """A rectangle in a panel, in typographic points."""

    left: float
    below: float
    right: float
    above: float

    def covers(self, other: Box) -> bool:
        """Return whether the two overlap."""
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.above <= other.below or other.above <= self.below)


def _near(one: Point, other: Point, most: float, span: float, reach: tuple[float, float]) -> bool:
    return abs(one.cost - other.cost) <= reach[0] * most and abs(one.score - other.score) <= reach[1] * span


def _reach(value: float, ends: tuple[float, float] | None) -> list[list[float]] | None:
    """Return how far an interval reaches to either side of a value, which may lie at its end."""
    return None if ends is None else [[max(0.0, value - ends[0])], [max(0.0, ends[1] - value)]]


def _legend(panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.lines import Line2D

    kinds = dict.fromkeys(point.kind for _, _, points in panels for point in points)
    style: dict[str, Any] = {"color": INK, "linestyle": "none", "markersize": 6}
    handles = [Line2D([], [], marker=MARKS[kind], label=kind, **style) for kind in MARKS if kind in kinds]
    if any(len(best) > 1 for _, _, points in panels for best in fronts(points)):
        handles.append(Line2D([], [], color=INK, linewidth=1.1, label="Pareto front"))
    if any(not point.stable for _, _, points in panels for point in points):
        handles.append(Line2D([], [], marker="o", markerfacecolor="#ffffff", label="hollow: unstable", **style))
    return handles

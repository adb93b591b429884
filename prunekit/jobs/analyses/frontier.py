"""The frontier of a model, score against size and time: its points, where to stop, its table and its picture."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from prunekit.errors import UsageError
from prunekit.measure.score_drop import SURE, Drop
from prunekit.pruning.pruned import Pruned
from prunekit.pruning.score_budget import confirmed
from prunekit.utils.display import Displayed, Table, factor, in_unit, share

SIZES = ("share", "macs", "params", "blocks")
"""Figures of a point's size."""
Result: TypeAlias = Pruned | Path
"""The model of a point: the result of `prune`, or the folder of a job's model."""


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """One model of a frontier."""

    share: float  # of the MACs, or of the predicted time, that its plan was made for
    macs: float  # share of the dense model's that is left
    params: float  # likewise
    blocks: int  # that are gone as a whole
    drop: Drop
    result: Result
    # of the dense model's time, on the target: median, and ends of the 95 % interval; None if it was not timed
    speedup: tuple[float, float, float] | None = None
    stable: bool = True  # whether the figure of the time supports a claim
    int8: Drop | None = None  # of its file in int8, from the dense model in float; None if there is none
    without_int8: str = ""  # why there is none, where it was asked for

    def row(self) -> dict[str, Any]:
        """Return plain data: shares that are left, the score, how much lower it is with its interval, the speedup.

        Figures of the file in int8 begin with `int8_`.
        """
        times = dict(zip(("speedup", "speedup_low", "speedup_high"), self.speedup or (None,) * 3, strict=True))
        sizes = {name: getattr(self, name) for name in SIZES}
        scores = {**_figures(self.drop), "most": self.drop.most}
        return {**sizes, **scores, **times, "stable": self.stable, **_figures(self.int8, "int8_")}


def _figures(drop: Drop | None, prefix: str = "") -> dict[str, float | None]:
    """Return a score, how much lower it is, and the ends of the interval, as plain data."""
    low, high = (None if drop is None else drop.interval) or (None, None)
    found = (None, None) if drop is None else (drop.score, drop.drop)
    return dict(zip((f"{prefix}{name}" for name in ("score", "drop", "low", "high")), (*found, low, high), strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class Frontier(Displayed):
    """The score of a model against what is left of it, from the widest point to the narrowest.

    Attributes:
        name: of the dense model.
        points: the models, the widest first.
        missed: sentences on points that could not be made.
        int8: what the dense model loses as a file in int8, if a job exports that; points have it too.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> x, y = torch.randn(600, 4), torch.randint(2, (600,))
        >>> found = pk.frontier(
        ...     model, calibration=x[:200], evaluate="image_classification", held_out=(x, y), points=[0.75, 0.5],
        ...     timed=False,
        ... )
        >>> [point.result.model[0].out_features for point in found.points]
        [48, 32]
        >>> found.at(macs=0.5).model[0].out_features
        32
    """

    name: str
    points: tuple[FrontierPoint, ...]
    missed: tuple[str, ...] = ()
    int8: Drop | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each point, see `FrontierPoint.row`."""
        return [point.row() for point in self.points]

    def at(self, **wanted: float) -> Any:
        """Return the result of the point that a figure asks for: `macs`, `params`, `speedup` or `drop`.

        For a share of MACs or parameters and for a speedup it is the widest point that meets it; for a drop the
        narrowest that loses at most that in float, at 95 %, as do all that are wider. Of `prunekit.frontier` it is what
        `prune` returns, with the compact model; of a job the model's folder, for `prunekit.load`.

        Raises:
            UsageError: it is not one of these figures, or no point meets it.
        """
        if len(wanted) != 1 or not wanted.keys() <= {"macs", "params", "speedup", "drop"}:
            got = ", ".join(f"{name}={value}" for name, value in wanted.items())
            raise UsageError(
                f"at: expected one of macs, params, speedup, drop, such as at(speedup=2), got {got or 'none'}"
            )
        ((name, value),) = wanted.items()
        most = math.inf if name == "speedup" else 1
        if not isinstance(value, (int, float)) or not 0 < value < most:
            expected = "a number above 0, such as 2" if most > 1 else "a share above 0 and below 1, such as 0.5"
            raise UsageError(f"at: {name}: expected {expected}, got {value!r}")
        found: FrontierPoint | None = None
        if name == "drop":
            count = confirmed([point.drop for point in self.points], value)
            found = self.points[count - 1] if count else None
        elif name == "speedup":
            found = next((point for point in self.points if point.speedup and point.speedup[0] >= value), None)
        else:
            found = next((point for point in self.points if getattr(point, name) <= value), None)
        if found is None:
            raise UsageError(f"at: no point meets {name}={value:g}: {self._reach(name)}; measure further points")
        return found.result

    def _reach(self, name: str) -> str:
        if name == "drop":
            first = self.points[0].drop
            return f"the first one, with MACs {share(self.points[0].macs)} left, may lose {first.in_words(first.most)}"
        figures = [row[name] for row in self.rows() if row[name] is not None]
        return f"they reach from {min(figures):.3g} to {max(figures):.3g}" if figures else "nothing was timed"

    @property
    def knee(self) -> FrontierPoint | None:
        """The point after which the score falls faster; None of fewer than three points, or if none is sure to be one.

        It is the one farthest above the line from the first to the last (Kneedle, Satopaa et al. 2011), if the next one
        loses more at 95 %.
        """
        if len(self.points) < 3:
            return None
        left = np.array([point.share for point in self.points])
        lost = np.array([point.drop.drop for point in self.points])
        along = (left - left[0]) / (left[-1] - left[0] or 1)
        above = along * (lost[-1] - lost[0]) - (lost - lost[0])
        number = int(np.argmax(above))
        if above[number] < 1e-9 or self.points[number + 1].drop.bound((1 - SURE) / 2) <= lost[number]:
            return None
        return self.points[number]

    @property
    def advice(self) -> str:
        """Up to three sentences on where to stop, with how sure that is, and what int8 costs there."""
        said, knee = [], self.knee
        free = [*takewhile(lambda point: point.drop.interval and point.drop.bound(1 - SURE) <= 0, self.points)]
        if free:
            told, samples = free[-1], free[-1].drop.samples
            what = f"{samples:,} samples" if samples else "the samples"
            said.append(f"Down to MACs {share(told.macs)} left, no loss can be told by {what}.")
        if knee is not None:
            after = self.points[self.points.index(knee) + 1]  # the last one is no knee
            more = knee.drop.in_words(after.drop.drop - knee.drop.drop)
            said.append(
                f"Below {share(knee.macs)}, where it is {knee.drop.in_words(knee.drop.drop)}, the loss grows faster: "
                f"{more} more down to {share(after.macs)}."
            )
        best = knee or (free[-1] if free else None)
        if best is not None and best.int8 is not None:
            way, lost = "higher" if best.int8.about.lower_is_better else "lower", best.int8.with_interval
            said.append(f"In int8 the score at {share(best.macs)} of the MACs is {lost} {way} than the dense model's.")
        return " ".join(said) or "The score falls evenly: no point stands out."

    def picture(self) -> str:
        """Return the picture as SVG: the score against the MACs that are left, and against the speedup.

        Raises:
            UsageError: matplotlib is not installed.
        """
        from prunekit.report.figures import charts
        from prunekit.report.figures.canvas import are_drawn

        if not are_drawn():
            raise UsageError("picture: expected matplotlib; pip install 'prunekit[report]'")
        return str(charts.frontier(self.summary()))

    def summary(self) -> dict[str, Any]:
        """Return plain data of all, as `frontier.json` has it."""
        first = self.points[0].drop
        return {
            "name": self.name,
            "score": {name: getattr(first.about, name) for name in ("label", "unit", "lower_is_better")},
            "dense": first.dense,
            "dense_int8": None if self.int8 is None else _figures(self.int8, "int8_"),
            "samples": first.samples,
            "points": self.rows(),
            "knee": None if self.knee is None else self.points.index(self.knee),
            "advice": self.advice,
            "missed": list(self.missed),
        }

    def _headline(self) -> str:
        first, last = self.points[0], self.points[-1]
        return (
            f"{self.name} at {len(self.points)} points, MACs {share(first.macs)} to {share(last.macs)} left, "
            f"{first.drop.about.label} {in_unit(first.drop.dense, first.drop.about.unit)} dense to "
            f"{in_unit(last.drop.score, last.drop.about.unit)}"
        )

    def _parts(self) -> Iterator[str | Table]:
        yield f"Frontier: {self._headline()}"
        about, knee = self.points[0].drop.about, self.knee
        lost = "higher by" if about.lower_is_better else "lower by"
        int8 = (f"in int8 {lost}",) if any(point.int8 or point.without_int8 for point in self.points) else ()
        blocks = ("blocks gone",) if any(point.blocks for point in self.points) else ()
        headings = ("MACs left", "parameters", *blocks, about.label, lost, "95 %", *int8, "speedup", "")
        yield Table(headings, [_cells(point, point is knee, bool(blocks), bool(int8)) for point in self.points])
        if self.int8 is not None:
            yield f"Without pruning: {self.int8}"
        yield "\n".join((self.advice, *self.missed))

    def _repr_html_(self) -> str:
        from prunekit.report.figures.canvas import are_drawn

        return super()._repr_html_() + (self.picture() if are_drawn() else "")


def _cells(point: FrontierPoint, knee: bool, with_blocks: bool, with_int8: bool) -> tuple[str, ...]:
    drop, speedup = point.drop, "–"
    ends = "–" if drop.interval is None else " to ".join(drop.in_words(end).split()[0] for end in drop.interval)
    if point.speedup is not None:
        median, low, high = point.speedup
        speedup = factor(median) if point.stable else f"unstable [{low:.2f}, {high:.2f}]"
    score, mark = in_unit(drop.score, drop.about.unit), "knee" if knee else ""
    int8 = ("–" if point.int8 is None else point.int8.with_interval,) if with_int8 else ()
    sizes = share(point.macs), share(point.params), *((f"{point.blocks}",) if with_blocks else ())
    return *sizes, score, drop.in_words(drop.drop), ends, *int8, speedup, mark

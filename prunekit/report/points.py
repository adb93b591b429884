"""What several runs measured, as points of score against cost, and which of these nothing else beats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.measure.wording import where
from prunekit.numbers import is_number
from prunekit.report.headline import model, scores
from prunekit.report.run import Run
from prunekit.report.summary import recipe_of

TEST_KEYS = ("source", "root", "name", "columns", "test_share", "split_seed")
"""Of a recipe's `data`: what decides which samples are tested on."""
MACHINE_KEYS = ("platform", "cpu", "cpu_cores", "cuda", "torch")
SHARED = ("dense", "control")
"""Models that runs may have in common."""


@dataclass(frozen=True)
class Side:
    """A run of a comparison.

    Attributes:
        letter: what it is called in tables and figures.
        tested: what its scores are of; runs with the same are comparable in them.
        machine: what its latencies are of, `tested` included.
    """

    letter: str
    run: Run
    recipe: dict[str, Any]
    tested: tuple[str, ...]
    machine: tuple[str, ...]

    @property
    def score(self) -> tuple[str, str]:
        """Name and label of the main score."""
        return scores(self.run.metrics)[0]

    @property
    def data(self) -> dict[str, Any]:
        """The recipe's `data`."""
        found = self.recipe.get("data")
        return found if isinstance(found, dict) else {}

    def model(self, name: str) -> dict[str, Any]:
        """Figures of one of its models, with the interval of its score; {} where it has none of that name."""
        return model(self.run.metrics, name)


@dataclass(frozen=True)
class Point:
    """A model: its score in percent against what it costs, each with the ends of its interval where it has one.

    Attributes:
        label: letters of the runs, with what it is where it is not pruned.
        kind: dense, control, pruned or deployed.
        group: points of the same are comparable.
        sizes: multiply-accumulates and parameters of the model.
        stable: whether the cost supports a claim.
    """

    label: str
    kind: str
    group: tuple[str, ...]
    sizes: tuple[Any, Any]
    cost: float
    score: float
    cost_ends: tuple[float, float] | None = None
    score_ends: tuple[float, float] | None = None
    stable: bool = True


def sides(runs: Sequence[Run]) -> list[Side]:
    """The runs, lettered in the order in which they were named."""
    return [_side(letter(index), run) for index, run in enumerate(runs)]


def letter(index: int) -> str:
    """A to Z, AA, AB, ... as columns of a spreadsheet are called."""
    return (letter(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _side(name: str, run: Run) -> Side:
    recipe = recipe_of(run)
    data = recipe.get("data") if isinstance(recipe.get("data"), dict) else {}
    samples = (run.metrics.get("dense") or {}).get("n_test")
    tested = (scores(run.metrics)[0][0], *(f"{key} {(data or {}).get(key)}" for key in TEST_KEYS), f"{samples} samples")
    machine = tuple(f"{key} {run.environment.get(key)}" for key in MACHINE_KEYS)
    return Side(name, run, recipe, tested, (*tested, *machine))


def settings(found: Sequence[Side]) -> list[str]:
    """Where anything was timed, in words; those of most runs first."""
    names = [{where(row) for row in side.run.metrics.get("latency", [])} for side in found]
    order = dict.fromkeys(where(row) for side in found for row in side.run.metrics.get("latency", []))
    return sorted(order, key=lambda name: -sum(name in one for one in names))


def by_macs(found: Sequence[Side]) -> list[Point]:
    """Scores against multiply-accumulates; a dense model or control that several runs have in common is there once."""
    points = [
        Point(
            side.letter, kind, side.tested, _sizes(row), float(row["macs"]), float(row[side.score[0]]), None, _ends(row)
        )
        for side in found
        for kind in ("dense", "control", "pruned")
        if is_number((row := side.model(kind)).get("macs")) and is_number(row.get(side.score[0]))
    ]
    return list(once(points))


def by_latency(found: Sequence[Side], setting: str) -> list[Point]:
    """Scores against median milliseconds in a setting; a control takes as long as its dense model."""
    return list(once([point for side in found for point in _timed(side, setting)]))


def _timed(side: Side, setting: str) -> Iterator[Point]:
    rows = {row.get("model"): row for row in side.run.metrics.get("latency", []) if where(row) == setting}
    for kind in ("dense", "control", "pruned", "deployed"):
        row, model = rows.get("dense" if kind == "control" else kind), side.model(kind)
        if row is None or not is_number(row.get("median_ms")) or not is_number(model.get(side.score[0])):
            continue
        low, high = row.get("low_ms"), row.get("high_ms")
        ends = (float(low), float(high)) if is_number(low) and is_number(high) else None
        score, stable = float(model[side.score[0]]), bool(row.get("stable", True))
        cost = float(row["median_ms"])
        yield Point(side.letter, kind, side.machine, _sizes(model), cost, score, ends, _ends(model), stable)


def _sizes(model: Mapping[str, Any]) -> tuple[Any, Any]:
    return model.get("macs"), model.get("params")


def _ends(model: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = model.get("low"), model.get("high")
    return (float(low), float(high)) if is_number(low) and is_number(high) else None


def once(points: Sequence[Point]) -> Iterator[Point]:
    """Points, with those of a dense model or control that runs have in common made one.

    They are of one model where group, score and sizes are the same. A latency, which each run measured anew, is then
    the middle one, and its bar reaches from the lowest end to the highest.
    """
    together: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        model = (point.score, point.sizes) if point.kind in SHARED else point.label
        together.setdefault((point.kind, point.group, model), []).append(point)
    for alike in together.values():
        alike.sort(key=lambda point: point.cost)
        middle, ends = alike[(len(alike) - 1) // 2], [point.cost_ends for point in alike if point.cost_ends]
        label = "+".join(sorted((point.label for point in alike), key=lambda name: (len(name), name)))
        yield Point(
            label if middle.kind == "pruned" else f"{middle.kind} {label}",
            middle.kind,
            middle.group,
            middle.sizes,
            middle.cost,
            middle.score,
            (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None,
            middle.score_ends,
            all(point.stable for point in alike),
        )


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front: points that support a claim and that no other beats in score at no more cost; cheapest first.

    All must be of one group.
    """
    best: list[Point] = []
    for point in sorted((one for one in points if one.stable), key=lambda one: (one.cost, -one.score)):
        if not best or point.score > best[-1].score:
            best.append(point)
    return best


def groups(points: Sequence[Point]) -> list[list[Point]]:
    """The points that can be compared with each other, together."""
    together: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        together.setdefault(point.group, []).append(point)
    return list(together.values())


def fronts(points: Sequence[Point]) -> list[list[Point]]:
    """The front of each of the groups."""
    return [front(group) for group in groups(points)]

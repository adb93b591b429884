"""The frontier of a model: score against MACs, parameters and time at several points, each a repaired, proven model.

Samples, statistics and orders of removal are collected once; each point is then a plan, a fit, a proof and a score.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import numpy as np
from torch import nn

from prunekit.backends.session import inputs_like
from prunekit.errors import ArtifactError, PlanError, UsageError
from prunekit.hooks.model_copy import with_weights
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.jobs.run.baseline_cache import train_baseline
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own
from prunekit.jobs.run.job_subject import prepare
from prunekit.jobs.run.resume import IDENTITY, find_run, identity_of, run_recipe
from prunekit.jobs.run.run_folder import AnalysisRun, Finish, environment, run_folder, write_report
from prunekit.jobs.stages.calibration_stage import criterion_inputs
from prunekit.jobs.stages.deployment_stage import Int8Copies, int8_format, require_int8_scores
from prunekit.jobs.stages.repair_stage import PrunedCopies
from prunekit.jobs.stages.repair_stage import held_out as held_out_of
from prunekit.measure.latency.comparison import devices, measure_latency
from prunekit.measure.score_drop import SURE, Drop, Evaluate, HeldOut
from prunekit.modes.public_call import public_call
from prunekit.planning.keywords import PlanKeywords, prune_settings, shows_keywords
from prunekit.planning.plan import Plan
from prunekit.pruning.latency_budget_search import with_profile
from prunekit.pruning.plan_search import PlanSearch
from prunekit.pruning.prune import Calibration, Request, pruned_by
from prunekit.pruning.pruned import Pruned
from prunekit.pruning.score_budget import at_share, axis_of, confirmed, judged, share_range, with_axis
from prunekit.reading.text_files import read_json
from prunekit.settings.calibration import IMAGES, RepairSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import WITHOUT_EFFECT, BudgetSettings
from prunekit.tasks.task import Task
from prunekit.utils.context import threads
from prunekit.utils.display import Displayed, Table, factor, in_unit, share
from prunekit.utils.files import StrPath, write_csv, write_json
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import Log, reporting, stage, wanted

POINTS = 8
"""Points of a frontier, if it is not said."""
WIDEST, NARROWEST = 0.9, 0.2
"""Shares of the first and the last point, where plans can be as narrow."""
Result: TypeAlias = Pruned | Path
"""The model of a point: the result of `prune`, or the folder of a job's model."""


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """One model of a frontier."""

    share: float  # of the MACs, or of the predicted time, that its plan was made for
    macs: float  # share of the dense model's that is left
    params: float  # likewise
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
        sizes = {"share": self.share, "macs": self.macs, "params": self.params}
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
            way = "higher" if best.int8.about.lower_is_better else "lower"
            said.append(
                f"In int8 the score at {share(best.macs)} is {best.int8.with_interval} {way} than the dense model's."
            )
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
        headings = ("MACs left", "parameters", about.label, lost, "95 %", *int8, "speedup", "")
        yield Table(headings, [_cells(point, point is knee, bool(int8)) for point in self.points])
        if self.int8 is not None:
            yield f"Without pruning: {self.int8}"
        yield "\n".join((self.advice, *self.missed))

    def _repr_html_(self) -> str:
        from prunekit.report.figures.canvas import are_drawn

        return super()._repr_html_() + (self.picture() if are_drawn() else "")


def _cells(point: FrontierPoint, knee: bool, with_int8: bool) -> tuple[str, ...]:
    drop, speedup = point.drop, "–"
    ends = "–" if drop.interval is None else " to ".join(drop.in_words(end).split()[0] for end in drop.interval)
    if point.speedup is not None:
        median, low, high = point.speedup
        speedup = factor(median) if point.stable else f"unstable [{low:.2f}, {high:.2f}]"
    score, mark = in_unit(drop.score, drop.about.unit), "knee" if knee else ""
    int8 = ("–" if point.int8 is None else point.int8.with_interval,) if with_int8 else ()
    return share(point.macs), share(point.params), score, drop.in_words(drop.drop), ends, *int8, speedup, mark


@public_call
@shows_keywords(PlanKeywords)
def frontier(
    model: nn.Module,
    example: Any = None,
    *,
    calibration: Calibration,
    evaluate: Evaluate | None = None,
    held_out: Any = None,
    points: int | Sequence[float] = POINTS,
    timed: bool = True,
    repair: RepairSettings | None = None,
    images: int = IMAGES,
    seed: int = 0,
    more_examples: Sequence[Any] = (),
    outputs: Outputs | None = None,
    task: Task | str | None = None,
    progress: bool | None = None,
    **removed: Unpack[PlanKeywords],
) -> Frontier:
    """Prune a model to several sizes, and measure the score and the time of each: how much can go, at what cost.

    Args:
        model: any module that runs on the samples; not changed.
        example: as for `prune`.
        calibration: samples as for `prune`, whose statistics and orders of removal serve all points.
        evaluate: a function of the model that returns its score, or the score of each sample; or a task or its name.
            None: whether class scores say what the dense model says. See `prune`.
        held_out: samples that models are judged on, as for `prune`.
        points: how many, from 90 % to 20 % of the MACs, or of the time if a target is given; or the shares themselves.
        timed: whether to measure the speedup of every point, beside the dense model: on the target, or in eager on one
            CPU thread.
        repair: settings of the repair of every point; None: the default.
        images, seed, more_examples, outputs, task, progress: as for `prune`.
        removed: as for `prune`; budgets hold for every point.

    Raises:
        PlanError: no point can be made.
        UsageError, DataError, NonFiniteError, VerificationError: as for `prune`.

    Example:
        >>> import prunekit as pk, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> found = pk.frontier(model, calibration=torch.randn(900, 4), points=3, timed=False)
        >>> [f"{row['macs']:.0%}" for row in found.rows()]
        ['88%', '50%', '12%']
    """
    points = require_points(points)
    model = with_weights(unwrapped(model, offloaded=True))
    require_trainable(model, "frontier")
    open_budget: Any = {} if removed.get("settings") is not None else {"macs": WITHOUT_EFFECT["macs"]}
    asked = prune_settings(model, True, **open_budget | removed)
    if asked.budget.max_drop is not None:
        raise UsageError("max_drop: expected none, as a frontier shows all drops; frontier(...).at(drop=0.01) has it")
    with reporting(progress, "frontier"):
        calibration, task, models = judged(model, calibration, images, held_out, evaluate, task)
        open_settings = with_axis(asked)
        if open_budget and "macs" not in removed and axis_of(asked) != "macs":
            open_settings = replace(open_settings, budget=open_settings.budget.changed(macs=None))
        request = Request(
            model, example, calibration, open_settings, images, None, None, seed, more_examples, task, outputs
        )
        fitting = repair or RepairSettings()
        request.prepare(fitting)

        def make(share: float) -> tuple[Pruned, nn.Module, Plan]:
            found = pruned_by(request, at_share(request.search, request.inputs, share), fitting)
            return replace(found, masked=None), found.model, found.plan

        made, missed = _measured(request.search, models, make, _shares(request.search, points), stage)
        found = Frontier(type(model).__name__, made, missed)
        if not timed:
            return found
        stage(f"time of {len(made)} models and the dense one")
        small = [point.result.model for point in made if isinstance(point.result, Pruned)]
        return _timed(found, model, small, request.search, asked.target.as_latency, stage)


def _shares(search: PlanSearch, points: int | Sequence[float]) -> list[float]:
    """Return the shares of the points, the largest first, within what plans can leave and budgets allow."""
    least, most = share_range(search)
    if not isinstance(points, int):
        shares = sorted(points, reverse=True)
        if shares[0] > most:
            raise UsageError(f"points: expected shares up to {most:.3g}, which budgets allow, got {shares[0]:g}")
        return shares
    if least >= most:
        raise PlanError(f"frontier: plans leave no less than {share(least)}, and budgets allow {share(most)}")
    ends = min(WIDEST, most), min(max(NARROWEST, least * 1.02), most)
    return [float(one) for one in np.linspace(*ends, points)] if ends[0] > ends[1] else [most]


def require_points(points: Any) -> int | list[float]:
    """Return a number of points, or shares; raise UsageError if they are neither."""
    if isinstance(points, (int, np.integer)) and points >= 2:
        return int(points)
    shares = list(points) if isinstance(points, (Sequence, np.ndarray)) and not isinstance(points, str) else []
    sound = all(isinstance(one, (int, float, np.number)) and 0 < one < 1 for one in shares)
    if not shares or not sound or len({f"{one:.6g}" for one in shares}) < len(shares):
        raise UsageError(
            "points: expected a number of at least 2, or different shares above 0 and below 1, such as [0.8, 0.5], got "
            f"{points!r}"
        )
    return [float(one) for one in shares]


def _measured(
    search: PlanSearch,
    models: HeldOut,
    make: Callable[[float], tuple[Result, nn.Module, Plan]],
    shares: Sequence[float],
    log: Log,
    known: Mapping[float, FrontierPoint] | None = None,
    keep: Callable[[FrontierPoint], None] = lambda point: None,
    files: Int8Copies | None = None,
) -> tuple[tuple[FrontierPoint, ...], tuple[str, ...]]:
    """Return the points, and why others could not be made."""
    found, missed = list[FrontierPoint](), list[str]()
    what = {"macs": "MACs", "speedup": "time"}[axis_of(search.settings)]
    for number, left in enumerate(shares, 1):
        point = (known or {}).get(left)
        if point is None:
            log(f"point {number} of {len(shares)}: {share(left)} of the {what}")
            try:
                result, model, plan = make(left)
            except PlanError as error:
                missed.append(f"{share(left)}: {error}")
                continue
            totals = plan.totals()
            left_of = {name: kept / (dense or 1) for name, (dense, kept) in totals.items()}
            drop = models.drop(models.score(model))
            sizes = left_of["MACs"], left_of["parameters"]
            int8, problem = (None, "") if files is None else files.drop(model)
            point = FrontierPoint(left, *sizes, drop, result, int8=int8, without_int8=problem)
            keep(point)
        if found and (point.macs, point.params) == (found[-1].macs, found[-1].params):
            log(f"point {number} of {len(shares)}: the same widths as the point before, which are rounded")
            continue
        said = "; ".join(map(str, filter(None, (point.drop, point.int8))))
        log(f"point {number} of {len(shares)}: MACs {share(point.macs)} left: {said}")
        found.append(point)
        if point.without_int8:
            missed.append(f"{share(left)} in int8: {point.without_int8}")
    if not found:
        raise PlanError(f"frontier: no point can be made: {missed[0]}")
    return tuple(found), tuple(missed)


def _timed(
    found: Frontier,
    dense: nn.Module,
    small: Sequence[nn.Module],
    search: PlanSearch,
    settings: LatencySettings,
    log: Log,
) -> Frontier:
    """Return the frontier with the speedup of every point in the first setting, all timed in turn."""
    names = [f"point {number}" for number in range(1, len(small) + 1)]
    report = measure_latency(
        {"dense": dense, **dict(zip(names, small, strict=True))},
        inputs_like(search.examples[0]),
        settings,
        devices(search.settings.target.device, settings),
        log=log,
    )
    rows = {row["model"]: row for row in reversed(report.speedup)}  # of the first setting
    points = [
        replace(point, speedup=(row["median"], row["low"], row["high"]), stable=bool(row["stable"]))
        if (row := rows.get(name)) is not None
        else point
        for name, point in zip(names, found.points, strict=True)
    ]
    return replace(found, points=tuple(points))


def analyze(
    job: JobSettings,
    *,
    points: int | Sequence[float] = POINTS,
    log: Log = stage,
    progress: bool | None = None,
    finish: Finish | None = write_report,
    own: Own = RECIPE_ONLY,
    resume: StrPath | None = None,
) -> AnalysisRun[Frontier]:
    """Make the frontier of a job's dense model, on its validation samples; the job's budgets only mark the picture.

    Where the job exports in int8, every model is judged twice: in float, and as the file that the job would deliver.
    Every point's model lies in `points/<number>` of the run's folder, with its plan. A run that is resumed goes on with
    the points that are missing.
    """
    points = require_points(points)
    asked = job.prune.budget
    budget = BudgetSettings(speedup=WITHOUT_EFFECT["speedup"]) if asked.measured else BudgetSettings()
    job = replace(job, prune=replace(job.prune, budget=budget, pattern=None, schedule=None, compact_early=False))
    text, prepared, form = run_recipe(job, own), prepare(job, own), int8_format(job)
    require_int8_scores(prepared, "the frontier")
    identity = {**identity_of(prepared, training=False), "command": "frontier", "points": points}
    again = None if resume is None else find_run(resume, job.output / job.name / "frontier", identity, log)
    start = time.perf_counter()
    with run_folder(job.output / job.name, "frontier", log, text, finish, again) as run, threads(job.threads):
        write_json(run.resume / IDENTITY, identity)
        dense = train_baseline(prepared, log=run.log, progress=wanted(progress)).model
        search = PlanSearch.trace(dense, prepared.example_inputs, with_axis(job.prune), log=run.log)
        search = with_profile(search, job.deploy)
        models, made = held_out_of(prepared, dense), PrunedCopies(prepared, dense, training=False)
        files = None if form is None else Int8Copies(prepared, models, form)
        alone, problem = (None, "") if files is None else files.drop(dense)
        if alone or problem:
            run.log(f"int8: files of {form}; without pruning: {alone or problem}")
        inputs = criterion_inputs(prepared, dense, search.channel_map, log=run.log)

        def make(left: float) -> tuple[Path, nn.Module, Plan]:
            planned = at_share(search, inputs, left)
            small, folder = made.of(planned.plan), run.path / "points" / f"{left:.6g}"
            prepared.save_model(small, folder, planned.plan)
            return folder, small, planned.plan

        shares, kept = _shares(search, points), run.resume / "points.json"
        known = _kept_points(kept, models, run.path)
        keep = partial(_keep, kept, known)
        sizes, missed = _measured(search, models, make, shares, run.log, known, keep, files)
        unpruned = (f"dense model in int8: {problem}",) if problem else ()
        found = Frontier(job.name, sizes, (*unpruned, *missed), alone)
        small = [prepared.load_model(point.result, dense) for point in found.points if isinstance(point.result, Path)]
        found = _timed(found, dense, small, search, job.latency, run.log)
        metrics = {
            **found.summary(),
            "asked": {**asked.given, **({} if asked.max_drop is None else {"max_drop": asked.max_drop})},
            "samples_called": prepared.splits.task.samples,
            "seconds": time.perf_counter() - start,
            "environment": environment(),
        }
        write_csv(run.path / "frontier.csv", found.rows())
        write_json(run.path / "frontier.json", metrics)
    return AnalysisRun(run.path, found, metrics)


def _keep(path: Path, known: dict[float, FrontierPoint], point: FrontierPoint) -> None:
    """Write the points that are there, which a resumed run reads."""
    known[point.share] = point
    rows = []
    for one in known.values():
        drops = {
            name: None if drop is None else {figure: getattr(drop, figure) for figure in DROP}
            for name, drop in (("float", one.drop), ("int8", one.int8))
        }
        sizes = {"share": one.share, "macs": one.macs, "params": one.params}
        rows.append({**sizes, **drops, "without_int8": one.without_int8})
    write_json(path, rows)


def _kept_points(path: Path, models: HeldOut, folder: Path) -> dict[float, FrontierPoint]:
    """Return the points that an interrupted run made."""
    rows = read_json(path) if path.is_file() else []
    known = dict[float, FrontierPoint]()
    try:
        for row in rows:
            left = float(row["share"])
            drop = Drop(**row["float"], about=models.about)
            int8 = None if row["int8"] is None else Drop(**row["int8"], about=models.about)
            point = FrontierPoint(left, row["macs"], row["params"], drop, folder / "points" / f"{left:.6g}")
            known[left] = replace(point, int8=int8, without_int8=row["without_int8"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: expected the points of a frontier; the file is damaged") from error
    return known


DROP = ("score", "dense", "drop", "error", "parts", "samples", "spread", "dtype")
"""Figures of a drop in the file of a run that can be resumed."""

"""The frontier of a model: score against MACs, parameters and time at several points, each a repaired, proven model.

Samples, statistics and orders of removal are collected once; each point is then a plan, a fit, a proof and a score.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from torch import nn

from prunekit.backends.session import inputs_like
from prunekit.errors import ArtifactError, PlanError, UsageError
from prunekit.hooks.model_copy import with_weights
from prunekit.hooks.wrappers import require_trainable, unwrapped
from prunekit.jobs.analyses.frontier import SIZES, Frontier, FrontierPoint, Result
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
from prunekit.measure.score_drop import Drop, Evaluate, HeldOut
from prunekit.modes.public_call import public_call
from prunekit.planning.keywords import PlanKeywords, prune_settings, shows_keywords
from prunekit.planning.plan import Plan
from prunekit.pruning.latency.device_clock import DeviceClock
from prunekit.pruning.latency_budget_search import with_profile
from prunekit.pruning.plan_search import PlanSearch
from prunekit.pruning.prune import Calibration, Request, pruned_by
from prunekit.pruning.pruned import Pruned
from prunekit.pruning.score_budget import at_share, axis_of, judged, share_range, with_axis
from prunekit.reading.text_files import read_json
from prunekit.settings.calibration import IMAGES, RepairSettings
from prunekit.settings.deployment import LatencySettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import WITHOUT_EFFECT, BudgetSettings
from prunekit.tasks.task import Task
from prunekit.utils.context import threads
from prunekit.utils.display import share
from prunekit.utils.files import StrPath, write_csv, write_json
from prunekit.utils.outputs import Outputs
from prunekit.utils.progress import Log, reporting, stage, wanted

POINTS = 8
"""Points of a frontier, if it is not said."""
WIDEST, NARROWEST = 0.9, 0.2
"""Shares of the first and the last point, where plans can be as narrow."""
DROP = ("score", "dense", "drop", "error", "parts", "samples", "spread", "dtype")
"""Figures of a drop in the file of a run that can be resumed."""


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
            sizes = left_of["MACs"], left_of["parameters"], len(plan.gone)
            if found and sizes[:2] == (found[-1].macs, found[-1].params):
                log(f"point {number} of {len(shares)}: the same widths as the point before, which are rounded")
                continue
            drop = models.drop(models.score(model))
            int8, problem = (None, "") if files is None else files.drop(model)
            point = FrontierPoint(left, *sizes, drop, result, int8=int8, without_int8=problem)
            keep(point)
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
    target = search.settings.target
    if target.elsewhere:
        clock = DeviceClock(target, log)
        timings = clock.timings(dense, small, inputs_like(search.examples[0]), "the points of the frontier")
        figures = [
            None if one is None else ((one.speedup, one.speedup_low, one.speedup_high), one.stable) for one in timings
        ]
    else:
        names = [f"point {number}" for number in range(1, len(small) + 1)]
        report = measure_latency(
            {"dense": dense, **dict(zip(names, small, strict=True))},
            inputs_like(search.examples[0]),
            settings,
            devices(target.device, settings),
            log=log,
        )
        rows = {row["model"]: row for row in reversed(report.speedup)}  # of the first setting
        figures = [
            None if row is None else ((row["median"], row["low"], row["high"]), bool(row["stable"]))
            for row in map(rows.get, names)
        ]
    points = [
        point if one is None else replace(point, speedup=one[0], stable=one[1])
        for point, one in zip(found.points, figures, strict=True)
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
        files = None if form is None else Int8Copies(prepared, models, form, run.log)
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
        sizes = {name: getattr(one, name) for name in SIZES}
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
            sizes, path = {name: row[name] for name in SIZES}, folder / "points" / f"{left:.6g}"
            known[left] = FrontierPoint(**sizes, drop=drop, result=path, int8=int8, without_int8=row["without_int8"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: expected the points of a frontier; the file is damaged") from error
    return known

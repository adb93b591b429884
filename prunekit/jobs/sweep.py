"""Sweeps: a recipe's job at every combination of some settings, each in a process of its own, compared on a page.

Trials are ordinary runs. What they share, the dense model, its statistics and the profile of its latency, is cached by
content, and made before the first of them starts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from prunekit.errors import RunError, UsageError, nearest
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own
from prunekit.jobs.run.early_checks import require_job, require_packages
from prunekit.jobs.run.job_subject import code_of_job, prepare
from prunekit.jobs.run.resume import IDENTITY, find_run, identity_of, run_recipe
from prunekit.jobs.run.run_folder import AnalysisRun, RunFolder, digest, object_in, run_folder
from prunekit.jobs.sweep_engines import ENGINES, Command, Limits, bytes_of, write_slurm
from prunekit.pruning.sample_statistics import needs_activations
from prunekit.settings.job import JobSettings, yaml_value
from prunekit.utils.display import plural
from prunekit.utils.files import StrPath, write_csv, write_json, write_text
from prunekit.utils.progress import Log, stage
from prunekit.utils.user_code import ForbiddenReference, absolute_reference

PAGE = "comparison.html"
DENSE = ("name", "output", "model", "task", "data", "baseline", "calibration", "seed", "device", "threads")
"""Settings that decide the dense model, its statistics, and where they are cached."""
OF_RUN = ("unit", "low", "high", "dense", "macs_left", "params_left", "folder")
OF_TIME = ("ms", "speedup", "speedup_low", "speedup_high")
Rows = list[dict[str, Any]]


class MissingTrials(RunError):
    """Trials of a sweep have no run, and a further call goes on with it."""


def sweep(
    job: JobSettings,
    grid: Mapping[str, Sequence[Any]],
    trials: Mapping[str, JobSettings],
    *,
    training: bool = True,
    engine: str = "processes",
    at_once: int | None = None,
    memory: str | None = None,
    retries: int = 1,
    resume: StrPath | None = None,
    log: Log = stage,
    own: Own = RECIPE_ONLY,
) -> AnalysisRun[Rows]:
    """Run the trials of a grid, by name, on an engine, and compare them; the result has a row for each.

    A sweep with failed trials is marked as failed, and one that is resumed runs those that have no run.
    """
    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r}: {nearest(engine, ENGINES)}")
    if (at_once is not None and at_once < 1) or retries < 0:
        raise UsageError(f"expected at_once of at least 1 and retries of at least 0, got {at_once} and {retries}")
    limits, names = Limits(at_once, bytes_of(memory), retries), [*trials]
    for each in trials.values():
        require_job(each, model=own.model, data=own.data, optimizer=own.optimizer)
        require_packages(each, dry=False, training=training)
    text, identity = run_recipe(job, own), identity_of(prepare(trials[names[0]], own), training=training)
    del identity["device"]  # a script may be written on another machine than it runs on
    identity |= {"command": f"sweep {identity['command']}", "recipe": {**identity["recipe"], "trials": names}}
    again = None if resume is None else find_run(resume, job.output / job.name / "sweep", identity, log)
    with suppress(MissingTrials), run_folder(job.output / job.name, "sweep", log, text, None, again) as run:
        write_json(run.resume / IDENTITY, identity)
        found = AnalysisRun(run.path, Rows(), {"script": None})
        commands = [*_commands(run.path.absolute() / "trials", trials, own, training=training)]
        shared, tried = commands[: -len(names)], commands[-len(names) :]
        first, left = ([one for one in some if one.problem is not None] for some in (shared, tried))
        if engine == "slurm" and left:
            script, mode = run.path.absolute() / "sweep.sh", () if training else ("--prune",)
            texts = {key: json.dumps(yaml_value(values, key))[1:-1] for key, values in grid.items()}
            given = (part for key, values in texts.items() for part in ("--grid", f"{key}={values}"))
            collect = ("--engine", "collect", "--resume", str(script.parent), *mode, *_options(job, own))
            write_slurm(script, first, left, ("sweep", str(script.with_name("recipe.yaml")), *given, *collect), limits)
            found.metrics["script"] = str(script)
        elif (start := ENGINES[engine]) is not None and left:
            start(first, replace(limits, at_once=1), run.log)  # one by one, as some are timed
            if broken := [f"{one.name}: {one.problem}" for one in first if one.problem is not None]:
                raise RunError("; ".join(broken))
            start(left, limits, run.log)
        _compare(run, tried, found)
        if missing := found.metrics["missing"]:
            raise MissingTrials(f"{plural(len(missing), 'trial')} of {len(names)} without a run")
    return found


def _options(job: JobSettings, own: Own) -> tuple[str, ...]:
    """Return the options with which a command takes the recipe of a job whose code may run."""
    given = ((each.name, getattr(own, each.name)) for each in fields(own))
    names = (*(name for name, _ in code_of_job(job)), job.prune.target.command)
    allowed = not any(isinstance(name, ForbiddenReference) for name in names)
    options = [part for name, one in given if one for part in (f"--{name}", absolute_reference(one))]
    return (*options, "--allow-code") if allowed else (*options,)


def _commands(folder: Path, trials: Mapping[str, JobSettings], own: Own, *, training: bool) -> Iterator[Command]:
    """Write the recipe of each trial, and yield commands that fill the caches that trials share, then the trials."""
    found, shared = list[Command](), set[str]()
    for number, (name, job) in enumerate(trials.items()):
        path, values = folder / f"{number:03d}", asdict(job)
        write_text(path.with_suffix(".yaml"), run_recipe(job, own))
        given, gpu = (str(path.with_suffix(".yaml")), "--json", *_options(job, own)), job.device in ("auto", "cuda")
        what = "finetune" if training else "prune"
        found.append(Command(name, path, (what, *given), job.threads, gpu))
        parts = {}
        if training or needs_activations(job.prune.criterion) or (job.model.weights is None and job.baseline):
            parts["calibrate"] = digest([values[key] for key in DENSE])
        if job.prune.budget.measured:
            widths = {
                key: value for key, value in values["prune"].items() if key not in ("budget", "criterion", "scope")
            }
            parts["profile"] = digest([*(values[key] for key in ("model", "data", "deploy")), widths])
        for part, key in parts.items():
            if key not in shared:
                yield Command(f"{part}, shared", folder / f"{part}-{key}", (part, *given), job.threads, gpu)
        shared |= {*parts.values()}
    yield from found


def _compare(run: RunFolder, commands: Sequence[Command], found: AnalysisRun[Rows]) -> None:
    """Write the page, the table and the figures of the trials that have a run, and name the others."""
    from prunekit.report.pages.compare_page import write_comparison  # pandas takes most of a second to import

    printed = {one.name: object_in(one.path.with_suffix(".json")) for one in commands}
    folders = {name: Path(result["folder"]) for name, result in printed.items() if result is not None}
    missing = [f"{one.name}: {one.problem}" for one in commands if one.name not in folders]
    page = write_comparison([*folders.values()], run.path / PAGE, [f"no run of {each}" for each in missing])
    runs = dict(zip(folders, page["runs"], strict=True))
    for one in commands:
        figures = runs.get(one.name, {})
        times = [row for row in page["latency"] if row["letter"] == figures.get("letter")]
        time = times[0] if times else {}
        scored = {"run": figures.get("letter"), "score": figures.get("value")}
        row = {"trial": one.name, **scored, **{key: figures.get(key) for key in OF_RUN}}
        timed = {**{key: time.get(key) for key in OF_TIME}, "stable": not time.get("speedup_doubtful")}
        found.result.append({**row, **timed, "error": one.problem})
    found.metrics.update(trials=found.result, missing=missing)
    write_csv(run.path / "sweep.csv", found.result)
    write_json(run.path / "sweep.json", found.metrics)

"""Resuming of runs: the recipe and identity in a run's folder, and the search for the run."""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from prunekit.compaction.compact_model import compact
from prunekit.distributed.process_group import main_process_only, size
from prunekit.errors import ArtifactError, ResumeError
from prunekit.hooks.model_copy import copied, named_tensors
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own, own_source
from prunekit.jobs.run.early_checks import AUTO, require_run
from prunekit.jobs.run.job_subject import JobSubject, code_of_job
from prunekit.jobs.run.run_folder import RESUME, RunFolder, alive, digest, object_in, weights_digest
from prunekit.models.names import is_weights_file
from prunekit.planning.plan import load_plan
from prunekit.pruning.latency.latency_target import Attempt
from prunekit.pruning.plan_search import Planned
from prunekit.reading.text_files import as_record, read_json
from prunekit.repair.repair_report import RepairReport
from prunekit.settings.job import WITHOUT_EFFECT, JobSettings, dump
from prunekit.training.checkpoints import require_same
from prunekit.utils.files import StrPath, write_json
from prunekit.utils.progress import Log
from prunekit.utils.registry import registered_names, replaced_at
from prunekit.utils.state_folders import differences, read_state, write_state
from prunekit.utils.tensors import require_same_kind
from prunekit.utils.user_code import absolute_reference, is_reference

IDENTITY = "run.json"
"""File in the folder `resume` of a run with what only the same job has; see `identity_of`."""


def find_run(asked: StrPath, runs: Path, identity: Mapping[str, Any], log: Log) -> Path | None:
    """Return the folder of the run to resume; None if there is none, which is logged.

    What is asked for is the folder, or `auto` for the newest unfinished run of the same recipe in `runs`. A
    `ResumeError` says why a run cannot be resumed: it is of another recipe, model, version or data (and which differs),
    it still runs, or it has finished.
    """
    if asked != AUTO:
        return _named(Path(asked), identity)
    others = []
    for folder, there in _unfinished(runs):
        then, now = ({key: one.get(key) for key in ("command", "recipe")} for one in (there, identity))
        if changed := list(differences(then, now)):
            if not alive(_status(folder)):
                others.append(f"{folder} is unfinished, and was started otherwise: {'; '.join(changed[:4])}")
            continue
        if alive(_status(folder)):
            log(f"resume: {folder} is of this recipe, and still runs")
            continue
        require_same(folder, there, identity)
        return folder
    log(f"resume: no run of this recipe in {runs} is left unfinished; starting a new one")
    for text in others[:1]:  # the newest
        log(f"resume: {text}; to go on with it, repeat what it was started with")
    return None


def _named(folder: Path, identity: Mapping[str, Any]) -> Path:
    require_run(folder)
    status = _status(folder)
    if status.get("state") == "finished":
        raise ResumeError(f"{folder}: the run has finished; there is nothing to resume")
    if alive(status):
        raise ResumeError(f"{folder}: the run is still running, as process {status['pid']}; end that first")
    there = object_in(folder / RESUME / IDENTITY)
    if there is None:
        raise ResumeError(f"{folder}: the run ended before it had anything to resume; start a new one")
    require_same(folder, there, identity)
    return folder


def _unfinished(runs: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of unfinished runs with their identities, the newest first."""
    found = [folder.parent for folder in runs.glob(f"*/{RESUME}") if _status(folder.parent).get("state") != "finished"]
    for folder in sorted(found, key=lambda folder: (str(_status(folder).get("started")), folder.name), reverse=True):
        if (there := object_in(folder / RESUME / IDENTITY)) is not None:
            yield folder, there


def _status(folder: Path) -> dict[str, Any]:
    return object_in(folder / "status.json") or {}


def identity_of(prepared: JobSubject, *, training: bool) -> dict[str, Any]:
    """Return the identity of a run as plain data: only a job with the same one can resume it."""
    job = resolved(prepared.job)
    recipe = {key: value for key, value in asdict(job).items() if key not in WITHOUT_EFFECT}
    recipe["prune"] = job.prune.noted
    facts = {
        "command": "finetune" if training else "prune",
        "recipe": recipe,
        "code": {name: own_source(name) for name, _ in code_of_job(job)},
        "data": prepared.splits.fingerprint,
        "model": {"structure": digest(prepared.structure), "weights": weights_digest(prepared.model)},
        "device": prepared.device.type,
        "processes": size(),
        "versions": {"prunekit": version("prunekit"), "torch": str(torch.__version__)},
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def run_recipe(job: JobSettings, own: Own) -> str:
    """Return the text of the recipe in a run's folder: the resolved job, below a comment with the options it needs.

    These name the user's own model, data and optimizer, which are not settings.
    """
    named = {each.name: getattr(own, each.name) for each in fields(own)}
    options = [
        f"#   --{name} {shlex.quote(absolute_reference(reference))}" for name, reference in named.items() if reference
    ]
    said = "# Partly your own code, which no recipe runs: commands that take this recipe need these options too."
    return "\n".join([*([said, *options] if options else []), dump(resolved(job, own))])


def resolved(job: JobSettings, own: Own = RECIPE_ONLY) -> JobSettings:
    """Return a job whose paths are absolute, and whose own model is named by its factory."""
    data, model = job.data, job.model
    if data.root is not None:
        data = replace(data, root=Path(data.root).absolute())
    if model.weights is not None and is_weights_file(model):
        model = replace(model, weights=str(Path(model.weights).absolute()))
    if data.tokenizer is not None:
        data = replace(data, tokenizer=Path(data.tokenizer).absolute())
    if model.folder is not None:
        model = replace(model, name=str(model.folder.absolute()))
    if model.zoo == "own":
        model = replace(model, name=absolute_reference(own.model or model.name))
    job = replace(job, data=data, model=model, output=Path(job.output).absolute())
    for key, name, _ in registered_names(JobSettings, job):
        job = replaced_at(job, key, absolute_reference(name)) if is_reference(name) else job
    return job


Result = TypeVar("Result")


class StageClock:
    """Seconds of each stage of a run, summed over the times it was resumed; those of a killed stage are lost."""

    def __init__(self, path: Path) -> None:
        self._path = path  # of a JSON file
        self.stages: dict[str, float] = {}
        with suppress(ArtifactError):  # not there yet
            self.stages = as_record(dict[str, float], read_json(path), str(path))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - start
            with suppress(OSError):  # figures must not hide what failed
                write_json(self._path, self.stages)


def cache_plan(run: RunFolder, planned: Planned) -> None:
    """Write the plan with the results of its trial, as a schedule replaces the plan in the run's folder in the end."""
    planned.plan.save(run.resume / "planned")
    write_state(
        run.resume / "plan",
        {
            "plan": planned.plan.digest,
            "scores": torch.as_tensor(planned.scores),
            "max_relative_difference": planned.max_relative_difference,
            "locked_by_trial": planned.locked_by_trial,
            "unseen": planned.unseen,
            "attempts": [asdict(attempt) for attempt in planned.attempts],
        },
    )


@main_process_only
def cached_plan(run: RunFolder, dense: nn.Module) -> Planned | None:
    """Return the plan of the run that is resumed, in the main process; None if it had no plan yet."""
    return _cached(run, "plan", partial(_plan_of, run, dense))


def _plan_of(run: RunFolder, dense: nn.Module, state: Mapping[str, Any]) -> Planned:
    where = run.resume / "plan"
    found = as_record(_PlanFacts, {key: value for key, value in state.items() if key != "scores"}, str(where))
    plan = load_plan(run.resume / "planned")
    if found.plan != plan.digest:
        raise ResumeError(
            f"{run.resume / 'planned'}: not the plan that this run was made with (checksum {plan.digest}, "
            f"expected {found.plan}); put that back, or start a new run"
        )
    scores, count = state.get("scores"), plan.channel_map.n_labels
    if not isinstance(scores, torch.Tensor) or scores.shape != (count,) or not scores.is_floating_point():
        raise ArtifactError(f"{where}: expected a score for each of {count} labels; the file is damaged")
    run.log("plan: that of the run, from its folder")
    return Planned(
        plan,
        scores.numpy(),
        compact(dense, plan),
        found.max_relative_difference,
        found.locked_by_trial,
        found.unseen,
        found.attempts,
    )


def cache_repair(run: RunFolder, model: nn.Module, report: RepairReport | None) -> None:
    """Write the weights of the repaired model, and the report of its repair."""
    weights = {name: tensor.detach() for name, tensor in named_tensors(model)}
    write_state(run.resume / "repair", {"weights": weights, "report": None if report is None else asdict(report)})


def cached_repair(run: RunFolder, dense: nn.Module) -> tuple[nn.Module, RepairReport | None] | None:
    """Return the repaired model of the run that is resumed, and its report; None if it was not repaired yet."""
    return _cached(run, "repair", partial(_repair_of, run, dense))


def _repair_of(run: RunFolder, dense: nn.Module, state: Mapping[str, Any]) -> tuple[nn.Module, RepairReport | None]:
    where, given = str(run.resume / "repair"), state.get("report")
    report = None if given is None else as_record(RepairReport, given, f"{where}.report")
    require_same_kind(state.get("weights"), named_tensors(dense), where)
    model = copied(dense)
    with torch.no_grad():
        for name, tensor in named_tensors(model):
            tensor.copy_(state["weights"][name])
    run.log("repair: that of the run, from its folder")
    return model, report


@dataclass(frozen=True)
class _PlanFacts:
    """Results of the search for a plan, besides the plan itself and its scores."""

    plan: str
    max_relative_difference: float
    locked_by_trial: tuple[str, ...]
    unseen: tuple[str, ...]
    attempts: tuple[Attempt, ...]  # measurements of time, which another run would not come to again


def _cached(run: RunFolder, name: str, use: Callable[[dict[str, Any]], Result]) -> Result | None:
    """Return what a function makes of the state of a stage; None if it is missing, or damaged, which is logged."""
    folder = run.resume / name
    if not folder.exists():
        return None
    try:
        return use(read_state(folder))
    except ArtifactError as error:
        run.log(f"{name}: {error}; made again")
        return None

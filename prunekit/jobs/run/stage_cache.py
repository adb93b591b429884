"""Finished stages of a run: their seconds, plan and repair, from which a resumed run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from prunekit.compaction.compact_model import compact
from prunekit.distributed.process_group import main_process_only
from prunekit.errors import ArtifactError, ResumeError
from prunekit.hooks.model_copy import copied, named_tensors
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.planning.plan import load_plan
from prunekit.pruning.latency_search import time_binds
from prunekit.pruning.latency_target import Attempt
from prunekit.pruning.plan_search import Planned
from prunekit.reading.records import as_record
from prunekit.reading.text_files import read_json
from prunekit.repair.repair_report import RepairReport
from prunekit.utils.files import write_json
from prunekit.utils.state_folders import read_state, write_state
from prunekit.utils.tensors import require_same_kind

Result = TypeVar("Result")


class StageClock:
    """Seconds of each stage of a run, summed over the times it was resumed; those of a killed stage are lost.

    Args:
        path: JSON file with the seconds.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
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
    """Write the plan with the results of its trial; a schedule replaces the one in the run's folder at its end."""
    planned.plan.save(run.resume / "planned")
    attempts = [asdict(attempt) for attempt in planned.attempts]
    write_state(
        run.resume / "plan",
        {
            "plan": planned.plan.digest,
            "scores": torch.as_tensor(planned.scores),
            "max_relative_difference": planned.max_relative_difference,
            "locked_by_trial": planned.locked_by_trial,
            "unseen": planned.unseen,
            "frozen": {"attempts": attempts, "binding": time_binds(planned.plan)} if attempts else None,
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
        () if found.frozen is None else found.frozen.attempts,
    )


def cache_repair(run: RunFolder, model: nn.Module, report: RepairReport | None) -> None:
    """Write the weights of the repaired model, and the report of its repair."""
    weights = {name: tensor.detach() for name, tensor in named_tensors(model)}
    write_state(run.resume / "repair", {"weights": weights, "report": None if report is None else asdict(report)})


def cached_repair(run: RunFolder, dense: nn.Module) -> tuple[nn.Module, RepairReport | None] | None:
    """Return the repaired model of the run that is resumed, and its report; None if it was not repaired yet."""
    return _cached(run, "repair", partial(_repair_of, run, dense))


def _repair_of(run: RunFolder, dense: nn.Module, state: Mapping[str, Any]) -> tuple[nn.Module, RepairReport | None]:
    where = str(run.resume / "repair")
    report = as_record(_RepairFacts, {"report": state.get("report")}, where).report
    require_same_kind(state.get("weights"), named_tensors(dense), where)
    model = copied(dense)
    with torch.no_grad():
        for name, tensor in named_tensors(model):
            tensor.copy_(state["weights"][name])
    run.log("repair: that of the run, from its folder")
    return model, report


@dataclass(frozen=True)
class _Frozen:
    """Decisions from measurements of time, which another run would not come to again."""

    attempts: tuple[Attempt, ...]
    binding: bool


@dataclass(frozen=True)
class _PlanFacts:
    """Results of the search for a plan, besides the plan itself and its scores."""

    plan: str
    max_relative_difference: float
    locked_by_trial: tuple[str, ...]
    unseen: tuple[str, ...]
    frozen: _Frozen | None


@dataclass(frozen=True)
class _RepairFacts:
    """Result of a repair, besides the weights."""

    report: RepairReport | None


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

"""Whole jobs: from a recipe's settings to a smaller, faster, proven model and a folder full of evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunekit.channels import ChannelMap, trace
from prunekit.context import threads
from prunekit.distributed.exchange import wait_for_all
from prunekit.distributed.failing import one_for_all
from prunekit.distributed.group import is_main
from prunekit.workflow.bench import devices
from prunekit.workflow.delivering import require_reachable
from prunekit.workflow.dense import Prepared, prepare
from prunekit.workflow.deploying import require_deployable
from prunekit.workflow.journey import Journey
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.profiling import Profile, profile_for
from prunekit.workflow.pruning import feasible
from prunekit.workflow.runs import Log, run_folder
from prunekit.workflow.settings import JobSettings

Finish = Callable[[Path], object]


@dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run.

    Attributes:
        folder: everything it wrote; the compact model is in `folder / "model"`.
        metrics: what `metrics.json` holds.
    """

    folder: Path
    metrics: dict[str, Any]


def finetune(
    job: JobSettings,
    *,
    log: Log,
    progress: bool = False,
    resolved: str = "",
    finish: Finish | None = None,
    own: Own = RECIPE_ONLY,
) -> RunResult:
    """Trains or loads the dense model, calibrates, plans, fine-tunes under masks, compacts, verifies and measures.

    What the job's `repair` says is repaired before fine-tuning. The processes of a group (`prunekit.distributed`) call
    this alike: they calibrate and train together, the rest is the main one's, which alone writes.

    Args:
        job: the settings.
        log: gets a line for each stage.
        progress: shows bars on stderr.
        resolved: the recipe's text, kept in the run's folder.
        finish: called with the run's folder at the end, before the run counts as finished (the report).
        own: the user's own code, where the job's model or data is their own.

    Raises:
        UsageError: data, model or budget do not fit; nothing was written.
        RunError: the run failed; its folder says so.
    """
    return _run(job, log, progress, resolved, finish, own, training=True)


def prune_job(
    job: JobSettings,
    *,
    log: Log,
    progress: bool = False,
    resolved: str = "",
    finish: Finish | None = None,
    own: Own = RECIPE_ONLY,
) -> RunResult:
    """As `finetune`, without fine-tuning: what is left is repaired as the job's `repair` says, and that is all.

    The dense model is trained only if it has no weights and the job says how. Labels are looked at to measure top-1,
    and by criteria that need them.

    Args:
        job, log, progress, resolved, finish, own: as for `finetune`.

    Raises:
        UsageError: data, model or budget do not fit; nothing was written.
        RunError: the run failed; its folder says so.
    """
    return _run(job, log, progress, resolved, finish, own, training=False)


def _run(
    job: JobSettings,
    log: Log,
    progress: bool,
    resolved: str,
    finish: Finish | None,
    own: Own,
    *,
    training: bool,
) -> RunResult:
    devices("auto", job.latency)  # a runtime that is not there is refused before hours of work
    prepared = prepare(job, own)
    require_deployable(prepared)
    chart = trace(prepared.model, prepared.example_inputs)  # of the structure: training does not change it
    timed = _within_reach(prepared, chart, log) if is_main() else None
    with run_folder(job.output, job.name, log, resolved) as run, one_for_all(), threads(job.threads):
        metrics = Journey(prepared, chart, run, timed, progress=progress, training=training).travel()
        if finish is not None and is_main():
            finish(run.path)
        wait_for_all()
    return RunResult(run.path, metrics)


def _within_reach(prepared: Prepared, chart: ChannelMap, log: Log) -> Profile | None:
    """Refuses budgets that cannot be met; with the latency profile of the target, where a budget is one of time."""
    settings = prepared.job.prune
    timed = profile_for(prepared.model, prepared.example_inputs, chart, settings, log=log)
    if timed is None:
        feasible(chart, settings)
    else:
        require_reachable(prepared.model, prepared.example_inputs, chart, settings, timed.table)
    return timed

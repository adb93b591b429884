"""Whole jobs: from a recipe's settings to a smaller, faster, proven model and a folder full of evidence."""

from __future__ import annotations

from functools import partial

from prunekit.artifacts import StrPath
from prunekit.context import threads
from prunekit.deploy.transform import transform_of
from prunekit.distributed.exchange import from_main, wait_for_all
from prunekit.distributed.failing import one_for_all
from prunekit.distributed.group import is_main
from prunekit.progress import stage, wanted
from prunekit.report import require_report
from prunekit.settings.job import JobSettings
from prunekit.workflow.bench import devices
from prunekit.workflow.dense import prepare
from prunekit.workflow.deploying import require_deployable
from prunekit.workflow.journey import Journey
from prunekit.workflow.own import RECIPE_ONLY, Own, require_optimizer
from prunekit.workflow.plan_search import PlanSearch
from prunekit.workflow.resolved import run_recipe
from prunekit.workflow.resuming import find_run, identity_of, note
from prunekit.workflow.run_result import RunResult
from prunekit.workflow.runs import Finish, Log, as_raised, run_folder, write_report
from prunekit.workflow.scheduling import require_schedule
from prunekit.workflow.trainings import OnEpoch


@as_raised()
def finetune(
    job: JobSettings,
    *,
    log: Log = stage,
    progress: bool | None = None,
    finish: Finish | None = write_report,
    own: Own = RECIPE_ONLY,
    resume: StrPath | None = None,
    on_epoch: OnEpoch | None = None,
    training: bool = True,
) -> RunResult:
    """Trains or loads the dense model, calibrates, plans, fine-tunes under masks, compacts, verifies and measures.

    What the job's `repair` says is repaired before fine-tuning. Where `prune.schedule` is given, channels go while the
    model is fine-tuned. The processes of a group (`prunekit.distributed`) call this alike: they calibrate and train
    together, the rest is the main one's, which alone writes.

    Args:
        job: the settings.
        log, progress, own, resume, on_epoch: as for `prunekit.finetune`. Resumed on the CPU, with the same threads and
            as many processes, a run ends with the weights that it would have ended with at once.
        finish: called with the run's folder at the end, before the run counts as finished: writes the report.
        training: whether to fine-tune. If not, what is left is repaired as the job's `repair` says, and that is all;
            the dense model is trained only if it has no weights and the job says how. Labels are looked at to measure
            scores, and by criteria that need them.

    Raises:
        UsageError: data, model or budget do not fit; nothing was written.
        ResumeError: the run to resume is of another recipe, plan or version, still runs, or has finished.
        RunError: the run failed; its folder says so.
    """
    require_report()
    devices("auto", job.latency)  # a runtime that is not there is refused before hours of work
    require_optimizer(job, own)
    text = run_recipe(job, own)
    prepared = prepare(job, own)
    require_deployable(prepared)
    require_schedule(prepared, training=training)
    identity = identity_of(prepared, training=training)
    # Of the structure alone: training does not change it.
    search = PlanSearch.trace(prepared.model, prepared.example_inputs, job.prune, log=log)
    again = None
    with one_for_all():
        if is_main():
            again = None if resume is None else find_run(resume, job.output / job.name, identity, log)
            search = search.with_profile(transform_of(search.model, search.examples[0], job.deploy))
            search.require_reachable()
        wait_for_all()
        with run_folder(job.output, job.name, log, text, finish, again) as run, one_for_all(), threads(job.threads):
            note(run, identity)
            journey = Journey(prepared, search, run, progress=wanted(progress), training=training, on_epoch=on_epoch)
            metrics = journey.travel()
            folder = from_main(lambda: run.path)
        wait_for_all()  # until the report is written
    return RunResult(folder, metrics, own)


prune_job = partial(finetune, training=False)
"""`finetune` without fine-tuning."""

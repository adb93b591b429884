"""How gradients flow through a job's dense model while it trains."""

from __future__ import annotations

from dataclasses import replace

from prunekit.channels.copying import copied
from prunekit.context import threads
from prunekit.errors import UsageError
from prunekit.settings.job import JobSettings
from prunekit.training import FlowRow, GradientFlow, fit
from prunekit.workflow.dense import prepare
from prunekit.workflow.own import RECIPE_ONLY, Own, require_optimizer
from prunekit.workflow.runs import Log


def gradient_flow(
    job: JobSettings,
    *,
    epochs: int | None = None,
    records: int = 100,
    log: Log,
    progress: bool = False,
    own: Own = RECIPE_ONLY,
) -> tuple[FlowRow, ...]:
    """Trains a job's dense model as the job does, by the plain loss, and records its gradients; the result is dropped.

    From its first weights as `baseline` says, or where the job gives weights, from those as `finetune` says.

    Args:
        job: the settings.
        epochs: how long; the learning-rate schedule is fitted to it. None: as the job says.
        records: see `GradientFlow`.
        log: gets a line at the start.
        progress: shows a bar on stderr.
        own: the user's own code, where the job's model, data or optimizer is their own.

    Raises:
        UsageError: data, model or settings do not fit, or there is no epoch to train.
        RunError: the training failed.
    """
    require_optimizer(job, own)
    prepared = prepare(job, own)
    section, given = "finetune", job.finetune
    if job.model.weights is None and job.baseline is not None:
        section, given = "baseline", job.baseline
    settings = replace(given, epochs=epochs or given.epochs, distill=None, regularize=None, average=None)
    if not settings.epochs:
        raise UsageError(f"{section}.epochs: expected at least one to record gradients in, got 0; give --epochs")
    log(f"gradients: training {job.model.name} as `{section}` says, epochs: {settings.epochs}")
    flow = GradientFlow(records)
    with threads(job.threads):
        fit(
            copied(prepared.model),
            prepared.splits,
            settings,
            device=prepared.device,
            seed=job.seed,
            batch=job.data.batch,
            workers=job.data.reading,
            parts=[flow],
            own_optimizer=prepared.optimizer_for(settings),
            progress=progress,
            label="gradients",
        )
    return flow.records()

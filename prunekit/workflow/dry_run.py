"""What a job would do: the plan it makes before anything is trained."""

from __future__ import annotations

from typing import Any

from prunekit.calibration import ChannelStats
from prunekit.channels import trace
from prunekit.workflow.bench import devices
from prunekit.workflow.calibrate import calibrate_model, job_patches, loss_gradients
from prunekit.workflow.delivering import as_asked, first_aim, reachable_goal
from prunekit.workflow.dense import cached_baseline, prepare
from prunekit.workflow.deploying import require_deployable
from prunekit.workflow.evidence import needs_activations
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.pruning import plan_model
from prunekit.workflow.runs import Log
from prunekit.workflow.scheduling import require_schedule, schedule_rows
from prunekit.workflow.settings import JobSettings
from prunekit.workflow.tables import layer_rows


def dry_run(job: JobSettings, *, log: Log, own: Own = RECIPE_ONLY) -> dict[str, Any]:
    """Plans a job without training: data, model, budget and globs are checked, and the widths shown.

    Budgets of time are predicted from a profile, which is measured unless it is in the cache; what is predicted to be
    out of reach, or only just within it, is measured before it is refused, as a run does.

    Without weights and without a cached baseline the scores are those of random weights, which the result says; under
    scope `uniform` the widths do not depend on them.

    Raises:
        UsageError: data, model or budget do not fit.
    """
    devices("auto", job.latency)
    prepared = prepare(job, own)
    require_deployable(prepared)
    line = require_schedule(prepared, training=True)
    chart = trace(prepared.model, prepared.example_inputs)
    goal = reachable_goal(prepared, chart, log=log)
    trained = job.model.weights is not None or cached_baseline(prepared) is not None
    if job.sparsify is not None:
        log("dry run: scores are those before `sparsify`, which is training")
    if not trained:
        log("dry run: no trained weights yet, so scores are those of random ones")
    stats: ChannelStats | None = None
    if needs_activations(job.prune.criterion):
        stats = calibrate_model(prepared, prepared.model, log=log).stats
    planned = plan_model(
        prepared.model,
        prepared.example_inputs,
        job.prune if goal is None else first_aim(goal),
        stats=stats,
        gradients=loss_gradients(prepared, prepared.model, log=log),
        patches=job_patches(prepared, prepared.model, chart, log=log),
        seed=job.seed,
        channel_map=chart,
        latency=None if goal is None else goal.table,
    )
    planned = planned if goal is None else as_asked(planned, goal)
    settled = planned.plan.channel_map
    return {
        "trained": trained,
        "macs_before": settled.macs(),
        "macs_after": settled.macs(planned.plan.keep),
        "budgets": planned.plan.provenance["budgets"],
        "binding": planned.plan.provenance["binding"],
        "schedule": None if line is None else schedule_rows(job.prune, line, planned.plan),
        "channels_removed": planned.plan.removed,
        "groups": len(settled.groups),
        "locks": len(settled.locks),
        "max_relative_difference": planned.max_relative_difference,
        "widths": layer_rows(prepared.model, planned.compact, planned.plan),
    }

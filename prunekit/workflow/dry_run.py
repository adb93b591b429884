"""What a job would do: the plan it makes before anything is trained."""

from __future__ import annotations

from typing import Any

from prunekit.calibration import ChannelStats
from prunekit.channels import trace
from prunekit.measure.effort import current_effort
from prunekit.progress import stage
from prunekit.settings.job import JobSettings
from prunekit.workflow.bench import devices
from prunekit.workflow.calibrate import calibrate_model, job_patches, loss_gradients
from prunekit.workflow.delivering import as_asked, by_macs, first_aim, predicted_goal, reachable_goal
from prunekit.workflow.dense import cached_baseline, prepare
from prunekit.workflow.deploying import require_deployable
from prunekit.workflow.evidence import needs_activations
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.pruning import plan_model
from prunekit.workflow.runs import Log
from prunekit.workflow.scheduling import require_schedule, schedule_rows
from prunekit.workflow.tables import layer_rows

MEASURES = (
    "dry run: a budget of time is planned for by a profile of the target: what of its {} networks is not in the cache "
    "is timed now, which takes minutes; --no-measure (measure=False) predicts instead"
)
BY_MACS = (
    "the speedup is taken for one of multiply-accumulates, because the target was not profiled: that is off by up to a "
    "factor of two, mostly to the slow side (small layers, memory, fixed costs); `prunekit profile RECIPE` measures it"
)


def dry_run(job: JobSettings, *, log: Log = stage, own: Own = RECIPE_ONLY, measure: bool = True) -> dict[str, Any]:
    """Plans a job without training: data, model, budget and globs are checked, and the widths shown.

    Budgets of time are predicted from a profile, which is measured unless it is in the cache; what is predicted to be
    out of reach, or only just within it, is measured before it is refused, as a run does. `time` of the result says how
    they were predicted; None without such a budget.

    Args:
        job: the settings.
        log: gets a line for each stage; the first says so where something will be timed.
        own: the user's own code, where the job's model or data is their own.
        measure: whether anything may be timed; else a profile of the cache is used, and without one a speedup is
            predicted from multiply-accumulates.

    Without weights and without a cached baseline the scores are those of random weights, which the result says; under
    scope `uniform` the widths do not depend on them.

    Raises:
        UsageError: data, model or budget do not fit; or milliseconds are asked for that nothing predicts.
    """
    timely = job.prune.budget.measured
    if timely and measure:
        log(MEASURES.format(current_effort().networks))
    devices("auto", job.latency)
    prepared = prepare(job, own)
    require_deployable(prepared)
    line = require_schedule(prepared, training=True)
    chart = trace(prepared.model, prepared.example_inputs)
    goal = (reachable_goal if measure or not timely else predicted_goal)(prepared, chart, log=log)
    untimed = by_macs(job.prune) if timely and goal is None else job.prune
    known = None if goal is None else "; ".join([goal.profile.accuracy, *goal.profile.notes])
    time = known or (BY_MACS if timely else None)
    if time is not None and not measure:
        log(f"dry run: nothing is measured: {time}")
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
        untimed if goal is None else first_aim(goal),
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
        "time": time,
        "binding": planned.plan.provenance["binding"],
        "schedule": None if line is None else schedule_rows(job.prune, line, planned.plan),
        "channels_removed": planned.plan.removed,
        "groups": len(settled.groups),
        "locks": len(settled.locks),
        "max_relative_difference": planned.max_relative_difference,
        "widths": layer_rows(prepared.model, planned.compact, planned.plan),
    }

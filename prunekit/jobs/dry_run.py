"""The dry run of a job: the plan that it makes before anything is trained."""

from dataclasses import replace
from typing import Any

from prunekit.errors import NotMeasuredError, UsageError
from prunekit.jobs.run.baseline_cache import cached_baseline
from prunekit.jobs.run.command_subject import RECIPE_ONLY, Own
from prunekit.jobs.run.early_checks import left_out
from prunekit.jobs.run.job_subject import prepare
from prunekit.jobs.stages.calibration_stage import criterion_inputs
from prunekit.jobs.stages.deployment_stage import require_deployable
from prunekit.jobs.stages.job_schedule import require_schedule, schedule_rows
from prunekit.jobs.stages.measurement_stage import layer_rows
from prunekit.jobs.stages.training_stage import require_trainable
from prunekit.measure.latency.comparison import devices
from prunekit.measure.measurement_effort import current_effort
from prunekit.pruning.latency_budget_search import DOUBT, with_profile
from prunekit.pruning.plan_search import PlanSearch
from prunekit.settings.deployment import DeploySettings
from prunekit.settings.job import JobSettings
from prunekit.settings.pruning import PruneSettings, facts_of
from prunekit.utils.progress import Log, stage

MEASURES = (
    "dry run: a budget of time is planned for by a profile of the target: what of its {} networks is not in the cache "
    "is timed now, which takes minutes; --no-measure (measure=False) predicts instead"
)
BY_MACS = (
    "the speedup is taken for one of multiply-accumulates, because the target was not profiled: that is off by up to a "
    "factor of two, mostly to the slow side (small layers, memory, fixed costs); `prunekit profile RECIPE` measures it"
)


def dry_run(job: JobSettings, *, log: Log = stage, own: Own = RECIPE_ONLY, measure: bool = True) -> dict[str, Any]:
    """Plan a job without training: check data, model, budget and globs, and return the widths.

    Budgets of time are predicted from a profile, which is measured unless it is in the cache. As in a run, a budget
    that is predicted to be out of reach, or only just within it, is measured before this raises. `time` of the result
    says how times were predicted; None without such a budget.

    Without weights and without a cached baseline the scores are those of random weights, as `trained` of the result
    says; under scope `uniform` the widths do not depend on them. Where nothing may be timed (`measure`), a profile from
    the cache is used; without one, a speedup is predicted from multiply-accumulates.
    """
    if job.prune.budget.max_drop is not None:
        raise UsageError(
            "prune.budget.max_drop: models have to be made and measured to find what it leaves; `prunekit prune "
            "RECIPE` does, and trains nothing"
        )
    timely = job.prune.budget.measured
    if timely and measure:
        log(MEASURES.format(current_effort().networks))
    devices("auto", job.latency)
    prepared = prepare(job, own)
    require_deployable(prepared)
    require_trainable(prepared)
    line = require_schedule(prepared, training=True)
    search = PlanSearch.trace(prepared.model, prepared.example_inputs, job.prune, log=log)
    if measure or not timely:
        search = with_profile(search, job.deploy)
        search.require_reachable()
    else:
        search = _predicted(search, job.deploy)
    profile = None if search.latency is None else search.latency.profile
    known = None if profile is None else "; ".join([profile.accuracy, *profile.notes])
    time = known or (BY_MACS if timely else None)
    if time is not None and not measure:
        log(f"dry run: nothing is measured: {time}")
    if lacking := left_out(job):
        log(f"dry run: {lacking}")
    trained = job.model.weights is not None or cached_baseline(prepared) is not None
    if job.sparsify is not None:
        log("dry run: scores are those before `sparsify`, which is training")
    if not trained:
        log("dry run: no trained weights yet, so scores are those of random ones")
    planned = search.predict(criterion_inputs(prepared, prepared.model, search.channel_map, log=log))
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
        "blocks": [branch.name for branch in planned.plan.gone],
        "groups": len(settled.groups),
        "round_to": job.prune.round_to or "by width",
        "locks": len(settled.locks),
        "max_relative_difference": planned.max_relative_difference,
        "widths": layer_rows(prepared.model, planned.compact, planned.plan),
    }


def _predicted(search: PlanSearch, deploy: DeploySettings) -> PlanSearch:
    """Return the search with an earlier profile, or without one with a budget of MACs in place of a speedup."""
    try:
        search = with_profile(search, deploy, measure=False)
    except NotMeasuredError as error:
        search.log(f"profile: {error}")
        return replace(search, settings=by_macs(search.settings))
    target = search.latency
    if target is not None and target.least_share > 1 - DOUBT:
        # nothing raises because a budget is out of reach: the log says what is predicted
        fastest = f"the fastest plan is predicted to take {target.least_share:.2f} of the time asked for"
        search.log(f"latency: {target.called}: {fastest}; a run measures whether it can be had")
    return search


def by_macs(settings: PruneSettings) -> PruneSettings:
    """Return settings with a budget of multiply-accumulates in place of a speedup, as if time fell with them."""
    budget = settings.budget
    for name, value in budget.given.items():
        facts = facts_of(name)
        if facts.measured and not facts.share:
            raise UsageError(
                f"budget {name} {value:g}: without a measurement nothing says what this model takes; run `prunekit "
                "profile RECIPE` first (minutes), or leave out --no-measure"
            )
        if facts.measured:
            macs = min(facts.as_cost(value), 1.0 if budget.macs is None else budget.macs)
            budget = budget.changed(macs=macs, **{name: None})
    return replace(settings.in_blocks, budget=budget)

"""Whole jobs: from a recipe's settings to a smaller, faster, proven model and a folder full of evidence.

The stages of a job, in order: dense model, calibration, plan, repair, fine-tuning, proof, measurement.

What a job would do: the plan it makes before anything is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from prunekit.channels.cut.model_copy import copied
from prunekit.compaction.compact_model import compact, remarks
from prunekit.compaction.model_folder import load, save
from prunekit.data.datasets import describe_corrupt
from prunekit.data.loader import batches
from prunekit.deploy.subnormals import without_subnormals
from prunekit.deploy.transform import transform_of
from prunekit.distributed.process_group import from_main, is_main, one_for_all, wait_for_all
from prunekit.errors import NotMeasuredError, UsageError
from prunekit.jobs.bench import devices
from prunekit.jobs.calibrate import criterion_inputs
from prunekit.jobs.profile import in_blocks
from prunekit.jobs.prune.latency_target import LatencyResult
from prunekit.jobs.prune.plan_search import DOUBT, Planned, PlanSearch
from prunekit.jobs.run import results
from prunekit.jobs.run.agreement import require_same_plan, share_plan
from prunekit.jobs.run.dense_model import cached_baseline, prepare, save_weights, train_baseline
from prunekit.jobs.run.job_inputs import RECIPE_ONLY, Own, Prepared, require_optimizer
from prunekit.jobs.run.results import RunResult
from prunekit.jobs.run.resume import find_run, identity_of, note, run_recipe
from prunekit.jobs.run.run_folder import Finish, Log, RunFolder, as_raised, run_folder, write_report
from prunekit.jobs.run.stage_cache import Clock, keep_plan, kept_plan
from prunekit.jobs.run.tables import CURVE_COLUMNS, coupling_rows, curve_rows, layer_rows, lock_rows, score_rows
from prunekit.jobs.stages.activation_stage import find_thresholds, measure_masks
from prunekit.jobs.stages.deployment_stage import FOLDER, deploy, require_deployable
from prunekit.jobs.stages.repair_stage import repair_model, repair_summary
from prunekit.jobs.stages.schedule_stages import JobSchedule, require_schedule, schedule_rows
from prunekit.jobs.stages.tensorboard_log import watching, write_summary
from prunekit.jobs.stages.training_stage import Finetuning, OnEpoch, Trainings, checkpoints_of, told
from prunekit.masks.masked_model import sparsity
from prunekit.measure.effort import current_effort
from prunekit.measure.verification import Verification, verify
from prunekit.planning.plan import Plan
from prunekit.repair.repair_report import RepairReport
from prunekit.report.writers import require_report
from prunekit.settings.job import JobSettings
from prunekit.settings.prune import PruneSettings, facts_of
from prunekit.training.callbacks.selection import needs_plan
from prunekit.utils.context import threads
from prunekit.utils.files import StrPath, write_csv, write_json
from prunekit.utils.inputs import inputs_as_example
from prunekit.utils.progress import stage, wanted

PROOF_IMAGES = 512
"""Held-out images that masked and compact model are compared on at the end, in float64."""


@dataclass(frozen=True, eq=False)
class _Trained:
    """What a run has trained, and how."""

    dense: nn.Module
    control: nn.Module | None
    pruned: nn.Module
    trainings: Trainings
    report: RepairReport | None
    schedule: JobSchedule | None
    early: dict[str, Any] | None


class Journey:
    """The stages of one run, in order.

    Args:
        prepared: what it works on.
        search: for the plan, with its model traced, and profiled where a budget is one of time.
        run: where it writes.
        progress: shows bars on stderr.
        training: whether to fine-tune, the pruned model and a dense one for comparison.
        on_epoch: told of each epoch.
    """

    def __init__(
        self,
        prepared: Prepared,
        search: PlanSearch,
        run: RunFolder,
        *,
        progress: bool,
        training: bool,
        on_epoch: OnEpoch | None = None,
    ) -> None:
        self.prepared, self.search, self.run = prepared, replace(search, log=run.log), run
        self.progress, self.training, self.on_epoch = progress, training, on_epoch
        self.job, self.log = prepared.job, run.log
        self.clock = Clock(run.resume / "seconds.json")

    def travel(self) -> dict[str, Any]:
        """Run every stage and return the metrics; the processes of a group go together."""
        with self.clock.stage("baseline"):
            checkpoints = checkpoints_of(self.run, self.job, "baseline")
            baseline = train_baseline(
                self.prepared,
                log=self.log,
                progress=self.progress,
                checkpoints=checkpoints,
                watch=watching(self.run, self.job, "baseline"),
                on_epoch=told(self.on_epoch, "baseline", self.job.baseline),
            )
        dense = baseline.model
        if self.job.sparsify is not None and not self.training:
            self.log("sparsify: left out, because it is training")
        if self.job.prune.compact_early and not self.training:
            self.log("compact early: without effect, because nothing is fine-tuned")
        trainings = Trainings(self.prepared, self.run, baseline, progress=self.progress, on_epoch=self.on_epoch)
        sparse = self._sparsified(dense, None, trainings)
        planned = self._plan(sparse)
        plan = share_plan(None if planned is None else planned.plan)
        sparse = self._sparsified(sparse, plan, trainings)
        report = schedule = early = None
        if self.job.prune.schedule is not None:
            scores = None if planned is None else planned.scores
            schedule, pruned = JobSchedule(self.prepared, plan, scores, self.run), copied(sparse)
        else:
            with self.clock.stage("repair"):
                pruned, report = repair_model(self.prepared, sparse, plan, self.run, training=self.training)
        if self.training:
            with self.clock.stage("fine-tune"):
                pruned, early = Finetuning(self.prepared, self.run, trainings, schedule).tune(pruned, plan)
        if schedule is not None:
            plan = schedule.in_force()
            if planned is not None:
                planned = schedule.finished(planned)
                self._write_plan(planned)
        require_same_plan(plan, "after training")
        compacted = self._compact(pruned, dense, plan) if is_main() else None
        control = None
        if self.training and not self.job.control:
            self.log("control: left out, as the recipe asks; scores are compared with the dense model as it was")
        elif self.training:
            with self.clock.stage("control"):
                control = trainings.control(dense)

        def measured() -> dict[str, Any]:
            assert planned is not None
            assert compacted is not None
            trained = _Trained(dense, control, pruned, trainings, report, schedule, early)
            return self._measure(trained, planned, *compacted)

        return from_main(measured)

    def _plan(self, dense: nn.Module) -> Planned | None:
        """Return the plan within the job's budgets, written into the run's folder or read there; in the main process
        alone.

        All processes collect statistics together.
        """
        run, self.search = self.run, self.search.with_weights(dense)
        known = kept_plan(run, dense) if is_main() else None
        if from_main(lambda: known is not None):
            return known
        chart = self.search.channel_map
        with self.clock.stage("calibrate"):
            inputs = criterion_inputs(self.prepared, dense, chart, with_stats=self.training, log=self.log)
            if not is_main():
                return None
            if inputs.stats is not None:  # for fine-tuning as well
                inputs.stats.save(run.path / "statistics")
        with self.clock.stage("plan"):
            planned = self.search.find(inputs)
            self._write_plan(planned)
            self._log_plan(planned)
            if inputs.patches is not None:
                rows = curve_rows(planned.plan.channel_map, planned.curves(inputs.patches))
                write_csv(run.path / "sensitivity.csv", rows, CURVE_COLUMNS)
            keep_plan(run, planned)
        return planned

    def _write_plan(self, planned: Planned) -> None:
        """Write a plan into the run's folder, with its scores, locks and groups."""
        folder, plan = self.run.path, planned.plan
        plan.save(folder)
        write_csv(folder / "scores.csv", score_rows(plan, planned.scores), results.SCORE_COLUMNS)
        write_csv(folder / "locks.csv", lock_rows(plan), results.LOCK_COLUMNS)
        write_csv(folder / "coupling.csv", coupling_rows(plan), results.COUPLING_COLUMNS)

    def _log_plan(self, planned: Planned) -> None:
        chart = planned.plan.channel_map
        left = chart.macs(planned.plan.keep) / chart.macs()
        self.log(
            f"plan: {left:.1%} of the MACs left, {planned.plan.removed} of {chart.n_labels - 1} channels removed; "
            f"masked == compact in the trial to {planned.max_relative_difference:.1e}"
        )
        for text in planned.locked_by_trial:
            self.log(f"plan: locked after the trial: {text}")
        for text in planned.unseen:
            self.log(f"plan: {text}")

    def _measure(self, trained: _Trained, planned: Planned, small: nn.Module, proof: Verification) -> dict[str, Any]:
        """Return the stages after training, and the metrics."""
        dense, plan, schedule = trained.dense, planned.plan, trained.schedule
        save_weights(self.run.path / "checkpoints" / "dense.safetensors", dense)
        with self.clock.stage("deploy"):
            deployed = deploy(self.prepared, self.run, dense, plan)
        with self.clock.stage("measure"):
            share = sparsity(trained.pruned, plan)
            ready = None if deployed is None else deployed.model
            attempt = results.Attempts(self.log)
            target = self.search.latency
            final = None if target is None else attempt("time", lambda: self._deliver(dense, planned))
            models = dense, trained.control, ready
            measured = results.measure(self.prepared, self.run, *models, attempt=attempt, final=final)
            masks = attempt("activation masks", lambda: self._measure_activations(small))
            measured = replace(measured, activations=masks, failures=tuple(attempt.failures))
        metrics = results.metrics(measured, planned, proof, share, self.prepared, self.clock.stages)
        metrics |= {**trained.trainings.summary(), "corrupt_images": self.prepared.splits.corrupt}
        metrics |= {
            "fine_tuned": self.training,
            "repair": repair_summary(trained.report),
            "resumed": len(self.run.resumed),
            "compacted_early": trained.early,
        }
        metrics |= {"schedule": None if schedule is None else schedule.summary()}
        metrics |= {"deployment": None if deployed is None else deployed.figures()}
        if target is not None and final is not None:
            metrics |= {"profile": target.profile.summary(), "delivered": final.summary()}
            metrics["shortfalls"] += final.shortfalls
        write_json(self.run.path / "metrics.json", metrics)
        write_summary(self.run, self.job, self.search.channel_map, plan, (dense, small), metrics)
        if metrics["corrupt_images"]:
            self.log(f"data: {describe_corrupt(metrics['corrupt_images'])}")
        for shortfall in metrics["shortfalls"]:
            self.log(f"shortfall: {shortfall}")
        return metrics

    def _sparsified(self, dense: nn.Module, plan: Plan | None, trainings: Trainings) -> nn.Module:
        """Return the dense model after the job's `sparsify`: asked for before there is a plan, and again with it."""
        settings = self.job.sparsify
        if settings is None or not self.training or needs_plan(settings) != (plan is not None):
            return dense
        chart = self.search.channel_map if plan is None else plan.channel_map
        self.log(f"sparsify: {settings.regularize and settings.regularize.method}, epochs: {settings.epochs}")
        with self.clock.stage("sparsify"):
            return trainings.train("sparsified", copied(dense), settings, chart=chart, removed=plan)

    def _deliver(self, dense: nn.Module, planned: Planned) -> LatencyResult:
        """Return what counts for budgets of time: the model as its folder gives it, the deployed one where there is
        one.
        """
        folder = FOLDER if self.job.deploy.wanted else "model"
        handed_over = load(self.run.path / folder, None if self.prepared.build else dense)
        return self.search.deliver(planned, handed_over)

    def _measure_activations(self, small: nn.Module) -> dict[str, Any] | None:
        """With thresholds found anew: training has changed what they were found for."""
        thresholds = find_thresholds(self.prepared, small, log=self.log)
        if thresholds is None:
            return None
        thresholds.save(self.run.path / "activation_thresholds.json")
        return measure_masks(self.prepared, small, thresholds, log=self.log)

    def _compact(self, pruned: nn.Module, dense: nn.Module, plan: Plan) -> tuple[nn.Module, Verification]:
        cut = compact(pruned, plan)
        validation = self.prepared.splits.validation
        spread = torch.linspace(0, len(validation) - 1, min(PROOF_IMAGES, len(validation))).long()
        held_out = batches(validation, 32, shuffle_seed=None, indices=spread)
        proof = verify(pruned, cut, plan, (inputs_as_example(pruned, inputs) for inputs, _ in held_out), strict=True)
        self.log(
            f"verify: masked == compact to {proof.max_relative_difference:.1e} on {proof.inputs} "
            f"{self.prepared.splits.task.samples} ({proof.dtype})"
        )
        flushed = without_subnormals(cut, self.prepared.example_inputs)
        small = flushed.model
        for remark in (*flushed.notes, *remarks(small)):
            self.log(f"compact: {remark}")
        save(
            small,
            self.run.path / "model",
            plan,
            build=self.prepared.build,
            extra={"classes": list(self.prepared.splits.classes)},
        )
        write_csv(self.run.path / "layers.csv", layer_rows(dense, small, plan))
        return small, proof


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
    """Train or load the dense model, calibrates, plans, fine-tunes under masks, compacts, verify and measure.

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


MEASURES = (
    "dry run: a budget of time is planned for by a profile of the target: what of its {} networks is not in the cache "
    "is timed now, which takes minutes; --no-measure (measure=False) predicts instead"
)
BY_MACS = (
    "the speedup is taken for one of multiply-accumulates, because the target was not profiled: that is off by up to a "
    "factor of two, mostly to the slow side (small layers, memory, fixed costs); `prunekit profile RECIPE` measures it"
)


def dry_run(job: JobSettings, *, log: Log = stage, own: Own = RECIPE_ONLY, measure: bool = True) -> dict[str, Any]:
    """Plan a job without training: data, model, budget and globs are checked, and the widths shown.

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
    search = PlanSearch.trace(prepared.model, prepared.example_inputs, job.prune, log=log)
    search = _within_reach(search, prepared) if measure or not timely else _predicted(search, prepared)
    profile = None if search.latency is None else search.latency.profile
    known = None if profile is None else "; ".join([profile.accuracy, *profile.notes])
    time = known or (BY_MACS if timely else None)
    if time is not None and not measure:
        log(f"dry run: nothing is measured: {time}")
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
        "groups": len(settled.groups),
        "locks": len(settled.locks),
        "max_relative_difference": planned.max_relative_difference,
        "widths": layer_rows(prepared.model, planned.compact, planned.plan),
    }


def _within_reach(search: PlanSearch, prepared: Prepared) -> PlanSearch:
    """Return the search with a profile of the target, once its budgets are known to be within reach."""
    search = search.with_profile(transform_of(search.model, search.examples[0], prepared.job.deploy))
    search.require_reachable()
    return search


def _predicted(search: PlanSearch, prepared: Prepared) -> PlanSearch:
    """Return the search with what was profiled before, else with a budget of MACs in the place of a speedup.

    Measures nothing, and refuses nothing: what is out of reach is said to be so by prediction.
    """
    transform = transform_of(search.model, search.examples[0], prepared.job.deploy)
    try:
        search = search.with_profile(transform, measure=False)
    except NotMeasuredError as error:
        search.log(f"profile: {error}")
        return replace(search, settings=by_macs(search.settings))
    target = search.latency
    if target is not None and target.least_share > 1 - DOUBT:
        fastest = f"the fastest plan is predicted to take {target.least_share:.2f} of the time asked for"
        search.log(f"latency: budget {target.in_words}: {fastest}; a run measures whether it can be had")
    return search


def by_macs(settings: PruneSettings) -> PruneSettings:
    """Return settings with a budget of multiply-accumulates in the place of a speedup: as if time fell as they do.

    Raises:
        UsageError: milliseconds are asked for, of which they say nothing.
    """
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
    return replace(in_blocks(settings), budget=budget)

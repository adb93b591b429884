"""The stages of a job, in order: dense model, calibration, plan, repair, fine-tuning, proof, measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from prunekit.artifacts import write_csv, write_json
from prunekit.channels.copying import copied
from prunekit.compaction import compact, load, remarks, save
from prunekit.data import batches, describe_corrupt
from prunekit.deploy import without_subnormals
from prunekit.distributed.exchange import from_main
from prunekit.distributed.group import is_main
from prunekit.inputs import arguments
from prunekit.masking import sparsity
from prunekit.measure.verify import Verification, verify
from prunekit.planning import Plan
from prunekit.repair import RepairReport
from prunekit.training import needs_plan
from prunekit.workflow import results
from prunekit.workflow.activations import find_thresholds, measure_masks
from prunekit.workflow.agreeing import require_same_plan, share_plan
from prunekit.workflow.calibrate import criterion_inputs
from prunekit.workflow.dense import save_weights, train_baseline
from prunekit.workflow.deploying import FOLDER, deploy
from prunekit.workflow.finetuning import Finetuning
from prunekit.workflow.kept import Clock, keep_plan, kept_plan
from prunekit.workflow.latency_target import LatencyResult
from prunekit.workflow.plan_search import Planned, PlanSearch
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.repairing import repair_model, repair_summary
from prunekit.workflow.runs import RunFolder
from prunekit.workflow.scheduling import JobSchedule
from prunekit.workflow.tables import CURVE_COLUMNS, coupling_rows, curve_rows, layer_rows, lock_rows, score_rows
from prunekit.workflow.trainings import OnEpoch, Trainings, checkpoints_of, told
from prunekit.workflow.watching import watching, write_summary

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
        """Runs every stage and returns the metrics; the processes of a group go together."""
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
        """The plan within the job's budgets, written into the run's folder or read there; in the main process alone.

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
        """The stages after training, and the metrics."""
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
        """The dense model after the job's `sparsify`: asked for before there is a plan, and again with it."""
        settings = self.job.sparsify
        if settings is None or not self.training or needs_plan(settings) != (plan is not None):
            return dense
        chart = self.search.channel_map if plan is None else plan.channel_map
        self.log(f"sparsify: {settings.regularize and settings.regularize.method}, epochs: {settings.epochs}")
        with self.clock.stage("sparsify"):
            return trainings.train("sparsified", copied(dense), settings, chart=chart, removed=plan)

    def _deliver(self, dense: nn.Module, planned: Planned) -> LatencyResult:
        """What counts for budgets of time: the model as its folder gives it, the deployed one where there is one."""
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
        proof = verify(pruned, cut, plan, (arguments(pruned, inputs) for inputs, _ in held_out), strict=True)
        self.log(
            f"verify: masked == compact to {proof.max_relative_difference:.1e} on {proof.inputs} "
            f"{self.prepared.splits.task.samples} ({proof.dtype})"
        )
        flushed = without_subnormals(cut, self.prepared.example_inputs)
        small = flushed.model
        for note in (*flushed.notes, *remarks(small)):
            self.log(f"compact: {note}")
        save(
            small,
            self.run.path / "model",
            plan,
            build=self.prepared.build,
            extra={"classes": list(self.prepared.splits.classes)},
        )
        write_csv(self.run.path / "layers.csv", layer_rows(dense, small, plan))
        return small, proof

"""The main job: from a recipe's settings to a smaller, faster, proven model and a folder full of evidence."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from prunekit.artifacts import write_json
from prunekit.channels import ChannelMap, trace
from prunekit.compaction import compact, save
from prunekit.context import threads
from prunekit.data import batches, describe_corrupt
from prunekit.masking import masked, sparsity
from prunekit.measure.verify import Verification, verify
from prunekit.planning import Plan
from prunekit.training import ClampRow, EpochRow, History, fit, recalibrate_batchnorm
from prunekit.workflow import results
from prunekit.workflow.activations import find_thresholds, masks, measure_masks
from prunekit.workflow.calibrate import calibrate_model, calibration_batches, loss_gradients
from prunekit.workflow.dense import Prepared, prepare, save_weights, train_baseline
from prunekit.workflow.own import RECIPE_ONLY, Own
from prunekit.workflow.pruning import Planned, feasible, plan_model
from prunekit.workflow.runs import Log, RunFolder, run_folder
from prunekit.workflow.settings import JobSettings
from prunekit.workflow.tables import (
    clamp_rows,
    clamp_summary,
    coupling_rows,
    history_rows,
    layer_rows,
    lock_rows,
    score_rows,
    write_csv,
)

PROOF_IMAGES = 512
"""Held-out images that masked and compact model are compared on at the end, in float64."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """A finished run.

    Attributes:
        folder: everything it wrote; the compact model is in `folder / "model"`.
        metrics: what `metrics.json` holds.
    """

    folder: Path
    metrics: dict[str, Any]


@dataclass
class _Clock:
    """Seconds of each stage of a run."""

    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - start


def finetune(
    job: JobSettings,
    *,
    log: Log,
    progress: bool = False,
    resolved: str = "",
    finish: Callable[[Path], object] | None = None,
    own: Own = RECIPE_ONLY,
) -> RunResult:
    """Trains or loads the dense model, calibrates, plans, fine-tunes under masks, compacts, verifies and measures.

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
    prepared = prepare(job, own)
    chart = trace(prepared.model, prepared.example_inputs)  # of the structure: training does not change it
    feasible(chart, job.prune)
    with run_folder(job.output, job.name, log, resolved) as run, threads(job.threads):
        metrics = _Journey(prepared, chart, run, progress).travel()
        if finish is not None:
            finish(run.path)
    return RunResult(run.path, metrics)


class _Journey:
    """The stages of one run, in order."""

    def __init__(self, prepared: Prepared, chart: ChannelMap, run: RunFolder, progress: bool) -> None:
        self.prepared, self.chart, self.run, self.progress = prepared, chart, run, progress
        self.job, self.log = prepared.job, run.log
        self.clock = _Clock()
        self.history: list[dict[str, Any]] = []
        self.clamps: list[dict[str, Any]] = []

    def travel(self) -> dict[str, Any]:
        """Runs every stage and returns the metrics."""
        with self.clock.stage("baseline"):
            baseline = train_baseline(self.prepared, log=self.log, progress=self.progress)
        dense = baseline.model
        self._note("baseline", baseline.rows, baseline.clamps)
        with self.clock.stage("calibrate"):
            calibration = calibrate_model(self.prepared, dense, log=self.log)
            calibration.stats.save(self.run.path / "statistics")
            gradients = loss_gradients(self.prepared, dense, log=self.log)
        with self.clock.stage("plan"):
            planned = plan_model(
                dense,
                self.prepared.example_inputs,
                self.job.prune,
                stats=calibration.stats,
                gradients=gradients,
                seed=self.job.seed,
                channel_map=self.chart,
            )
            self._keep_plan(planned)
        plan = planned.plan
        with self.clock.stage("fine-tune"):
            pruned = self._finetune_masked(dense, plan)
        small, proof = self._compact(pruned, plan)
        write_csv(self.run.path / "layers.csv", layer_rows(dense, small, plan))
        with self.clock.stage("control"):
            control = self._train("control", copy.deepcopy(dense))
        save_weights(self.run.path / "checkpoints" / "dense.safetensors", dense)
        with self.clock.stage("measure"):
            share = sparsity(pruned, plan)
            measured = results.measure(self.prepared, self.run, dense, control, log=self.log)
            measured = replace(measured, activations=self._measure_activations(small))
        metrics = results.metrics(measured, planned, proof, share, self.job, self.clock.stages)
        metrics |= {"clamps": clamp_summary(self.clamps), "corrupt_images": self.prepared.splits.corrupt}
        write_json(self.run.path / "metrics.json", metrics)
        if metrics["corrupt_images"]:
            self.log(f"data: {describe_corrupt(metrics['corrupt_images'])}")
        for shortfall in metrics["shortfalls"]:
            self.log(f"shortfall: {shortfall}")
        return metrics

    def _keep_plan(self, planned: Planned) -> None:
        planned.plan.save(self.run.path)
        write_csv(self.run.path / "scores.csv", score_rows(planned.plan, planned.scores), results.SCORE_COLUMNS)
        write_csv(self.run.path / "locks.csv", lock_rows(planned.plan), results.LOCK_COLUMNS)
        write_csv(self.run.path / "coupling.csv", coupling_rows(planned.plan), results.COUPLING_COLUMNS)
        chart = planned.plan.channel_map
        left = chart.macs(planned.plan.keep) / chart.macs()
        self.log(
            f"plan: {left:.1%} of the MACs left, {planned.plan.removed} of {chart.n_labels - 1} channels removed; "
            f"masked == compact in the trial to {planned.max_relative_difference:.1e}"
        )
        for text in planned.locked_by_trial:
            self.log(f"plan: locked after the trial: {text}")

    def _finetune_masked(self, dense: nn.Module, plan: Plan) -> nn.Module:
        model = copy.deepcopy(dense).to(self.prepared.device)
        with masked(model, plan):
            recalibrate_batchnorm(model, calibration_batches(self.prepared), self.prepared.device)
        thresholds = find_thresholds(self.prepared, compact(model, plan), log=self.log)
        share = sparsity(model, plan)
        self.log(f"fine-tune: {share.channels:.1%} of the channels masked, epochs: {self.job.finetune.epochs}")

        @contextmanager
        def wrap(optimizer: Optimizer) -> Iterator[None]:
            with masked(model, plan, optimizer), masks(model, thresholds):
                yield

        return self._train("pruned", model, wrap, lambda: {"sparsity": f"{sparsity(model, plan).weights:.1%}"})

    def _train(
        self,
        name: str,
        model: nn.Module,
        wrap: Callable[[Optimizer], AbstractContextManager[Any]] | None = None,
        describe: Callable[[], dict[str, str]] | None = None,
    ) -> nn.Module:
        """Fine-tunes a model: the pruned one and its dense control get the same settings, seed and epochs."""
        history: History = fit(
            model,
            self.prepared.splits,
            self.job.finetune,
            device=self.prepared.device,
            seed=self.job.seed,
            batch=self.job.data.batch,
            workers=self.job.data.workers,
            wrap_optimizer=wrap,
            describe=describe,
            progress=self.progress,
            label=name,
            checkpoint=self.run.path / "checkpoints" / f"{name}.safetensors",
        )
        self._note(name, history.rows, history.clamps)
        return model.cpu()

    def _measure_activations(self, small: nn.Module) -> dict[str, Any] | None:
        """With thresholds found anew: training has changed what they were found for."""
        thresholds = find_thresholds(self.prepared, small, log=self.log)
        if thresholds is None:
            return None
        thresholds.save(self.run.path / "activation_thresholds.json")
        return measure_masks(self.prepared, small, thresholds, log=self.log)

    def _note(self, name: str, rows: tuple[EpochRow, ...], clamps: tuple[ClampRow, ...]) -> None:
        skipped = sum(row.skipped for row in rows)
        if skipped:
            self.log(f"{name}: steps skipped: {skipped} (overflowing float16 gradients, or batches without images)")
        self.clamps += clamp_rows(name, clamps)
        if self.clamps:
            write_csv(self.run.path / "clamps.csv", self.clamps)
        self.history += history_rows(name, rows)
        write_csv(self.run.path / "history.csv", self.history, ("run", *EpochRow.__dataclass_fields__))
        results.write_events(self.run.path / "tensorboard" / name, rows)

    def _compact(self, pruned: nn.Module, plan: Plan) -> tuple[nn.Module, Verification]:
        small = compact(pruned, plan)
        validation = self.prepared.splits.validation
        spread = torch.linspace(0, len(validation) - 1, min(PROOF_IMAGES, len(validation))).long()
        held_out = batches(validation, 32, shuffle_seed=None, indices=spread)
        proof = verify(pruned, small, plan, ((images,) for images, _ in held_out))
        self.log(
            f"verify: masked == compact to {proof.max_relative_difference:.1e} on {proof.inputs} images ({proof.dtype})"
        )
        save(
            self.run.path / "model",
            small,
            plan,
            input_shapes=[[1, *self.prepared.splits.sample_shape]],
            build=self.prepared.build,
            extra={"classes": list(self.prepared.splits.classes)},
        )
        return small, proof

"""The stages of a job, in order: dense model, calibration, plan, repair, fine-tuning, proof, measurement."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from prunekit.artifacts import write_json
from prunekit.channels import ChannelMap
from prunekit.compaction import compact, load, save
from prunekit.data import batches, describe_corrupt
from prunekit.deploy import flush_subnormals
from prunekit.distributed.exchange import from_main
from prunekit.distributed.group import is_main
from prunekit.masking import masked, sparsity
from prunekit.measure.verify import Verification, verify
from prunekit.planning import Plan
from prunekit.repair import RepairReport
from prunekit.training import ClampRow, EpochRow, History, Part, Training, Within, fit
from prunekit.workflow import results
from prunekit.workflow.activations import find_thresholds, masks, measure_masks
from prunekit.workflow.agreeing import require_same_plan, share_plan
from prunekit.workflow.delivered import Delivered, Frozen
from prunekit.workflow.delivering import delivered
from prunekit.workflow.dense import Prepared, save_weights, train_baseline
from prunekit.workflow.deploying import deploy
from prunekit.workflow.plan_stage import find_plan
from prunekit.workflow.profiling import Profile
from prunekit.workflow.pruning import Planned
from prunekit.workflow.repairing import repair_model, repair_summary
from prunekit.workflow.runs import RunFolder
from prunekit.workflow.tables import (
    clamp_rows,
    clamp_summary,
    history_rows,
    layer_rows,
    write_csv,
)

PROOF_IMAGES = 512
"""Held-out images that masked and compact model are compared on at the end, in float64."""


@dataclass
class _Clock:
    """Seconds of each stage of a run."""

    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - start


class Journey:
    """The stages of one run, in order.

    Args:
        prepared: what it works on.
        chart: the channel map of its model.
        run: where it writes.
        timed: the latency profile of the target, where a budget is one of time.
        progress: shows bars on stderr.
        training: whether to fine-tune, the pruned model and a dense one for comparison.
    """

    def __init__(
        self,
        prepared: Prepared,
        chart: ChannelMap,
        run: RunFolder,
        timed: Profile | None = None,
        *,
        progress: bool,
        training: bool,
    ) -> None:
        self.prepared, self.chart, self.run, self.timed = prepared, chart, run, timed
        self.progress, self.training = progress, training
        self.job, self.log = prepared.job, run.log
        self.clock = _Clock()
        self.history: list[dict[str, Any]] = []
        self.clamps: list[dict[str, Any]] = []

    def travel(self) -> dict[str, Any]:
        """Runs every stage and returns the metrics; the processes of a group go together."""
        with self.clock.stage("baseline"):
            baseline = train_baseline(self.prepared, log=self.log, progress=self.progress)
        dense = baseline.model
        self._note("baseline", baseline.rows, baseline.clamps)
        found = find_plan(
            self.prepared, dense, self.chart, self.run, self.timed, training=self.training, stage=self.clock.stage
        )
        plan = share_plan(None if found is None else found[0].plan)
        with self.clock.stage("repair"):
            pruned, report = repair_model(self.prepared, dense, plan, self.run, training=self.training)
        if self.training:
            with self.clock.stage("fine-tune"):
                pruned = self._finetune_masked(pruned, plan)
        require_same_plan(plan, "after training")
        compacted = self._compact(pruned, dense, plan) if is_main() else None
        control = None
        if self.training:
            with self.clock.stage("control"):
                control = self._train("control", copy.deepcopy(dense))

        def measured() -> dict[str, Any]:
            assert found is not None
            assert compacted is not None
            return self._measure(dense, control, pruned, *found, *compacted, report)

        return from_main(measured)

    def _measure(
        self,
        dense: nn.Module,
        control: nn.Module | None,
        pruned: nn.Module,
        planned: Planned,
        frozen: Frozen | None,
        small: nn.Module,
        proof: Verification,
        report: RepairReport | None,
    ) -> dict[str, Any]:
        """The stages after training, and the metrics."""
        plan = planned.plan
        save_weights(self.run.path / "checkpoints" / "dense.safetensors", dense)
        with self.clock.stage("deploy"):
            deployed = deploy(self.prepared, self.run, dense, plan)
        with self.clock.stage("measure"):
            share = sparsity(pruned, plan)
            ready = None if deployed is None else deployed.model
            measured = results.measure(self.prepared, self.run, dense, control, ready, log=self.log)
            measured = replace(measured, activations=self._measure_activations(small))
            final = None if frozen is None else self._measure_last(dense, frozen)
        metrics = results.metrics(measured, planned, proof, share, self.job, self.clock.stages)
        metrics |= {"clamps": clamp_summary(self.clamps), "corrupt_images": self.prepared.splits.corrupt}
        metrics |= {"fine_tuned": self.training, "repair": repair_summary(report)}
        metrics |= {"deployment": None if deployed is None else deployed.figures()}
        if self.timed is not None and final is not None:
            metrics |= {"profile": self.timed.summary(), "delivered": final.summary()}
            metrics["shortfalls"] += final.shortfalls
        write_json(self.run.path / "metrics.json", metrics)
        if metrics["corrupt_images"]:
            self.log(f"data: {describe_corrupt(metrics['corrupt_images'])}")
        for shortfall in metrics["shortfalls"]:
            self.log(f"shortfall: {shortfall}")
        return metrics

    def _finetune_masked(self, model: nn.Module, plan: Plan) -> nn.Module:
        model = model.to(self.prepared.device)
        thresholds = from_main(lambda: find_thresholds(self.prepared, compact(model, plan), log=self.log))
        share = sparsity(model, plan)
        self.log(f"fine-tune: {share.channels:.1%} of the channels masked, epochs: {self.job.finetune.epochs}")

        @contextmanager
        def under_masks(training: Training) -> Iterator[None]:
            with masked(model, plan, training.optimizer), masks(model, thresholds):
                yield

        return self._train(
            "pruned", model, Within(under_masks, lambda: {"sparsity": f"{sparsity(model, plan).weights:.1%}"})
        )

    def _train(self, name: str, model: nn.Module, *parts: Part) -> nn.Module:
        """Fine-tunes a model: the pruned one and its dense control get the same settings, seed and epochs."""
        history: History = fit(
            model,
            self.prepared.splits,
            self.job.finetune,
            device=self.prepared.device,
            seed=self.job.seed,
            batch=self.job.data.batch,
            workers=self.job.data.workers,
            parts=parts,
            progress=self.progress,
            label=name,
            checkpoint=self.run.path / "checkpoints" / f"{name}.safetensors",
        )
        self._note(name, history.rows, history.clamps)
        return model.cpu()

    def _measure_last(self, dense: nn.Module, frozen: Frozen) -> Delivered:
        """What counts for budgets of time: the model as its folder gives it, in a fresh process."""
        pruned = load(self.run.path / "model", None if self.prepared.build else dense)
        shape = self.prepared.splits.sample_shape
        return delivered(frozen, dense, pruned, shape, self.job.prune, log=self.log)

    def _measure_activations(self, small: nn.Module) -> dict[str, Any] | None:
        """With thresholds found anew: training has changed what they were found for."""
        thresholds = find_thresholds(self.prepared, small, log=self.log)
        if thresholds is None:
            return None
        thresholds.save(self.run.path / "activation_thresholds.json")
        return measure_masks(self.prepared, small, thresholds, log=self.log)

    def _note(self, name: str, rows: tuple[EpochRow, ...], clamps: tuple[ClampRow, ...]) -> None:
        if not is_main():
            return
        skipped = sum(row.skipped for row in rows)
        if skipped:
            self.log(f"{name}: steps skipped: {skipped} (overflowing float16 gradients, or batches without images)")
        self.clamps += clamp_rows(name, clamps)
        if self.clamps:
            write_csv(self.run.path / "clamps.csv", self.clamps)
        self.history += history_rows(name, rows)
        write_csv(self.run.path / "history.csv", self.history, ("run", *EpochRow.__dataclass_fields__))
        results.write_events(self.run.path / "tensorboard" / name, rows)

    def _compact(self, pruned: nn.Module, dense: nn.Module, plan: Plan) -> tuple[nn.Module, Verification]:
        flushed = flush_subnormals(compact(pruned, plan), self.prepared.example_inputs)
        small = flushed.model
        if flushed.counts:
            self.log(f"compact: {flushed}")
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
        write_csv(self.run.path / "layers.csv", layer_rows(dense, small, plan))
        return small, proof

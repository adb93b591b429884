"""The training runs of a job: how each is made from settings, and what is written down of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from prunekit.artifacts import write_csv
from prunekit.channels import ChannelMap
from prunekit.channels.copying import copied
from prunekit.distributed.group import is_main
from prunekit.planning import Plan
from prunekit.settings.job import JobSettings
from prunekit.training import (
    Checkpoints,
    ClampRow,
    Compilation,
    Distillation,
    EpochRow,
    FlowRow,
    GradientFlow,
    LearningRateRewinding,
    LeftRun,
    Part,
    PlanInForce,
    Sources,
    TrainSettings,
    asked_parts,
    fit,
)
from prunekit.training.history import columns
from prunekit.training.loop import never
from prunekit.workflow.dense import Baseline
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.runs import RunFolder, StoppedByCaller
from prunekit.workflow.tables import clamp_rows, clamp_summary, history_rows
from prunekit.workflow.watching import watched_before, watching


def checkpoints_of(run: RunFolder, job: JobSettings, name: str, **facts: str) -> Checkpoints | None:
    """Where one of a job's trainings goes on from; None where the job wants no checkpoints."""
    if job.checkpoint is None:
        return None

    def log(message: str) -> None:
        run.log(f"{name}: {message}")

    return Checkpoints(run.resume / name, job.checkpoint, facts=facts, log=log)


OnEpoch = Callable[[dict[str, Any]], object]
"""Told of an epoch as plain values: a row of `history.csv`, and `epochs`, how many there are of this training."""


def told(on_epoch: OnEpoch | None, name: str, settings: TrainSettings | None) -> Callable[[EpochRow], None] | None:
    """What tells a caller's function of the epochs of a training, in the main process; None without one.

    Args:
        name: of the training.
        settings: its own.
    """
    if on_epoch is None or settings is None or not is_main():
        return None

    def tell(row: EpochRow) -> None:
        try:
            on_epoch({"run": name, "epochs": settings.epochs, **row.figures()})
        except Exception as error:
            raise StoppedByCaller(error) from error

    return tell


class Trainings:
    """Trains models of a job and keeps the tables of all runs up to date.

    Args:
        prepared: what the job works on.
        run: where it writes.
        progress: shows bars on stderr.
        baseline: the dense model, which teaches where settings say `distill`.
        on_epoch: told of each epoch.
    """

    def __init__(
        self, prepared: Prepared, run: RunFolder, baseline: Baseline, *, progress: bool, on_epoch: OnEpoch | None = None
    ) -> None:
        self._prepared, self._run, self._progress, self._on_epoch = prepared, run, progress, on_epoch
        self._job, self._log, self._teacher = prepared.job, run.log, baseline.model
        self._history: list[dict[str, Any]] = []
        self._clamps: list[dict[str, Any]] = []
        self._flow: list[dict[str, Any]] = []
        self._teaching: dict[str, dict[str, float]] = {}
        self._compiled: dict[str, dict[str, Any]] = {}
        self._chosen: dict[str, dict[str, Any]] = {}
        self.left: LeftRun | None = None
        self._note("baseline", baseline.rows, baseline.clamps, baseline.compilation)
        if baseline.reused:
            watched_before(run, prepared.job, "baseline", baseline.rows)

    def summary(self) -> dict[str, Any]:
        """What `metrics.json` holds of them."""
        return {
            "clamps": clamp_summary(self._clamps),
            "teacher": self._teaching or None,
            "compiled": self._compiled or None,
            "trainings": self._chosen,
        }

    def control(self, dense: nn.Module) -> nn.Module:
        """The dense model after as much training as the pruned one had, with the same settings but no regularizer."""
        model = copied(dense)
        if self._job.sparsify is not None:
            model = self.train("control_before", model, replace(self._job.sparsify, regularize=None))
        return self.train("control", model, replace(self._job.finetune, regularize=None), *self.rewinding())

    def rewinding(self) -> list[Part]:
        """What the pruned model and its control share of a schedule."""
        schedule = self._job.prune.schedule
        return [] if schedule is None else [LearningRateRewinding(schedule)]

    def train(
        self,
        name: str,
        model: nn.Module,
        settings: TrainSettings,
        *parts: Part,
        masks: PlanInForce = lambda: None,
        chart: ChannelMap | None = None,
        removed: Plan | None = None,
        cut: Plan | None = None,
        until: Callable[[], bool] = never,
        begin: LeftRun | None = None,
    ) -> nn.Module:
        """Trains a model in place; it is on the CPU afterwards.

        Args:
            name: of the run, in tables, logs and file names.
            parts: entered before those that the settings ask for.
            masks, chart, removed, cut: see `Sources`.
            until, begin: see `fit`. Where a run was left is then in `left`, and tables have the whole when it goes on.
        """
        sources = Sources(self._prepared.splits, self._job.data.batch, self._teacher, chart, removed, masks, cut)
        asked = asked_parts(settings, sources)
        plan = cut or (masks() if removed is None else removed)
        facts = {} if plan is None else {"plan": plan.digest}
        flows = [GradientFlow()] if self._job.gradient_flow and settings.epochs else []
        history = fit(
            model,
            self._prepared.splits,
            settings,
            device=self._prepared.device,
            seed=self._job.seed,
            batch=self._job.data.batch,
            workers=self._job.data.reading,
            parts=[*watching(self._run, self._job, name, lambda: cut or masks()), *parts, *asked, *flows],
            own_optimizer=self._prepared.optimizer_for(settings),
            progress=self._progress,
            label=name,
            on_epoch=told(self._on_epoch, name, settings),
            checkpoint=self._run.path / "checkpoints" / f"{name}.safetensors",
            checkpoints=checkpoints_of(self._run, self._job, name if begin is None else f"{name}-compact", **facts),
            until=until,
            begin=begin,
        )
        self.left = history.left
        if self.left is not None:
            return model.cpu()
        self._note(name, history.rows, history.clamps, history.compilation)
        chosen = next((row for row in history.rows if row.epoch == history.best_epoch), None)
        reached = None if chosen is None else chosen.validation_score
        self._chosen[name] = {"epochs": len(history.rows), "best_epoch": history.best_epoch, "validation": reached}
        for flow in flows:
            self._flow += [{"run": name, **asdict(row)} for row in flow.records()]
            write_csv(self._run.path / "gradients.csv", self._flow, ("run", *FlowRow.__dataclass_fields__))
        for part in asked:
            if isinstance(part, Distillation):
                cost = part.cost
                self._teaching[name] = asdict(cost)
                self._log(f"{name}: the teacher took {cost.seconds:.1f} s, {cost.step_share:.1%} of the training steps")
        return model.cpu()

    def _note(
        self, name: str, rows: tuple[EpochRow, ...], clamps: tuple[ClampRow, ...], compilation: Compilation | None
    ) -> None:
        if compilation is not None:
            self._compiled[name] = asdict(compilation)
            self._log(f"{name}: {compilation}")
        skipped = sum(row.skipped for row in rows)
        if skipped:
            self._log(f"{name}: steps skipped: {skipped} (overflowing float16 gradients, or batches without images)")
        self._clamps += clamp_rows(name, clamps)
        if self._clamps:
            write_csv(self._run.path / "clamps.csv", self._clamps)
        self._history += history_rows(name, rows)
        score = self._prepared.splits.task.main.name
        write_csv(self._run.path / "history.csv", self._history, ("run", *columns(score)))

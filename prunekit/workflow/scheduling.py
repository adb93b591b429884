"""A job's schedule: a part of its fine-tuning, and what the run's folder gets of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import nn

from prunekit.artifacts import write_csv
from prunekit.channels import ChannelMap
from prunekit.compaction import compact
from prunekit.distributed.exchange import from_main
from prunekit.errors import UsageError
from prunekit.measure.verify import verify
from prunekit.planning import Plan, PruneSettings
from prunekit.planning.schedule import Timeline, timeline
from prunekit.planning.select import Scores
from prunekit.settings.pruning import WITH_REPAIR, clashes
from prunekit.training import PlanChange, PruningSchedule, steps_per_epoch
from prunekit.workflow.plan_search import Planned
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.recalibrating import calibrate_again
from prunekit.workflow.runs import Log, RunFolder
from prunekit.workflow.stages import Evidence, Seen, StagePlanner, final_shares

COLUMNS = ("step", "epoch", "resource", "planned", "actual", "pruned", "regrown")


def require_schedule(prepared: Prepared, *, training: bool) -> Timeline | None:
    """Checks a job's schedule before anything is written; None without one.

    Raises:
        UsageError: it does not fit the rest of the job, or nothing is trained.
    """
    job = prepared.job
    settings = job.prune.schedule
    if settings is None:
        return None
    if not training:
        raise UsageError(
            "prune.schedule prunes while the model is fine-tuned, which this command does not do: "
            "run `prunekit finetune`, or set prune.schedule=null"
        )
    if job.repair is not None:
        raise UsageError(f"repair: {WITH_REPAIR}")
    problems = [f"{'.'.join(('prune', *path))}: {text}" for path, text in clashes(asdict(job.prune))]
    if problems:
        raise UsageError("; ".join(problems))
    steps = steps_per_epoch(job.finetune, len(prepared.splits.train), job.data.batch)
    return timeline(settings, epochs=job.finetune.epochs, steps=steps)


class JobEvidence(Evidence):
    """Of a job: its calibration images, seen again at each stage."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def seen(self, model: nn.Module) -> Seen:
        """Statistics and Taylor terms of the model as it is now, where the criterion needs them."""
        return calibrate_again(self._prepared, model)


class JobSchedule:
    """A job's schedule as a part of its fine-tuning, with what the run's folder gets of it.

    Args:
        plan: on the dense model; the final one where a budget is one of time.
        scores: that it was made by; None elsewhere than in the main process.
    """

    def __init__(self, prepared: Prepared, plan: Plan, scores: Scores | None, run: RunFolder) -> None:
        self._prepared, self._run = prepared, run
        settings = prepared.job.prune.schedule
        assert settings is not None
        self.settings = settings
        chart: ChannelMap = plan.channel_map
        evidence, seed = JobEvidence(prepared), prepared.job.seed
        self.planner = StagePlanner(prepared.job.prune, plan, scores, evidence, seed=seed)
        self.start = Plan(chart, np.ones(chart.n_labels, dtype=bool))
        self.part = PruningSchedule(settings, self.start, self.planner, self._changed)

    def in_force(self) -> Plan:
        """The plan that masks the model now."""
        return self.part.plan

    def _changed(self, part: PruningSchedule) -> None:
        from_main(lambda: self._note(part))

    def _note(self, part: PruningSchedule) -> None:
        """Notes a change; the final masks are proven at once, before anything is trained under them."""
        steps = part.timeline.steps
        rows = [row for change in part.changes for row in change_rows(change, steps)]
        write_csv(self._run.path / "schedule.csv", rows, COLUMNS)
        _log_change(part.changes[-1], steps, self._run.log)
        if part.settled():
            small = compact(part.model, part.plan)
            proof = verify(part.model, small, part.plan, [self._prepared.example_inputs], strict=True)
            self._run.log(f"schedule: final masks; masked == compact to {proof.max_relative_difference:.1e}")

    def finished(self, planned: Planned) -> Planned:
        """The plan that training ended with, in place of the one on the dense model."""
        return replace(planned, plan=self.part.plan, scores=self.planner.scores)

    def summary(self) -> dict[str, Any]:
        """For `metrics.json`: what the curve was."""
        line = self.part.timeline
        return {
            "settings": asdict(self.settings),
            "steps_per_epoch": line.steps,
            "epochs": line.epochs,
            "final": self.planner.final,
            "changes": len(self.part.changes),
        }


def change_rows(change: PlanChange, steps: int) -> Iterator[dict[str, Any]]:
    """A row for each resource."""
    for resource, (planned, actual) in change.shares.items():
        row = {"step": change.step, "epoch": change.step / steps, "resource": resource, "planned": planned}
        yield row | {"actual": actual, "pruned": change.pruned, "regrown": change.regrown}


def _log_change(change: PlanChange, steps: int, log: Log) -> None:
    left = ", ".join(f"{actual:.1%} of {name}" for name, (_, actual) in change.shares.items())
    back = f", {change.regrown} came back" if change.regrown else ""
    log(f"schedule: epoch {change.step / steps:.2f}: {left} left; {change.pruned} channels pruned{back}")


def schedule_rows(settings: PruneSettings, line: Timeline, plan: Plan) -> dict[str, Any]:
    """What a dry run says: each stage with the shares that it leaves of the dense model."""
    assert settings.schedule is not None
    return {
        "kind": settings.schedule.kind,
        "steps_per_epoch": line.steps,
        "stages": list(line.rows(final_shares(plan))),
    }

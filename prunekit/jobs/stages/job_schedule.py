"""A job's pruning schedule: checked before anything is written, carried out in its fine-tuning, and logged."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from prunekit.compaction.compact_model import compact
from prunekit.distributed.process_group import computed_by_main
from prunekit.errors import UsageError
from prunekit.jobs.run.job_subject import JobSubject
from prunekit.jobs.run.run_folder import RunFolder
from prunekit.jobs.stages.calibration_stage import JobStatistics
from prunekit.masks.scheduled_masks import PlanChange
from prunekit.measure.verification import verify
from prunekit.planning.candidates import Scores
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import Timeline, timeline
from prunekit.pruning.pattern_zeros import RESOURCE, schedule_planner
from prunekit.pruning.plan_search import Planned, library_of
from prunekit.pruning.schedule_planner import ChannelPlanner, final_shares
from prunekit.settings.pruning import WITH_REPAIR, PruneSettings, prune_contradictions
from prunekit.training.callbacks.pruning_schedule import PruningSchedule, steps_per_epoch
from prunekit.utils.display import shares_left
from prunekit.utils.files import write_csv
from prunekit.utils.progress import Log

COLUMNS = ("step", "epoch", "resource", "planned", "actual", "pruned", "regrown")


def require_schedule(prepared: JobSubject, *, training: bool) -> Timeline | None:
    """Return the timeline of a job's schedule, None without one, before anything is written."""
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
    problems = [f"{'.'.join(('prune', *path))}: {text}" for path, text in prune_contradictions(asdict(job.prune))]
    if problems:
        raise UsageError("; ".join(problems))
    steps = steps_per_epoch(job.finetune, len(prepared.splits.train), job.data.batch)
    return timeline(settings, epochs=job.finetune.epochs, steps=steps)


class JobSchedule:
    """A job's schedule as a callback of its fine-tuning, which writes `schedule.csv`.

    It starts from a plan of the dense model, which is the final one if a budget is one of time, and its scores, which
    the main process alone has.
    """

    def __init__(self, prepared: JobSubject, plan: Plan, scores: Scores | None, run: RunFolder) -> None:
        self._prepared, self._run = prepared, run
        prune, example, chart = prepared.job.prune, prepared.example_inputs, plan.channel_map
        assert prune.schedule is not None
        self.settings = prune.schedule
        library, statistics = library_of(prepared.model, (example,), prune), JobStatistics(prepared)
        channels = ChannelPlanner(prune, plan, scores, statistics, seed=prepared.job.seed, library=library)
        self.planner = schedule_planner(prune, channels, prepared.model, example, plan)
        self.start = Plan(chart, np.ones(chart.n_labels, dtype=bool))
        self.part = PruningSchedule(self.settings, self.start, self.planner, self._changed)

    def in_force(self) -> Plan:
        """Return the plan that masks the model now."""
        return self.part.plan

    @computed_by_main
    def _changed(self, part: PruningSchedule) -> None:
        """Log a change of the plan, and verify final masks before anything is trained under them."""
        steps = part.timeline.steps
        rows = [row for change in part.changes for row in change_rows(change, steps)]
        write_csv(self._run.path / "schedule.csv", rows, COLUMNS)
        _log_change(part.changes[-1], steps, self._run.log)
        if part.masks.is_final:
            small = compact(part.model, part.plan)
            proof = verify(part.model, small, part.plan, [self._prepared.example_inputs], strict=True)
            self._run.log(f"schedule: final masks; masked == compact to {proof.max_relative_difference:.1e}")

    def finished(self, planned: Planned) -> Planned:
        """Return the search's result with the plan that training ended with."""
        return replace(planned, plan=self.part.plan, scores=self.planner.scores)

    def summary(self) -> dict[str, Any]:
        """Return what `metrics.json` holds of the schedule."""
        line = self.part.timeline
        return {
            "settings": asdict(self.settings),
            "steps_per_epoch": line.steps,
            "epochs": line.epochs,
            "final": self.planner.final,
            "changes": len(self.part.changes),
        }


def change_rows(change: PlanChange, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each resource: of single weights with how many of them, of others with how many channels."""
    for resource, (planned, actual) in change.shares.items():
        pruned, regrown = change.pruned, change.regrown
        if resource == RESOURCE:
            pruned, regrown = change.weights_pruned, change.weights_regrown
        values = (change.step, change.step / steps, resource, planned, actual, pruned, regrown)
        yield dict(zip(COLUMNS, values, strict=True))


def _log_change(change: PlanChange, steps: int, log: Log) -> None:
    kept = shares_left({name: actual for name, (_, actual) in change.shares.items()})
    counted = [("channels", change.pruned, change.regrown)] if change.shares.keys() - {RESOURCE} else []
    if RESOURCE in change.shares:
        counted.append(("weights", change.weights_pruned, change.weights_regrown))
    said = ", ".join(f"{n:,} {what} pruned" + (f", {back:,} came back" if back else "") for what, n, back in counted)
    log(f"schedule: epoch {change.step / steps:.2f}: {kept}; {said}")


def schedule_rows(settings: PruneSettings, line: Timeline, plan: Plan) -> dict[str, Any]:
    """Return the steps of a schedule for a dry run, with the shares of the dense model that they leave."""
    assert settings.schedule is not None
    pattern = {} if settings.pattern is None else {RESOURCE: 1 - settings.pattern.zeros}
    return {
        "kind": settings.schedule.kind,
        "steps_per_epoch": line.steps,
        "stages": list(line.rows(final_shares(plan) | pattern)),
    }

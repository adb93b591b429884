"""A job's schedule: channels scored anew at each stage, and plans between the dense model and what was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.calibration import ChannelStats, TaylorTerms
from prunekit.channels import ChannelMap
from prunekit.compaction import compact
from prunekit.criteria import get_criterion
from prunekit.criteria.movement import Movement
from prunekit.distributed.exchange import from_main
from prunekit.errors import UsageError
from prunekit.measure.verify import verify
from prunekit.planning import BudgetSettings, Plan, PruneSettings, make_plan
from prunekit.planning.schedule import Stage, Timeline, at_stage, share_kept, timeline
from prunekit.planning.select import Between, Scores
from prunekit.settings.budgets import facts_from
from prunekit.settings.pruning import WITH_REPAIR, clashes
from prunekit.training import PlanChange, Planner, PruningSchedule, Training, steps_per_epoch
from prunekit.workflow.agreeing import share_stage
from prunekit.workflow.planned import Planned
from prunekit.workflow.prepared import Prepared
from prunekit.workflow.profiling import in_blocks
from prunekit.workflow.pruning import ranked, raw_importance
from prunekit.workflow.recalibrating import calibrate_again
from prunekit.workflow.runs import Log, RunFolder
from prunekit.workflow.tables import write_csv

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


def final_shares(plan: Plan) -> dict[str, float]:
    """What is left of the resources that a schedule goes by at its end: the budgets as shares of the dense model.

    A budget of time cannot be measured at each stage: there it goes by MACs, down to those of the plan.
    """
    if _of_time(plan):
        return {"macs": plan.channel_map.macs(plan.keep) / plan.channel_map.macs()}
    found = plan.provenance["budgets"].items()
    return {
        name: min(1.0, facts_from(name, budget).left_of(budget["asked"], budget["dense"])) for name, budget in found
    }


def _of_time(plan: Plan) -> bool:
    return any(facts_from(name, budget).measured for name, budget in plan.provenance["budgets"].items())


class JobPlanner(Planner):
    """Plans for the budgets of each stage, by scores of the model as it is then.

    Criteria of weights, statistics and gradients look at the masked model, on the job's calibration images; those of
    Gram matrices keep the scores of the dense model, because matrices of masked channels are singular. What is pruned
    keeps the score that it had when it last was there.

    Args:
        plan: on the dense model: its channel map, with what its trial locked, is that of all stages; the final one
            where a budget is one of time.
        scores: of the dense model; None elsewhere than in the main process, which makes the plans of all.
    """

    def __init__(self, prepared: Prepared, plan: Plan, scores: Scores | None) -> None:
        settings, fixed = prepared.job.prune, _of_time(plan)
        assert settings.schedule is not None
        self._prepared, self._chart = prepared, plan.channel_map
        self._final = plan if fixed else None
        shares = final_shares(plan)
        self._settings = replace(in_blocks(settings), budget=BudgetSettings(**shares)) if fixed else settings
        self._shares, self._schedule = shares, settings.schedule
        budgets = plan.provenance["budgets"]
        self._dense = dict.fromkeys(shares, 1.0) | {k: v["dense"] for k, v in budgets.items() if k in shares}
        self._dense_scores = np.zeros(self._chart.n_labels) if scores is None else scores
        self._movement: Movement | None = None
        self._raw = np.full(self._chart.n_labels, np.inf)
        self.scores = self._dense_scores
        """As the last plan was made by."""

    @contextmanager
    def active(self, training: Training) -> Iterator[None]:
        """Adds up movement while training, where the schedule asks for it."""
        if self._schedule.score == "movement":
            self._movement = Movement(training.model, self._chart, training.optimizer)
        with self._movement or nullcontext():
            yield

    def plan(self, model: nn.Module, stage: Stage, before: Plan) -> Plan:
        """Within the plan before, unless channels may come back; around the final one, where that is known."""
        seen = calibrate_again(self._prepared, model) if self._looks else (None, None)
        return share_stage(lambda: self._made(model, stage, before, *seen), before)

    @property
    def _looks(self) -> bool:
        """Whether the model is scored as it is at a stage."""
        dense_alone = {"moments", "patches"} & set(get_criterion(self._settings.criterion).needs)
        return self._movement is None and not dense_alone

    def _made(
        self, model: nn.Module, stage: Stage, before: Plan, stats: ChannelStats | None, gradients: TaylorTerms | None
    ) -> Plan:
        self.scores = self._scored(model, before, stats, gradients)
        if self._final is not None and stage.progress >= 1:
            return self._final
        between = Between(
            most=np.ones_like(before.keep) if self._schedule.regrow else before.keep,
            least=None if self._final is None else self._final.keep,
        )
        settings = at_stage(self._settings, stage, self._dense)
        made = make_plan(self._chart, self.scores, settings, seed=self._prepared.job.seed, between=between)
        return replace(made, provenance={**made.provenance, "schedule": asdict(stage)})

    def _scored(
        self, model: nn.Module, before: Plan, stats: ChannelStats | None, gradients: TaylorTerms | None
    ) -> Scores:
        settings = self._settings
        if self._movement is not None:
            return self._movement.scores()
        if not self._looks:
            return self._dense_scores
        fresh = raw_importance(model, self._chart, settings, stats, gradients, self._prepared.job.seed)
        self._raw = np.where(before.keep, fresh, self._raw)
        return ranked(self._raw, self._chart, settings)

    def shares(self, stage: Stage, plan: Plan) -> dict[str, tuple[float, float]]:
        """Of each resource the share that the stage plans to leave, and the one that its plan leaves."""
        found = {}
        for name, final in self._shares.items():
            planned = share_kept(self._schedule.kind, stage.progress, final)
            budget = plan.provenance["budgets"].get(name)
            macs = self._chart.macs(plan.keep) / self._chart.macs()
            facts = facts_from(name, budget or {})
            found[name] = planned, macs if budget is None else facts.left_of(budget["left"], budget["dense"])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Scores of what is pruned, and movement so far."""
        movement = {} if self._movement is None else self._movement.state_dict()
        return {
            "raw": torch.from_numpy(self._raw.copy()),
            "movement": movement,
            "scores": torch.from_numpy(np.array(self.scores)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""
        self._raw, self.scores = state["raw"].cpu().numpy(), state["scores"].cpu().numpy()
        if self._movement is not None:
            self._movement.load_state_dict(state["movement"])


class JobSchedule:
    """A job's schedule as a part of its fine-tuning, with what the run's folder gets of it.

    Args:
        plan: on the dense model; the final one where a budget is one of time.
        scores: that it was made by; None elsewhere than in the main process.
    """

    def __init__(self, prepared: Prepared, plan: Plan, scores: Scores | None, run: RunFolder) -> None:
        self._prepared, self._run, self._shares = prepared, run, final_shares(plan)
        settings = prepared.job.prune.schedule
        assert settings is not None
        self.settings = settings
        chart: ChannelMap = plan.channel_map
        self.planner = JobPlanner(prepared, plan, scores)
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
            "final": self._shares,
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

"""Plans of a schedule's stages: channels scored anew at each, between the dense model and what was asked for.

A job's schedule: a part of its fine-tuning, and what the run's folder gets of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from prunekit.channels.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.criteria.criterion import get_criterion
from prunekit.criteria.gradient import Movement
from prunekit.errors import UsageError
from prunekit.jobs.calibrate import calibrate_again
from prunekit.jobs.profile import in_blocks
from prunekit.jobs.prune.plan_search import CriterionInputs, Planned, ranked, raw_importance
from prunekit.jobs.run.agreement import computed_by_main, share_stage
from prunekit.jobs.run.job_inputs import Prepared
from prunekit.jobs.run.run_folder import Log, RunFolder
from prunekit.measure.verification import verify
from prunekit.planning.candidates import PlanBounds, Scores
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import Stage, Timeline, settings_at_stage, share_kept, timeline
from prunekit.planning.solver import make_plan
from prunekit.settings.prune import WITH_REPAIR, BudgetSettings, PruneSettings, facts_from, prune_contradictions
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.taylor_terms import TaylorTerms
from prunekit.training.callbacks.scheduled_masks import PlanChange, Planner, PruningSchedule, steps_per_epoch
from prunekit.utils.files import write_csv

StageInputs = tuple[ChannelStats | None, TaylorTerms | None]


def final_shares(plan: Plan) -> dict[str, float]:
    """Return what is left of the resources that a schedule goes by at its end: the budgets as shares of the dense
    model.

    A budget of time cannot be measured at each stage: there it goes by MACs, down to those of the plan.
    """
    if of_time(plan):
        return {"macs": plan.channel_map.macs(plan.keep) / plan.channel_map.macs()}
    found = plan.provenance["budgets"].items()
    return {
        name: min(1.0, facts_from(name, budget).left_of(budget["asked"], budget["dense"])) for name, budget in found
    }


def of_time(plan: Plan) -> bool:
    """Return whether a plan is for a budget of time, which is measured before training and not at a stage."""
    return any(facts_from(name, budget).measured for name, budget in plan.provenance["budgets"].items())


class StageStatistics:
    """What the scores of a stage are computed from, beside the weights of that moment."""

    def active(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Entered while the model is trained, until the plan is final."""
        return nullcontext()

    def seen(self, model: nn.Module) -> StageInputs:
        """Return statistics and Taylor terms of the model as it is now, where the criterion needs them.

        All processes ask together; what the main one gets counts.
        """
        return None, None

    def state_dict(self) -> dict[str, Any]:
        """Return what was joined_samples since the stage before."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class StagePlanner(Planner):
    """Plans for the budgets of each stage, by scores of the model as it is then.

    Criteria of weights, statistics and gradients look at the masked model; those of Gram matrices keep the scores of
    the dense model, because matrices of masked channels are singular. What is pruned keeps the score that it had when
    it last was there.

    Args:
        settings: with a schedule.
        plan: on the dense model: its channel map, with what its trial locked, is that of all stages; the final one
            where a budget is one of time.
        scores: of the dense model; None elsewhere than in the main process, which makes the plans of all.
        seed: of the random criterion.
    """

    def __init__(
        self, settings: PruneSettings, plan: Plan, scores: Scores | None, evidence: StageStatistics, *, seed: int
    ) -> None:
        assert settings.schedule is not None
        self._asked, self._schedule, self._chart = settings, settings.schedule, plan.channel_map
        self._evidence, self._seed = evidence, seed
        self._aim_at(plan)
        self._dense_scores = np.zeros(self._chart.n_labels) if scores is None else scores
        self._movement: Movement | None = None
        self._raw = np.full(self._chart.n_labels, np.inf)
        self.scores = self._dense_scores
        """As the last plan was made by."""

    def _aim_at(self, plan: Plan) -> None:
        fixed = of_time(plan)
        self._final = plan if fixed else None
        self.final = final_shares(plan)
        """What is left of each resource at the end."""
        budget = BudgetSettings(**self.final)
        self._settings = replace(in_blocks(self._asked), budget=budget) if fixed else self._asked
        budgets = plan.provenance["budgets"]
        self._dense = dict.fromkeys(self.final, 1.0) | {
            name: found["dense"] for name, found in budgets.items() if name in self.final
        }

    @contextmanager
    def active(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Add up movement while training where the schedule asks for it, and what else is seen of the steps."""
        if self._schedule.score == "movement":
            self._movement = Movement(model, self._chart, optimizer)
        with self._movement or nullcontext(), self._evidence.active(model, optimizer):
            yield

    def plan(self, model: nn.Module, stage: Stage, before: Plan) -> Plan:
        """Within the plan before, unless channels may come back; around the final one, where that is known."""
        seen = self._evidence.seen(model) if self._looks else (None, None)
        return share_stage(lambda: self._made(model, stage, before, seen), before)

    @property
    def _looks(self) -> bool:
        """Whether the model is scored as it is at a stage."""
        return self._movement is None and rescored(self._settings)

    def _made(self, model: nn.Module, stage: Stage, before: Plan, seen: StageInputs) -> Plan:
        self.scores = self._scored(model, before, seen)
        if self._final is not None and stage.progress >= 1:
            return self._final
        bounds = PlanBounds(
            most=np.ones_like(before.keep) if self._schedule.regrow else before.keep,
            least=None if self._final is None else self._final.keep,
        )
        settings = settings_at_stage(self._settings, stage, self._dense)
        made = make_plan(self._chart, self.scores, settings, seed=self._seed, bounds=bounds)
        return replace(made, provenance={**made.provenance, "schedule": asdict(stage)})

    def _scored(self, model: nn.Module, before: Plan, seen: StageInputs) -> Scores:
        if self._movement is not None:
            return self._movement.scores()
        if not self._looks:
            return self._dense_scores
        inputs = CriterionInputs(*seen, seed=self._seed)
        fresh = raw_importance(model, self._chart, self._settings, inputs)
        self._raw = np.where(before.keep, fresh, self._raw)
        return ranked(self._raw, self._chart, self._settings)

    def shares(self, stage: Stage, plan: Plan) -> dict[str, tuple[float, float]]:
        """Of each resource the share that the stage plans to leave, and the one that its plan leaves."""
        found = {}
        for name, final in self.final.items():
            planned = share_kept(self._schedule.kind, stage.progress, final)
            budget = plan.provenance["budgets"].get(name)
            macs = self._chart.macs(plan.keep) / self._chart.macs()
            facts = facts_from(name, budget or {})
            found[name] = planned, macs if budget is None else facts.left_of(budget["left"], budget["dense"])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the scores of the dense model and of what is pruned, movement and evidence so far, and a final
        plan.
        """
        final = self._final
        return {
            "raw": torch.from_numpy(self._raw.copy()),
            "movement": {} if self._movement is None else self._movement.state_dict(),
            "scores": torch.from_numpy(np.array(self.scores)),
            "dense_scores": torch.from_numpy(np.array(self._dense_scores)),
            "evidence": self._evidence.state_dict(),
            "final": None if final is None else torch.from_numpy(final.keep.copy()),
            "provenance": None if final is None else json.dumps(dict(final.provenance)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._raw, self.scores = state["raw"].cpu().numpy(), state["scores"].cpu().numpy()
        self._dense_scores = state["dense_scores"].cpu().numpy()
        if self._movement is not None:
            self._movement.load_state_dict(state["movement"])
        self._evidence.load_state_dict(state["evidence"])
        if state["final"] is not None:  # one of time is measured, and would come out a little different
            self._aim_at(Plan(self._chart, state["final"].cpu().numpy(), json.loads(state["provenance"])))


def rescored(settings: PruneSettings) -> bool:
    """Return whether a criterion scores the model anew at each stage: Gram matrices are those of the dense one."""
    return not {"moments", "patches"} & set(get_criterion(settings.criterion).needs)


COLUMNS = ("step", "epoch", "resource", "planned", "actual", "pruned", "regrown")


def require_schedule(prepared: Prepared, *, training: bool) -> Timeline | None:
    """Check a job's schedule before anything is written; None without one.

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
    problems = [f"{'.'.join(('prune', *path))}: {text}" for path, text in prune_contradictions(asdict(job.prune))]
    if problems:
        raise UsageError("; ".join(problems))
    steps = steps_per_epoch(job.finetune, len(prepared.splits.train), job.data.batch)
    return timeline(settings, epochs=job.finetune.epochs, steps=steps)


class JobStatistics(StageStatistics):
    """Of a job: its calibration images, seen again at each stage."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def seen(self, model: nn.Module) -> StageInputs:
        """Return statistics and Taylor terms of the model as it is now, where the criterion needs them."""
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
        evidence, seed = JobStatistics(prepared), prepared.job.seed
        self.planner = StagePlanner(prepared.job.prune, plan, scores, evidence, seed=seed)
        self.start = Plan(chart, np.ones(chart.n_labels, dtype=bool))
        self.part = PruningSchedule(settings, self.start, self.planner, self._changed)

    def in_force(self) -> Plan:
        """Return the plan that masks the model now."""
        return self.part.plan

    @computed_by_main
    def _changed(self, part: PruningSchedule) -> None:
        """Write a change of the plan down; final masks are verified at once, before anything is trained under them."""
        steps = part.timeline.steps
        rows = [row for change in part.changes for row in change_rows(change, steps)]
        write_csv(self._run.path / "schedule.csv", rows, COLUMNS)
        _log_change(part.changes[-1], steps, self._run.log)
        if part.masks.is_final:
            small = compact(part.model, part.plan)
            proof = verify(part.model, small, part.plan, [self._prepared.example_inputs], strict=True)
            self._run.log(f"schedule: final masks; masked == compact to {proof.max_relative_difference:.1e}")

    def finished(self, planned: Planned) -> Planned:
        """Return the plan that training ended with, in place of the one on the dense model."""
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
    """Yield a row for each resource."""
    for resource, (planned, actual) in change.shares.items():
        row = {"step": change.step, "epoch": change.step / steps, "resource": resource, "planned": planned}
        yield row | {"actual": actual, "pruned": change.pruned, "regrown": change.regrown}


def _log_change(change: PlanChange, steps: int, log: Log) -> None:
    left = ", ".join(f"{actual:.1%} of {name}" for name, (_, actual) in change.shares.items())
    back = f", {change.regrown} came back" if change.regrown else ""
    log(f"schedule: epoch {change.step / steps:.2f}: {left} left; {change.pruned} channels pruned{back}")


def schedule_rows(settings: PruneSettings, line: Timeline, plan: Plan) -> dict[str, Any]:
    """Return what a dry run says: each stage with the shares that it leaves of the dense model."""
    assert settings.schedule is not None
    return {
        "kind": settings.schedule.kind,
        "steps_per_epoch": line.steps,
        "stages": list(line.rows(final_shares(plan))),
    }

"""Plans of a schedule's stages: channels scored anew at each, between the dense model and what was asked for."""

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

from prunekit.calibration import ChannelStats, TaylorTerms
from prunekit.criteria import get_criterion
from prunekit.criteria.movement import Movement
from prunekit.planning import BudgetSettings, Plan, PruneSettings, make_plan
from prunekit.planning.schedule import Stage, at_stage, share_kept
from prunekit.planning.select import Between, Scores
from prunekit.settings.budgets import facts_from
from prunekit.training import Planner
from prunekit.workflow.agreeing import share_stage
from prunekit.workflow.plan_search import CriterionInputs, ranked, raw_importance
from prunekit.workflow.profiling import in_blocks

Seen = tuple[ChannelStats | None, TaylorTerms | None]


def final_shares(plan: Plan) -> dict[str, float]:
    """What is left of the resources that a schedule goes by at its end: the budgets as shares of the dense model.

    A budget of time cannot be measured at each stage: there it goes by MACs, down to those of the plan.
    """
    if of_time(plan):
        return {"macs": plan.channel_map.macs(plan.keep) / plan.channel_map.macs()}
    found = plan.provenance["budgets"].items()
    return {
        name: min(1.0, facts_from(name, budget).left_of(budget["asked"], budget["dense"])) for name, budget in found
    }


def of_time(plan: Plan) -> bool:
    """Whether a plan is for a budget of time, which is measured before training and not at a stage."""
    return any(facts_from(name, budget).measured for name, budget in plan.provenance["budgets"].items())


class Evidence:
    """What the scores of a stage are computed from, beside the weights of that moment."""

    def active(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Entered while the model is trained, until the plan is final."""
        return nullcontext()

    def seen(self, model: nn.Module) -> Seen:
        """Statistics and Taylor terms of the model as it is now, where the criterion needs them.

        All processes ask together; what the main one gets counts.
        """
        return None, None

    def state_dict(self) -> dict[str, Any]:
        """What was gathered since the stage before."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""


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
        self, settings: PruneSettings, plan: Plan, scores: Scores | None, evidence: Evidence, *, seed: int
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
        """Adds up movement while training where the schedule asks for it, and what else is seen of the steps."""
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

    def _made(self, model: nn.Module, stage: Stage, before: Plan, seen: Seen) -> Plan:
        self.scores = self._scored(model, before, seen)
        if self._final is not None and stage.progress >= 1:
            return self._final
        between = Between(
            most=np.ones_like(before.keep) if self._schedule.regrow else before.keep,
            least=None if self._final is None else self._final.keep,
        )
        settings = at_stage(self._settings, stage, self._dense)
        made = make_plan(self._chart, self.scores, settings, seed=self._seed, between=between)
        return replace(made, provenance={**made.provenance, "schedule": asdict(stage)})

    def _scored(self, model: nn.Module, before: Plan, seen: Seen) -> Scores:
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
        """Scores of the dense model and of what is pruned, movement and evidence so far, and a final plan."""
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
        """Goes on from a state."""
        self._raw, self.scores = state["raw"].cpu().numpy(), state["scores"].cpu().numpy()
        self._dense_scores = state["dense_scores"].cpu().numpy()
        if self._movement is not None:
            self._movement.load_state_dict(state["movement"])
        self._evidence.load_state_dict(state["evidence"])
        if state["final"] is not None:  # one of time is measured, and would come out a little different
            self._aim_at(Plan(self._chart, state["final"].cpu().numpy(), json.loads(state["provenance"])))


def rescored(settings: PruneSettings) -> bool:
    """Whether a criterion scores the model anew at each stage: Gram matrices are those of the dense one."""
    return not {"moments", "patches"} & set(get_criterion(settings.criterion).needs)

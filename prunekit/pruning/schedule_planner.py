"""The plans of a pruning schedule, and plans that the main process makes and every process gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.criterion import CRITERIA
from prunekit.criteria.gradient import Movement
from prunekit.criteria.scoring import score
from prunekit.distributed.process_group import computed_by_main, is_main, main_process_only, require_equal, size
from prunekit.masks.scheduled_masks import Planner
from prunekit.planning.candidates import PlanBounds, Scores
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import ScheduleStep, settings_at_step, share_kept
from prunekit.planning.solver import make_plan
from prunekit.pruning.plan_search import ranked
from prunekit.settings.pruning import BudgetSettings, PruneSettings, facts_from
from prunekit.statistics.channel_stats import ChannelStats
from prunekit.statistics.taylor_terms import TaylorTerms

if TYPE_CHECKING:
    from prunekit.pruning.library_layout import LibraryModel

StepInputs = tuple[ChannelStats | None, TaylorTerms | None]


def final_shares(plan: Plan) -> dict[str, float]:
    """Return the shares of resources that a schedule leaves at its end: the budgets, or, for one of time, the MACs."""
    if of_time(plan):
        return {"macs": plan.channel_map.macs_left(plan.keep)}
    found = plan.provenance["budgets"].items()
    return {
        name: min(1.0, facts_from(name, budget).left_of(budget["asked"], budget["dense"])) for name, budget in found
    }


def of_time(plan: Plan) -> bool:
    """Return whether a plan is for a budget of time, which is measured before training and not at each pruning step."""
    return any(facts_from(name, budget).measured for name, budget in plan.provenance["budgets"].items())


class StepStatistics:
    """The statistics that a pruning step's scores need besides the weights; this one has none."""

    def active(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return a context that is active while the model is trained, until the plan is final."""
        return nullcontext()

    def collect(self, model: nn.Module) -> StepInputs:
        """Return statistics and Taylor terms of the model as it is now, if the criterion needs them.

        All processes call this together; the result in the main one counts.
        """
        return None, None

    def state_dict(self) -> dict[str, Any]:
        """Return what was collected since the last pruning step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class ChannelPlanner(Planner):
    """The plans of a schedule: for the budgets of each pruning step, by scores of the model as it is then.

    Criteria of weights, statistics and gradients score the masked model; those of Gram matrices keep the scores of the
    dense model, because matrices of masked channels are singular. Pruned channels keep their last score.

    `plan` is that of the dense model, whose channel map and locks hold for all steps, and the final plan if a budget
    is one of time. `scores` are None outside the main process, which makes all plans.
    """

    def __init__(
        self,
        settings: PruneSettings,
        plan: Plan,
        scores: Scores | None,
        statistics: StepStatistics,
        *,
        seed: int,
        library: LibraryModel | None = None,
    ) -> None:
        assert settings.schedule is not None
        self._asked, self._schedule, self._chart = settings, settings.schedule, plan.channel_map
        self._statistics, self._seed, self._library = statistics, seed, library
        self._aim_at(plan)
        self._dense_scores = np.zeros(self._chart.n_labels) if scores is None else scores
        self._movement: Movement | None = None
        self._raw = np.full(self._chart.n_labels, np.inf)
        self.scores = self._dense_scores
        """Of the last plan."""

    def _aim_at(self, plan: Plan) -> None:
        fixed = of_time(plan)
        self._final = plan if fixed else None
        self.final = final_shares(plan)
        """The share that is left of each resource at the end."""
        budget = BudgetSettings(**self.final)
        self._settings = replace(self._asked.in_blocks, budget=budget) if fixed else self._asked
        budgets = plan.provenance["budgets"]
        self._dense = dict.fromkeys(self.final, 1.0) | {
            name: found["dense"] for name, found in budgets.items() if name in self.final
        }

    @contextmanager
    def active(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Collect statistics of the training steps, and movement if the schedule scores by it."""
        if self._schedule.score == "movement":
            self._movement = Movement(model, self._chart, optimizer)
        with self._movement or nullcontext(), self._statistics.active(model, optimizer):
            yield

    def plan(self, model: nn.Module, step: ScheduleStep, before: Plan) -> Plan:
        """Return the plan of a pruning step: within the last unless channels may come back, and around a final one."""
        seen = self._statistics.collect(model) if self._looks else (None, None)
        return share_step(lambda: self._made(model, step, before, seen), before)

    @property
    def _looks(self) -> bool:
        """True if each pruning step scores the model as it is then."""
        return self._movement is None and rescored(self._settings)

    def _made(self, model: nn.Module, step: ScheduleStep, before: Plan, seen: StepInputs) -> Plan:
        self.scores = self._scored(model, before, seen)
        if self._final is not None and step.progress >= 1:
            return self._final
        bounds = PlanBounds(
            most=np.ones_like(before.keep) if self._schedule.regrow else before.keep,
            least=None if self._final is None else self._final.keep,
        )
        settings = settings_at_step(self._settings, step, self._dense)

        def planned(chart: ChannelMap) -> Plan:
            return make_plan(chart, self.scores, settings, seed=self._seed, bounds=bounds)

        if self._library is None or step.progress < 1:
            made = planned(self._chart)
        else:
            made = self._library.with_weights(model).plan_in_layout(self._chart, planned)
        return replace(made, provenance={**made.provenance, "schedule": asdict(step)})

    def _scored(self, model: nn.Module, before: Plan, seen: StepInputs) -> Scores:
        if self._movement is not None:
            return self._movement.scores()
        if not self._looks:
            return self._dense_scores
        stats, gradients = seen
        criterion = self._settings.criterion
        fresh = score(criterion, model, self._chart, stats=stats, gradients=gradients, seed=self._seed)
        self._raw = np.where(before.keep, fresh, self._raw)
        return ranked(self._raw, self._chart, self._settings)

    def shares(self, step: ScheduleStep, plan: Plan) -> dict[str, tuple[float, float]]:
        """Return, for each resource, the share that a pruning step aims to leave and the one that its plan leaves."""
        found = {}
        for name, final in self.final.items():
            planned = share_kept(self._schedule.kind, step.progress, final)
            budget = plan.provenance["budgets"].get(name)
            macs = self._chart.macs_left(plan.keep)
            facts = facts_from(name, budget or {})
            found[name] = planned, macs if budget is None else facts.left_of(budget["left"], budget["dense"])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return scores, movement and statistics so far, and the final plan if it is known."""
        final = self._final
        return {
            "raw": torch.from_numpy(self._raw.copy()),
            "movement": {} if self._movement is None else self._movement.state_dict(),
            "scores": torch.from_numpy(np.array(self.scores)),
            "dense_scores": torch.from_numpy(np.array(self._dense_scores)),
            "evidence": self._statistics.state_dict(),
            "final": None if final is None else torch.from_numpy(final.keep.copy()),
            "provenance": None if final is None else json.dumps(dict(final.provenance)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._raw, self.scores = state["raw"].cpu().numpy(), state["scores"].cpu().numpy()
        self._dense_scores = state["dense_scores"].cpu().numpy()
        if self._movement is not None:
            self._movement.load_state_dict(state["movement"])
        self._statistics.load_state_dict(state["evidence"])
        if state["final"] is not None:  # of a measured time: found again, it would differ a little
            self._aim_at(Plan(self._chart, state["final"].cpu().numpy(), json.loads(state["provenance"])))


def rescored(settings: PruneSettings) -> bool:
    """Return whether a criterion scores the model again at each pruning step, as those of Gram matrices do not."""
    return "patches" not in CRITERIA.get(settings.criterion).needs


def share_plan(plan: Plan | None) -> Plan:
    """Return the main process's plan in every process; the others need not give one."""

    @computed_by_main
    def without_trace() -> Plan:
        assert plan is not None
        return replace(plan, channel_map=replace(plan.channel_map, source=None))  # as a saved plan is

    if size() == 1 and plan is not None:
        return plan
    received = without_trace()
    result = plan if is_main() and plan is not None else received
    require_same_plan(result, "as it was made")
    return result


def share_step(make: Callable[[], Plan], before: Plan) -> Plan:
    """Return the plan that the main process makes for a step of a schedule, in every process."""
    if size() == 1:
        return make()
    made = main_process_only(make)()

    @computed_by_main
    def parts() -> tuple[Any, ...]:  # without the channel map, which all processes have
        assert made is not None
        return made.keep, dict(made.provenance), dict(made.element_masks)

    received = parts()
    plan = made or Plan(before.channel_map, *received)
    require_same_plan(plan, "at a step of the schedule")
    return plan


def require_same_plan(plan: Plan, when: str) -> None:
    """Raise unless every process has the same plan, by its hash."""
    require_equal(plan.digest, f"the plan {when}")

"""Pruning while a model is trained: a part that changes the plan as a schedule says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from prunekit.errors import ArtifactError
from prunekit.masking import ChangingMasks, sparsity
from prunekit.planning import Plan, ScheduleSettings
from prunekit.planning.schedule import Stage, Timeline, timeline
from prunekit.settings.training import TrainSettings
from prunekit.training.parts import Part, Training


def steps_per_epoch(settings: TrainSettings, images: int, batch: int) -> int:
    """Steps of the optimizer in an epoch of `fit` on so many training images, if none is skipped."""
    return math.ceil(max(1, images // batch) / settings.accumulate)


class Planner:
    """Makes the plan of each stage of a schedule.

    Where it keeps scores from stage to stage, they go through `state_dict`, as those of a `Part` do.
    """

    def active(self, training: Training) -> AbstractContextManager[Any]:
        """Entered around the whole training, after the masks."""
        return nullcontext()

    def plan(self, model: nn.Module, stage: Stage, before: Plan) -> Plan:
        """The plan of a stage; of several processes all ask for it, and must get the same.

        Args:
            model: as it is now, under the masks of the plan before.
        """
        raise NotImplementedError

    def shares(self, stage: Stage, plan: Plan) -> Mapping[str, tuple[float, float]]:
        """Of each resource the share of the dense model that a stage means to leave, and what its plan leaves."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the next stages need."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state."""


@dataclass(frozen=True)
class PlanChange:
    """One stage as it was carried out.

    Attributes:
        step: how many steps came before it.
        pruned, regrown: channels, by their labels, that went and that came back.
        shares: see `Planner.shares`.
    """

    step: int
    pruned: int
    regrown: int
    shares: Mapping[str, tuple[float, float]]


class PruningSchedule(Part):
    """Trains under masks whose plan changes at each stage of a schedule.

    Pruned entries are exactly zero from the stage on, after every step. A stage between two epochs comes after the
    validation: that shows how far the model has recovered from the stage before, and statistics of BatchNorms would be
    those of the channels that have just gone. Weights are kept as the best only under the final plan.

    Args:
        settings: laid over the run when it begins.
        start: the plan before the first stage, which may keep everything.
        planner: makes the others, of the same channel map.
        on_change: called after each change, once the masks are in force.

    Raises:
        UsageError: when it is entered: the schedule does not fit the run.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        start: Plan,
        planner: Planner,
        on_change: Callable[[PruningSchedule], None] | None = None,
    ) -> None:
        self.settings, self.plan, self.planner = settings, start, planner
        self.changes: list[PlanChange] = []
        self._on_change = on_change
        self._step = self._done = 0

    @contextmanager
    def active(self, training: Training) -> Iterator[None]:
        """Enters the masks, and carries out the stage before the first step, if there is one."""
        self.timeline: Timeline = timeline(self.settings, epochs=training.epochs, steps=training.steps)
        self.model = training.model
        self._masks = ChangingMasks(training.model, self.plan, training.optimizer, restore=False)
        with self._masks, self.planner.active(training):
            self._catch_up(0)
            yield

    def after_step(self, step: int, made: bool) -> None:
        """Carries out the stages that come before the next step, but for those that a validation comes before."""
        self._step = step
        if step % self.timeline.steps:
            self._catch_up(step)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Afterwards come the stages between two epochs; the epoch may have made fewer steps, of missing batches."""
        yield
        steps = self.timeline.steps
        self._catch_up(math.ceil(self._step / steps) * steps)

    def settled(self) -> bool:
        """Whether the plan is the final one."""
        return self._done == len(self.timeline.stages)

    def describe(self) -> Mapping[str, Any]:
        """The share of zeros among the weights."""
        return {"sparsity": f"{sparsity(self.model, self.plan).weights:.1%}"}

    def _catch_up(self, step: int) -> None:
        due = [stage for stage in self.timeline.stages[self._done :] if stage.step <= step]
        if not due:
            return
        self._done += len(due)
        before = self.plan
        self._use(self.planner.plan(self.model, due[-1], before))
        pruned, regrown = (
            _count(self.plan, gone) for gone in (before.keep & ~self.plan.keep, self.plan.keep & ~before.keep)
        )
        self.changes.append(PlanChange(step, pruned, regrown, dict(self.planner.shares(due[-1], self.plan))))
        if self._on_change is not None:
            self._on_change(self)

    def _use(self, plan: Plan) -> None:
        self._masks.update(plan)
        self.plan = plan

    def state_dict(self) -> dict[str, Any]:
        """Step and stage, the plan, the values of what is pruned, and the planner's scores."""
        return {
            "step": self._step,
            "done": self._done,
            "keep": torch.from_numpy(self.plan.keep.copy()),
            "element_masks": {name: mask.clone() for name, mask in self.plan.element_masks.items()},
            "held": {name: values.clone() for name, values in self._masks.held.values.items()},
            "provenance": json.dumps(dict(self.plan.provenance)),
            "changes": [
                {**asdict(change), "shares": {name: list(both) for name, both in change.shares.items()}}
                for change in self.changes
            ],
            "planner": self.planner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts the plan of a state in force; `on_change` is not called for the changes before it.

        Raises:
            ArtifactError: the state is of another model or schedule.
        """
        keep = state["keep"].cpu().numpy()
        if keep.shape != self.plan.keep.shape or not state["done"] <= len(self.timeline.stages):
            raise ArtifactError("state of a pruning schedule: it belongs to another model or schedule; train anew")
        self._step, self._done = int(state["step"]), int(state["done"])
        self._use(Plan(self.plan.channel_map, keep, json.loads(state["provenance"]), dict(state["element_masks"])))
        self._masks.held.load(state["held"])
        self.planner.load_state_dict(state["planner"])
        self.changes = [
            PlanChange(**{**row, "shares": {name: (both[0], both[1]) for name, both in row["shares"].items()}})
            for row in state["changes"]
        ]


def _count(plan: Plan, labels: Any) -> int:
    """Of some labels those in channel groups: joint ones follow from others."""
    return sum(int(np.count_nonzero(labels[group.labels])) for group in plan.channel_map.groups)


class LearningRateRewinding(Part):
    """Begins the learning-rate schedule anew in each round of a schedule, where that asks for it (Renda et al. 2020).

    A part of its own: a dense control is trained with the same learning rates.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self.settings = settings

    def restarts(self, training: Training) -> Sequence[int]:
        """Where the rounds begin."""
        return timeline(self.settings, epochs=training.epochs, steps=training.steps).restarts()

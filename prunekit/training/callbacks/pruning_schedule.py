"""Pruning during training as callbacks: masks whose plan changes, and learning rates that begin again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from prunekit.masks.masked_model import sparsity
from prunekit.masks.scheduled_masks import PlanChange, Planner, ScheduledMasks, straight_through
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import Timeline, timeline
from prunekit.settings.pruning import ScheduleSettings
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import Callback, TrainingRun
from prunekit.utils.display import share
from prunekit.utils.tensors import map_tensors


def steps_per_epoch(settings: TrainSettings, images: int, batch: int) -> int:
    """Return the steps of an epoch of `fit` with this number of training images and batch size, if none is skipped."""
    return math.ceil(max(1, images // batch) / settings.accumulate)


class PruningSchedule(Callback):
    """`ScheduledMasks` as a callback, whose schedule covers the epochs of the run.

    A pruning step between two epochs comes after the validation, which so shows how far the model has recovered from
    the one before; after it, BatchNorm statistics would include channels that have just been removed. Weights are
    kept as the best only under the final plan. `on_change` is called after each change, once the masks are in force.

    Raises:
        UsageError: on enter, when the schedule does not fit the run.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        start: Plan,
        planner: Planner,
        on_change: Callable[[PruningSchedule], None] = lambda _: None,
    ) -> None:
        self.settings, self.start, self.planner = settings, start, planner
        self._on_change = on_change
        self._masks: ScheduledMasks | None = None
        self._step = 0

    @contextmanager
    def active(self, run: TrainingRun) -> Iterator[None]:
        """Enter the masks, and carry out the pruning step before the first step of training, if any."""
        self.timeline: Timeline = timeline(self.settings, epochs=run.epochs, steps=run.steps)
        self._masks = ScheduledMasks(
            run.model,
            run.optimizer,
            self.timeline.pruning_steps,
            self.start,
            self.planner,
            lambda: self._on_change(self),
            straight_through=straight_through(self.settings),
        )
        with self._masks:
            self._masks.reach(0)
            yield

    @property
    def masks(self) -> ScheduledMasks:
        """The masks of the run; there are none before it."""
        assert self._masks is not None
        return self._masks

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.masks.model

    @property
    def plan(self) -> Plan:
        """The current plan; before the run the one with which it begins."""
        return self.start if self._masks is None else self._masks.plan

    @property
    def changes(self) -> list[PlanChange]:
        """The pruning steps that were carried out."""
        return [] if self._masks is None else self._masks.changes

    def after_step(self, step: int, made: bool) -> None:
        """Carry out the pruning steps that are due, unless the epoch is over: then they come after the validation."""
        self._step = step
        if step % self.timeline.steps:
            self.masks.reach(step)

    @contextmanager
    def around_validation(self) -> Iterator[None]:
        """Carry out pruning steps between two epochs after the validation, also if the epoch had too few batches."""
        yield
        steps = self.timeline.steps
        self.masks.reach(math.ceil(self._step / steps) * steps)

    @contextmanager
    def around_trial(self) -> Iterator[None]:
        """Put back what masked weights learn behind their zeros, and what the planner has collected."""
        before = map_tensors(self.state_dict(), Tensor.clone)
        try:
            yield
        finally:
            self.load_state_dict(before)

    def eligible_for_best(self, epoch: int) -> bool:
        """Return whether the plan is the final one."""
        return self.masks.is_final

    def progress_metrics(self) -> Mapping[str, Any]:
        """Return the share of zeros among the weights."""
        return {"sparsity": share(sparsity(self.model, self.plan).weights)}

    def state_dict(self) -> dict[str, Any]:
        """Return the step, and the state of the masks."""
        return {"step": self._step, **self.masks.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, see `ScheduledMasks.load_state_dict`."""
        self._step = int(state["step"])
        self.masks.load_state_dict(state)
        self.masks.get_ready(self._step)


class LearningRateRewinding(Callback):
    """Restarts the learning-rate schedule in each round of a pruning schedule, if its settings say so.

    Renda et al. 2020. It is a separate callback, because a dense control is trained with the same learning rates.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self.settings = settings

    def learning_rate_restarts(self, run: TrainingRun) -> Sequence[int]:
        """Return the first steps of the rounds."""
        return timeline(self.settings, epochs=run.epochs, steps=run.steps).restarts()

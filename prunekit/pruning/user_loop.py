"""The user's own training loop as `Pruner` sees it: steps that are counted, and statistics for the criterion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.criterion import CRITERIA
from prunekit.distributed.process_group import is_main, size
from prunekit.errors import UsageError
from prunekit.hooks.hook import OwnedHook
from prunekit.hooks.owner import HookOwner
from prunekit.planning.schedules import ScheduleStep
from prunekit.pruning.prune import Calibration
from prunekit.pruning.sample_statistics import activation_statistics
from prunekit.pruning.schedule_planner import StepInputs, StepStatistics
from prunekit.settings.pruning import PruneSettings, prune_contradictions
from prunekit.statistics.taylor_terms import StepGradients, collect_gradients
from prunekit.tasks.batches import InputsAndTargets, ModelBatches
from prunekit.tasks.task import Loss, Task
from prunekit.utils.context import seeded
from prunekit.utils.inputs import sample_count, to_device


class StepCounter(HookOwner):
    """The number of steps that an optimizer has made."""

    def __init__(self, optimizer: Optimizer, last: int) -> None:
        super().__init__()
        self._optimizer, self._last = optimizer, last
        self.begin_at(0)
        self.told = False

    def begin_at(self, step: int) -> None:
        """Go on counting from a step."""
        self.tried, self._skipped = step, torch.zeros(())  # tried: with those that a GradScaler skipped
        self.told = step > 0  # whether the pruner's `step` was ever called

    def register(self) -> None:
        """Register hooks before and after the optimizer's step."""
        self.own(self._optimizer.register_step_pre_hook(OwnedHook(self, self._before)))
        self.own(self._optimizer.register_step_post_hook(OwnedHook(self, self._after)))

    def _before(self, *_: Any) -> None:
        if self.tried > self._last and not self.told:
            raise UsageError(
                f"the schedule's {self._last} steps are over, and pruner.step() was never called, so nothing was "
                "pruned; call it after optimizer.step()"
            )

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self.tried += 1
        skipped: Tensor | None = getattr(optimizer, "found_inf", None)  # of a fused one, which skips in its step
        if skipped is not None:
            self._skipped = self._skipped.to(skipped.device) + (skipped.detach() != 0).sum()

    @property
    def made(self) -> int:
        """The number of steps that were not skipped; waits for the device."""
        return self.tried - int(self._skipped)


FROM_SAMPLES = {"stats", "patches"}
"""Needs of a criterion that are collected from samples without labels."""


class LoopStatistics(StepStatistics):
    """The statistics of a user's loop: gradients of its steps, or calibration samples that run again at each change.

    Samples are inputs alone, for activations; pairs are inputs and targets, for second derivatives of the loss.
    """

    def __init__(
        self,
        settings: PruneSettings,
        channel_map: ChannelMap,
        samples: Any,
        pairs: Sequence[InputsAndTargets],
        loss: Loss | None,
        *,
        seed: int,
    ) -> None:
        self._criterion, self._map = settings.criterion, channel_map
        self._needs = set(CRITERIA.get(settings.criterion).needs)
        self._samples, self._pairs, self._loss, self._seed = samples, pairs, loss, seed
        moves = settings.schedule is not None and settings.schedule.score == "movement"
        self._of_steps = "gradients" in self._needs and not pairs and not moves
        self._gradients: StepGradients | None = None

    def active(self, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """Return a context that collects the gradients of each step, if they are needed."""
        self._gradients = StepGradients(model, self._map, optimizer) if self._of_steps else None
        return self._gradients or nullcontext()

    def collect(self, model: nn.Module) -> StepInputs:
        """Return statistics and Taylor terms of the model as it is now, if the criterion needs them."""
        if not is_main():  # which makes the plan
            return None, None
        terms = None if self._gradients is None else self._gradients.terms()
        with seeded(self._seed):
            stats = activation_statistics(model, self._samples, self._criterion) if FROM_SAMPLES & self._needs else None
            if stats is not None:
                stats.require_finite()
            if self._pairs:
                pairs, loss, seed = self._pairs, self._loss, self._seed
                terms = collect_gradients(model, pairs, loss, second_order=True, seed=seed, progress=False)
        return stats, terms

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients since the last pruning step."""
        return {} if self._gradients is None else self._gradients.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        if self._gradients is not None:
            self._gradients.load_state_dict(state)


def check_calibration(
    settings: PruneSettings,
    pruning_steps: tuple[ScheduleStep, ...],
    calibration: Calibration | None,
    loss: Loss | None,
    task: Task | str | None,
) -> bool:
    """Return whether calibration batches need targets."""
    if problems := [f"{'.'.join(path)}: {text}" for path, text in prune_contradictions(asdict(settings))]:
        raise UsageError("; ".join(problems))
    assert settings.schedule is not None
    moves = settings.schedule.score == "movement"
    criterion, needs = settings.criterion, set() if moves else set(CRITERIA.get(settings.criterion).needs)
    said = f"criterion {criterion!r}"
    second = "curvature" in needs
    if calibration is None and needs & FROM_SAMPLES:
        raise UsageError(
            f"calibration: {said} looks at activations; give samples, such as calibration=loader, got none"
        )
    if second and (calibration is None or (loss is None and task is None)):
        raise UsageError(
            f"calibration: {said} needs second derivatives, which a training loop doesn't make; give batches of inputs "
            "and targets, and the loss: calibration=loader, loss=torch.nn.functional.cross_entropy; 'taylor' needs none"
        )
    if calibration is not None and not (needs & FROM_SAMPLES or second):
        what = "movement" if moves else said
        raise UsageError(f"calibration: expected none, because {what} doesn't look at samples; leave it out")
    from_steps = "gradients" in needs and not second
    if from_steps and settings.budget.measured:
        raise UsageError(
            f"criterion: expected one that can be had before training, because the final plan for a budget of time is "
            f"measured then, got {criterion!r}, which looks at the loop's gradients; score by 'l2', or by "
            "'elimination' with calibration="
        )
    if settings.budget.measured and size() > 1:
        raise UsageError(
            "a budget of time is measured when the pruner is made, and other processes would be in the way; give a "
            "budget of macs, which prunekit.plan(..., speedup=...) shows on one process"
        )
    if from_steps and pruning_steps[0].step < 1:
        raise UsageError(
            f"begin: expected at least one step before the first pruning step, because {said} looks at the gradients "
            f"of your loop's steps, got {settings.schedule.begin:g}; schedule {settings.schedule.kind!r} prunes at its "
            "begin"
        )
    return second


def labeled_batches(model: nn.Module, data: Any, task: Task | str | None, count: int) -> list[InputsAndTargets]:
    """Return batches with targets until they hold `count` samples."""
    device, found, seen = next(model.parameters()).device, list[InputsAndTargets](), 0
    for pair in ModelBatches(model, data, task, count=count):
        found.append(to_device(pair, device))
        seen += sample_count(pair[0], 1)
        if seen >= count:
            break
    return found

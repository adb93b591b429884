"""A run under a schedule that was killed anywhere goes on bit by bit: plan, values that may come back, and changes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training_models import CPU, net, splits

from prunekit.channels.trace import trace
from prunekit.criteria.scoring import score
from prunekit.masks.scheduled_masks import Planner
from prunekit.planning.candidates import PlanBounds
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import ScheduleStep, settings_at_step
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import CheckpointSettings, TrainSettings
from prunekit.training.callbacks.callback import Callback
from prunekit.training.callbacks.pruning_schedule import LearningRateRewinding, PruningSchedule
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit


@dataclass
class Turning(Planner):
    """By the l2 norm and against it in turn, so that channels come back."""

    schedule: ScheduleSettings
    turn: list[int] = field(default_factory=lambda: [1])

    def plan(self, model: nn.Module, stage: ScheduleStep, before: Plan) -> Plan:
        chart = before.channel_map
        asked = PruneSettings(BudgetSettings(macs=0.4), scope="global", schedule=self.schedule)
        found = score("l2", model, chart)
        scores = found if self.turn[0] > 0 else np.where(np.isinf(found), found, 10 - found)
        self.turn[0] = -self.turn[0]
        most = PlanBounds(most=np.ones_like(before.keep))
        return make_plan(chart, scores, settings_at_step(asked, stage, {"macs": 1.0}), bounds=most)

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn[0]}

    def load_state_dict(self, state: Any) -> None:
        self.turn[0] = state["turn"]


class Stopping(Callback):
    """Ends a run before a step, or in a validation if that is negative, as a crash would; never where it is 0."""

    def __init__(self, at: int) -> None:
        self.at, self.validations = at, 0

    def around_validation(self) -> AbstractContextManager[Any]:
        self.validations += 1
        if self.validations == -self.at:
            raise KeyboardInterrupt
        return nullcontext()

    def before_step(self, step: int) -> None:
        if step == self.at:
            raise KeyboardInterrupt


def train(folder: Path, kind: Any, optimizer: Any, at: int = 0) -> tuple[nn.Module, PruningSchedule, list[float]]:
    rounds = {"rounds": 3, "rewind_lr": True} if kind == "iterative" else {"every": 2, "end": 6}
    schedule = ScheduleSettings(kind, unit="step", regrow=True, freeze=10, **rounds)
    model = net()
    chart = trace(model, (torch.zeros(2, 3, 8, 8),))
    part = PruningSchedule(schedule, Plan(chart, np.ones(chart.n_labels, bool)), Turning(schedule))
    history = fit(
        model,
        splits(),
        TrainSettings(epochs=3, lr=0.02, optimizer=optimizer),
        device=CPU,
        seed=1,
        batch=16,
        callbacks=[part, LearningRateRewinding(schedule), Stopping(at)],
        checkpoints=Checkpoints(folder, CheckpointSettings(every_steps=1), log=lambda _: None),
    )
    return model, part, [row.validation_loss for row in history.rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer", "moments"),
    [("linear", "sgd", (-3, -1, *range(2, 13, 2))), ("iterative", "adam", (-2, *range(3, 13, 2)))],
)
def test_resumed_is_uninterrupted(kind: Any, optimizer: Any, moments: tuple[int, ...], tmp_path: Path) -> None:
    whole, part, losses = train(tmp_path / "whole", kind, optimizer)
    assert sum(change.regrown for change in part.changes) > 0
    for at in moments:  # of four steps in an epoch
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / str(at), kind, optimizer, at)
        again, resumed, same = train(tmp_path / str(at), kind, optimizer)
        assert same == losses, at
        assert np.array_equal(resumed.plan.keep, part.plan.keep)
        assert resumed.changes == part.changes
        pairs = zip(whole.state_dict().values(), again.state_dict().values(), strict=True)
        assert all(torch.equal(first, second) for first, second in pairs), at

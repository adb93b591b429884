"""Training that leaves the masks when the plan is final, and goes on with the compact model as if it had not."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_models import CPU, splits

import prunekit
from prunekit.compaction.compact_model import spread_
from prunekit.errors import PlanError
from prunekit.masks.scheduled_masks import Planner
from prunekit.measure.verification import verify
from prunekit.planning.plan import Plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import AverageSettings, CheckpointSettings, DistillSettings, FeatureSettings, TrainSettings
from prunekit.training.callbacks.callback import Callback, History
from prunekit.training.callbacks.pruning_schedule import PruningSchedule
from prunekit.training.callbacks.selection import CallbackInputs, build_callbacks
from prunekit.training.checkpoints import Checkpoints
from prunekit.training.loop import fit
from prunekit.training.optimizers import transfer_run

SETTINGS = TrainSettings(
    epochs=3,
    lr=0.05,
    nesterov=True,
    accumulate=2,
    average=AverageSettings(decay=0.9),
    distill=DistillSettings(features=FeatureSettings(("norm",))),
)


class Net(nn.Module):
    """Shortcuts, BatchNorm and one weight under two names, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.two.weight = self.one.weight
        self.branch = nn.Sequential(nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1))
        self.last = nn.BatchNorm2d(8)
        self.fc = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x.double())).relu()
        x = x + self.two(self.one(x).relu())
        x = x + self.last(self.branch(x))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


@dataclass
class ToFinal(Planner):
    final: Plan

    def plan(self, model: nn.Module, stage: Any, before: Plan) -> Plan:
        return self.final if stage.progress >= 1 else before


@pytest.fixture(scope="module", params=["narrower", "a block less"])
def plan(request: pytest.FixtureRequest) -> Plan:
    settings = PruneSettings(BudgetSettings(channels=0.5))
    found = prunekit.plan(net(), (torch.zeros(2, 3, 8, 8),), settings=settings)
    if request.param == "narrower":
        return found
    (branch,) = found.channel_map.branches.found
    keep = found.keep.copy()
    keep[branch.labels] = False
    found = replace(found, keep=keep)
    assert found.gone
    return found


class Stops(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def after_step(self, step: int, made: bool) -> None:
        if step == self.at:
            raise KeyboardInterrupt


class Run:
    """Three epochs of two steps each, in which the plan is final after some of them."""

    def __init__(self, plan: Plan, end: int, folder: Path | None = None, stop: int = 0) -> None:
        self.plan, self.folder, self.stop = plan, folder, stop
        self.schedule = PruningSchedule(
            ScheduleSettings("linear", unit="step", end=end, rounds=2) if end else ScheduleSettings("oneshot"),
            Plan(plan.channel_map, plan.keep | True),
            ToFinal(plan),
        )

    def fit(self, name: str, model: nn.Module, parts: list[Callback], sources: dict[str, Any], **more: Any) -> History:
        images = splits(100)
        asked = build_callbacks(SETTINGS, CallbackInputs(images, 25, net(), **sources))
        places = None if self.folder is None else Checkpoints(self.folder / name, CheckpointSettings(every_steps=1))
        return fit(
            model,
            images,
            SETTINGS,
            device=CPU,
            seed=1,
            batch=25,
            callbacks=[*parts, *asked, Stops(self.stop)],
            checkpoints=places,
            **more,
        )

    def masked(self) -> tuple[nn.Module, History]:
        """All of it under masks."""
        model = net()
        return model, self.fit("masked", model, [self.schedule], {"masks": lambda: self.schedule.plan})

    def early(self) -> tuple[nn.Module, History]:
        """The rest with the compact model."""
        model = net()
        first = self.fit(
            "masked",
            model,
            [self.schedule],
            {"masks": lambda: self.schedule.plan},
            until=lambda: self.schedule.masks.is_final,
        )
        assert first.paused is not None
        small = prunekit.compact(model, self.plan)
        return small, self.fit("compact", small, [], {"cut": self.plan}, begin=transfer_run(first.paused, self.plan))


@pytest.mark.parametrize("end", [0, 3, 4], ids=["at once", "within an epoch", "between epochs"])
def test_losses_and_weights_are_those_of_masked_training(plan: Plan, end: int) -> None:
    masked, under_masks = Run(plan, end).masked()
    small, compact = Run(plan, end).early()
    assert [row.epoch for row in compact.rows] == [1, 2, 3]
    for row, other in zip(compact.rows, under_masks.rows, strict=True):
        for key in ("lr", "train_loss", "train_score", "validation_loss", "validation_score", "skipped"):
            assert getattr(row, key) == pytest.approx(getattr(other, key), rel=1e-9), (row.epoch, key)
    assert compact.best_epoch == under_masks.best_epoch
    for name, value in prunekit.compact(masked, plan).state_dict().items():
        torch.testing.assert_close(small.state_dict()[name], value, rtol=1e-8, atol=1e-10, msg=name)
    assert small.get_parameter("one.weight").shape == (4, 4, 1, 1)
    assert small.get_submodule("two").weight is small.get_submodule("one").weight


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_a_killed_run_goes_on_before_and_after_the_masks_are_left(plan: Plan, stop: int, tmp_path: Path) -> None:
    whole, history = Run(plan, 3, tmp_path / "whole").early()
    with pytest.raises(KeyboardInterrupt):
        Run(plan, 3, tmp_path / "killed", stop).early()
    assert (tmp_path / "killed" / "compact").exists() == (stop > 4)  # a checkpoint follows a step
    resumed, again = Run(plan, 3, tmp_path / "killed").early()
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    assert [row.train_loss for row in again.rows] == [row.train_loss for row in history.rows]


def test_a_compact_models_weights_go_back_to_their_places(plan: Plan) -> None:
    model = net()
    small = prunekit.compact(model, plan)
    with torch.no_grad():
        for number, tensor in enumerate((*small.parameters(), *small.buffers())):
            tensor.copy_(torch.rand_like(tensor.double()) + number)
    variance = model.norm.running_var.clone()
    spread_(model, small, plan)
    for name, value in prunekit.compact(model, plan).state_dict().items():
        assert torch.equal(small.state_dict()[name], value), name
    for name, parameter in model.named_parameters():
        mask = plan.mask(name)
        assert mask is not None or name in ("fc.bias",)
        assert mask is None or not (parameter * ~mask).any()
    gone = ~plan.keep[plan.channel_map.labels["norm.running_var"][0]]
    assert torch.equal(model.norm.running_var[torch.from_numpy(gone)], variance[torch.from_numpy(gone)])
    assert verify(model, small, plan, [(torch.rand(2, 3, 8, 8),)]).max_relative_difference < 1e-12


def test_models_that_do_not_belong_together_are_refused_and_nothing_changes(plan: Plan) -> None:
    model, before = net(), copy.deepcopy(net().state_dict())
    with pytest.raises(PlanError, match=r"stem.weight: expected \(4, 3, 3, 3\) in the compact model, got"):
        spread_(model, net(), plan)
    larger = prunekit.compact(model, plan)
    larger.register_buffer("more", torch.zeros(1))
    with pytest.raises(PlanError, match="more: in the compact model, but not in the dense one"):
        spread_(model, larger, plan)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

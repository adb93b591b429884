"""A plan that changes while a model is trained: nested, exact, regrowing, frozen, and resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training_models import CPU, net, splits

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.compaction.compact_model import compact
from prunekit.criteria.scoring import score
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import masked
from prunekit.masks.scheduled_masks import Planner
from prunekit.measure.verification import verify
from prunekit.planning.candidates import PlanBounds
from prunekit.planning.plan import Plan
from prunekit.planning.schedules import ScheduleStep, settings_at_step, share_kept
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import TrainSettings
from prunekit.training.callbacks.callback import Callback, ContextCallback, History, TrainingRun
from prunekit.training.callbacks.pruning_schedule import LearningRateRewinding, PruningSchedule, steps_per_epoch
from prunekit.training.loop import fit
from prunekit.training.optimizers import build_schedule

SETTINGS = TrainSettings(epochs=4, lr=0.05)  # of 4 steps each


def chart_of(model: nn.Module) -> ChannelMap:
    return trace(model, (torch.zeros(2, 3, 8, 8),))


def dense(chart: ChannelMap) -> Plan:
    return Plan(chart, np.ones(chart.n_labels, dtype=bool))


@dataclass
class ByWeight(Planner):
    """By the l2 norm of the weights of the moment."""

    schedule: ScheduleSettings
    share: float = 0.4
    scores: Callable[[nn.Module, ChannelMap], Any] = lambda model, chart: score("l2", model, chart)
    plans: list[tuple[ScheduleStep, Plan]] = field(default_factory=list)

    def plan(self, model: nn.Module, stage: ScheduleStep, before: Plan) -> Plan:
        chart = before.channel_map
        asked = PruneSettings(BudgetSettings(macs=self.share), scope="global", schedule=self.schedule)
        most = np.ones_like(before.keep) if self.schedule.regrow else before.keep
        found = make_plan(
            chart, self.scores(model, chart), settings_at_step(asked, stage, {"macs": 1.0}), bounds=PlanBounds(most)
        )
        self.plans.append((stage, found))
        return found


@dataclass
class Watch(Callback):
    """After every step and in every validation: zeros and gradients of the plan in force."""

    part: PruningSchedule
    model: nn.Module
    kept: list[int] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)

    def active(self, training: TrainingRun) -> Any:
        self.optimizer = training.optimizer
        return super().active(training)

    def before_step(self, step: int) -> None:
        self.lr.append(self.optimizer.param_groups[0]["lr"])
        for name, parameter in self.model.named_parameters():
            mask = self.part.plan.mask(name)
            if mask is not None:
                assert parameter.grad is not None
                assert (parameter.grad[~mask.expand(parameter.shape)] == 0).all(), name

    def after_step(self, step: int, made: bool) -> None:
        self.kept.append(int(self.part.plan.keep.sum()))
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            mask = self.part.plan.mask(name)
            if mask is not None and not name.endswith("running_var"):
                assert (tensor[~mask.expand(tensor.shape)] == 0).all(), name


def run(
    schedule: ScheduleSettings, settings: TrainSettings = SETTINGS, *more: Callback, planner: Planner | None = None
) -> tuple[nn.Module, PruningSchedule, Watch, History]:
    model = net()
    part = PruningSchedule(schedule, dense(chart_of(model)), planner or ByWeight(schedule))
    watch = Watch(part, model)
    history = fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[part, watch, *more])
    assert count_hooks(model) == 0
    return model, part, watch, history


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("kind", ["iterative", "linear", "exponential", "cubic"])
def test_plans_are_nested_exact_and_end_where_one_shot_would(kind: Any, optimizer: Any) -> None:
    schedule = ScheduleSettings(kind, unit="step", begin=1, end=9, rounds=4)
    planner = ByWeight(schedule)
    settings = TrainSettings(epochs=4, lr=0.01, optimizer=optimizer)
    model, part, watch, history = run(schedule, settings, planner=planner)
    stages = [stage.step for stage, _ in planner.plans]
    assert stages[-1] == 9
    assert len(stages) == 4
    keeps = [plan.keep for _, plan in planner.plans]
    assert all(not (after & ~before).any() for before, after in pairwise(keeps))
    assert (np.diff(watch.kept) <= 0).all()
    assert watch.kept[-1] < watch.kept[0]
    chart = part.plan.channel_map
    assert chart.macs(part.plan.keep) <= 0.4 * chart.macs()
    assert sum(change.pruned for change in part.changes) == part.plan.removed
    assert all(change.regrown == 0 for change in part.changes)
    small = compact(model, part.plan)
    assert verify(model, small, part.plan, [(torch.randn(3, 3, 8, 8),)]).max_relative_difference < 1e-12
    assert history.best_epoch >= 3  # epoch 3 has step 9; before it the model was wider


def test_all_at_once_at_the_beginning_is_what_masks_from_the_start_are() -> None:
    model, part, _, _ = run(ScheduleSettings("oneshot"))
    plain = net()
    under = ContextCallback(lambda training: masked(plain, part.plan, training.optimizer, restore=False))
    fit(plain, splits(), SETTINGS, device=CPU, seed=1, batch=16, callbacks=[under])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_regrown_channels_come_back_until_the_masks_freeze() -> None:
    """Scores that turn around: what was worst becomes best, so that all that is pruned wants to come back."""
    schedule = ScheduleSettings("linear", unit="step", begin=0, end=4, every=2, regrow=True, freeze=8)
    turns: list[Any] = []

    def scores(model: nn.Module, chart: ChannelMap) -> Any:
        turns.append(1)
        rising = np.arange(1.0, chart.n_labels + 1)
        return rising if len(turns) % 2 else rising[::-1].copy()

    planner = ByWeight(schedule, scores=scores)
    _, part, watch, _ = run(schedule, SETTINGS, planner=planner)
    assert [change.step for change in part.changes] == [2, 4, 6, 8]
    assert part.changes[0].regrown == 0
    assert all(change.regrown > 0 for change in part.changes[1:])
    assert part.changes[2].pruned == part.changes[2].regrown  # at the same budget
    assert len(set(watch.kept[8:])) == 1
    chart = part.plan.channel_map
    assert chart.macs(part.plan.keep) <= 0.4 * chart.macs()


@dataclass
class SingleWeights(Planner):
    """The smallest weights of every layer, as Zhu & Gupta 2017 prune them; weights that are zero stay so."""

    sparsity: float

    def plan(self, model: nn.Module, stage: ScheduleStep, before: Plan) -> Plan:
        kept = share_kept("cubic", stage.progress, 1 - self.sparsity)
        found = {}
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                size = weight.detach().abs().flatten()
                found[name] = torch.zeros(size.shape, dtype=torch.bool)
                found[name][size.topk(round(kept * size.numel())).indices] = True
                found[name] = found[name].view(weight.shape)
        return Plan(before.channel_map, before.keep, element_masks=found)


def test_masks_of_single_weights_follow_a_schedule_alike() -> None:
    schedule = ScheduleSettings("cubic", unit="step", begin=0, end=8, every=2)
    model = net()
    planner = SingleWeights(0.9)
    part = PruningSchedule(schedule, dense(chart_of(model)), planner)
    watch, zeros = Watch(part, model), []

    class Zeros(Callback):
        def after_step(self, step: int, made: bool) -> None:
            zeros.append(float((model[0].weight == 0).float().mean()))

    settings = TrainSettings(epochs=4, lr=0.01, optimizer="adam")
    fit(model, splits(), settings, device=CPU, seed=1, batch=16, callbacks=[part, watch, Zeros()])
    asked = [0.9 * (1 - (1 - step / 8) ** 3) for step in (2, 4, 6, 8)]
    # The pruning steps 4 and 8 come after an epoch.
    assert [zeros[at] for at in (1, 4, 5, 8)] == pytest.approx(asked, abs=0.005)
    assert zeros[-1] == pytest.approx(0.9, abs=0.005)
    assert [change.step for change in part.changes] == [2, 4, 6, 8]


def test_stages_between_epochs_come_after_the_validation() -> None:
    seen: list[tuple[str, int]] = []

    class Order(Callback):
        def around_validation(self) -> Any:
            seen.append(("validated", int(part.plan.keep.sum())))
            return super().around_validation()

    schedule = ScheduleSettings("linear", begin=1.0, end=3.0, rounds=2)
    model = net()
    part = PruningSchedule(schedule, dense(chart_of(model)), ByWeight(schedule), lambda it: seen.append(("changed", 0)))
    history = fit(model, splits(), SETTINGS, device=CPU, seed=1, batch=16, callbacks=[part, Order()])
    assert [what for what, _ in seen] == ["validated"] * 2 + ["changed", "validated", "changed", "validated"]
    assert history.best_epoch == 4
    assert part.eligible_for_best(1)


def test_missing_batches_do_not_keep_the_final_plan_away() -> None:
    schedule = ScheduleSettings("linear", unit="step", begin=0, end=3, rounds=1)
    model = net()
    part = PruningSchedule(schedule, dense(chart_of(model)), ByWeight(schedule))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with part.active(TrainingRun(model, optimizer, CPU, 4, 1)):
        part.after_step(1, True)
        part.after_step(2, True)  # of four: the other batches could not be read
        assert not part.eligible_for_best(1)
        with part.around_validation():
            pass
        assert part.eligible_for_best(1)


def test_the_learning_rate_is_rewound_in_each_round() -> None:
    schedule = ScheduleSettings("iterative", rounds=2, rewind_lr=True)
    settings = TrainSettings(epochs=4, lr=0.1, warmup=0.0)
    _, _, watch, _ = run(schedule, settings, LearningRateRewinding(schedule))
    assert watch.lr[:8] == pytest.approx(watch.lr[8:])
    assert watch.lr[0] == pytest.approx(0.1)
    assert watch.lr[7] < 0.01
    _, _, once, _ = run(ScheduleSettings("iterative", rounds=2), settings)
    assert all(after < before for before, after in pairwise(once.lr))


def test_each_round_warms_up_by_its_own_share() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, seen = build_schedule(optimizer, 14, 0.5, (4,)), []
    for _ in range(15):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen[:5] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 1 / 6])
    assert seen[4:9] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    assert seen[9] == pytest.approx(1.0)
    assert seen[14] == pytest.approx(0.0)


class Halfway(Callback):
    """Notes the state of a schedule and its model after a step."""

    def __init__(self, part: PruningSchedule, model: nn.Module, at: int) -> None:
        self.part, self.model, self.at = part, model, at

    def after_step(self, step: int, made: bool) -> None:
        if step == self.at:
            self.state = copy.deepcopy((self.part.state_dict(), self.model.state_dict()))


@pytest.mark.parametrize("at", [3, 6, 11])
def test_a_state_is_put_back_with_plan_values_and_changes(at: int) -> None:
    schedule = ScheduleSettings("linear", unit="step", begin=0, end=9, every=2, regrow=True, freeze=12)
    model = net()
    chart = chart_of(model)
    part = PruningSchedule(schedule, dense(chart), ByWeight(schedule))
    saved = Halfway(part, model, at)
    fit(model, splits(), SETTINGS, device=CPU, seed=1, batch=16, callbacks=[part, saved])
    state, weights = saved.state
    fresh = net(3)
    again = PruningSchedule(schedule, dense(chart), ByWeight(schedule))
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1)
    with again.active(TrainingRun(fresh, optimizer, CPU, 4, 4)):
        fresh.load_state_dict(weights)
        again.load_state_dict(state)
        now = again.state_dict()
        assert now["provenance"] == state["provenance"]
        assert now["changes"] == state["changes"]
        assert all(torch.equal(now["held"][name], values) for name, values in state["held"].items())
        assert torch.equal(now["keep"], state["keep"])
        assert all(torch.equal(fresh.state_dict()[name], value) for name, value in weights.items())
        for step in range(at + 1, 13):
            again.after_step(step, True)
            if step % 4 == 0:
                with again.around_validation():
                    pass
        assert again.eligible_for_best(4)
        assert [change.step for change in again.changes] == [change.step for change in part.changes]


class Steps(Callback):
    def active(self, training: TrainingRun) -> AbstractContextManager[Any]:
        self.steps = training.steps
        return nullcontext()


def test_steps_of_an_epoch_are_those_that_training_makes() -> None:
    for batch, accumulate in ((16, 1), (16, 3), (100, 1), (7, 2)):
        settings, seen = TrainSettings(epochs=1, lr=0.01, accumulate=accumulate), Steps()
        fit(net(), splits(), settings, device=CPU, seed=1, batch=batch, callbacks=[seen])
        assert seen.steps == steps_per_epoch(settings, len(splits().train), batch)

"""Pruning in a loop of one's own: the built-in loop's plans, exact zeros, resumed, finished, and with its neighbors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from process_group import together
from pruner_loops import MOMENTUM, Net, X, Y, batch, count_all, loop, small_net, step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_models import CPU, net, splits

import prunekit as pk
from prunekit.errors import ModelError, UsageError
from prunekit.planning.plan import Plan
from prunekit.pruning.plan_search import CriterionInputs, Planned, PlanSearch
from prunekit.pruning.prune import Request
from prunekit.pruning.pruner import Pruner
from prunekit.pruning.schedule_planner import ChannelPlanner, StepStatistics
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import BudgetSettings, PruneSettings, ScheduleSettings
from prunekit.settings.train import ClampSettings, TrainSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.statistics.taylor_terms import STEPS, StepGradients, collect_gradients
from prunekit.training.callbacks.callback import Callback, TrainingRun
from prunekit.training.callbacks.pruning_schedule import PruningSchedule
from prunekit.training.loop import fit

ONE_BY_ONE = Target(block=1)


class Signs(Optimizer):
    """An optimizer of one's own: signs of momentum, and a decay that would move what is zero in no direction."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 0.1)
                    parameter.add_(momentum.sign() + 0.1, alpha=-group["lr"])  # moves everything


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": MOMENTUM,
    "adam": partial(Adam, lr=1e-2, weight_decay=1e-2),
    "adamw, fused": partial(AdamW, lr=1e-2, fused=True),
    "adamw, foreach": partial(AdamW, lr=1e-2, foreach=True),
    "own": Signs,
}


def require_zeros(model: nn.Module, plan: Plan) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        mask = plan.mask(name)
        if mask is not None and not name.endswith("running_var"):
            assert (tensor[~mask.expand(tensor.shape)] == 0).all(), name


class Drives(Callback):
    """A pruner in the built-in loop, in the place of its own part."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def active(self, training: TrainingRun) -> Any:
        example = torch.zeros(2, 3, 8, 8)
        self.pruner = Pruner(training.model, training.optimizer, example, **self.arguments)
        return self.pruner

    def after_step(self, step: int, made: bool) -> None:
        self.pruner.step()
        self.plan = self.pruner.plan


class Last(Callback):
    """The weights after the last step, whichever are kept as the best."""

    def active(self, training: TrainingRun) -> Any:
        self.model = training.model
        return super().active(training)

    def after_step(self, step: int, made: bool) -> None:
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.mark.parametrize("schedule", [ScheduleSettings("linear", rounds=3), ScheduleSettings("iterative", rounds=2)])
def test_plans_and_weights_are_those_of_the_built_in_loop(schedule: ScheduleSettings) -> None:
    settings, images = TrainSettings(epochs=2, lr=0.05), splits(128)  # of 8 steps each
    at: dict[str, Any] = {"device": CPU, "seed": 1, "batch": 16}
    drives = Drives(channels=0.4, scope="global", schedule=schedule, steps=6, begin=1)
    theirs = net()
    fit(theirs, images, settings, callbacks=[drives, first := Last()], **at)
    model = net()
    asked = PruneSettings(
        BudgetSettings(channels=0.4),
        scope="global",
        schedule=ScheduleSettings(schedule.kind, unit="step", begin=1, end=6, rounds=schedule.rounds),
    )
    planned = PlanSearch.trace(model, (torch.zeros(2, 3, 8, 8),), asked).find()
    assert asked.schedule is not None
    dense = Plan(planned.plan.channel_map, planned.plan.keep | True)
    planner = ChannelPlanner(asked, planned.plan, planned.scores, StepStatistics(), seed=0)
    part = PruningSchedule(asked.schedule, dense, planner)
    fit(model, images, settings, callbacks=[part, second := Last()], **at)
    assert part.changes == drives.pruner.changes
    assert np.array_equal(part.plan.keep, drives.plan.keep)
    assert all(torch.equal(value, first.weights[name]) for name, value in second.weights.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_are_exact_and_training_goes_on_with_the_compact_model(name: str) -> None:
    def begun() -> tuple[nn.Module, Optimizer, CosineAnnealingLR, Pruner]:
        model = Net()
        optimizer = OPTIMIZERS[name](model.parameters())
        pruner = Pruner(model, optimizer, X[:2], macs=0.4, steps=6, criterion="taylor")
        return model, optimizer, CosineAnnealingLR(optimizer, 12), pruner

    ends = []
    for compact_early in (False, True):
        model, optimizer, rates, pruner = begun()
        trained = model
        for number in range(12):
            step(trained, optimizer, number)
            rates.step()
            if trained is model:
                pruner.step()
                require_zeros(model, pruner.plan)
            if compact_early and pruner.done and trained is model:
                assert number == 5
                trained, same = pruner.finish()
                assert same is optimizer
        ends.append(trained if compact_early else pruner.finish()[0])
        assert pruner.verification is not None
        assert pruner.verification.max_relative_difference < 1e-12
        assert pruner.plan.channel_map.macs(pruner.plan.keep) <= 0.4 * pruner.plan.channel_map.macs()
        assert count_all(model, optimizer) == count_all(ends[-1], optimizer) == 0
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in ends[-1].parameters()}
    if name != "own":  # whose signs of what is next to nothing are noise
        for (key, one), other in zip(ends[0].state_dict().items(), ends[1].state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9, msg=key)


RESUMED: dict[str, dict[str, Any]] = {
    "taylor": {"criterion": "taylor", "scope": "global", "steps": 9},
    "movement": {"schedule": ScheduleSettings("iterative", score="movement", rounds=3), "steps": 9, "begin": 2},
    "regrown": {
        "schedule": ScheduleSettings("linear", unit="step", every=2, regrow=True, freeze=10),
        "steps": 6,
        "scope": "global",
        "criterion": "taylor",
    },
    "elimination": {"calibration": X.double(), "steps": 6},
    "grown by gradients": {
        "sparsity": 0.7,
        "schedule": ScheduleSettings("cubic", unit="step", every=2, regrow=True, freeze=10),
        "steps": 6,
        "macs": None,
    },
    "behind the masks": {
        "pattern": "2:4",
        "schedule": ScheduleSettings("linear", unit="step", every=2, regrow=True, gradients="straight_through"),
        "steps": 10,
        "macs": 0.6,
    },
    "moving weights": {
        "pattern": PatternSettings("kernel", 0.6, scope="global"),
        "schedule": ScheduleSettings("linear", unit="step", every=2, regrow=True, score="movement", freeze=10),
        "steps": 6,
        "macs": 0.7,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_is_uninterrupted(name: str) -> None:
    def begun(seed: int) -> tuple[nn.Module, Optimizer, AveragedModel, Pruner]:
        model = Net(seed)
        optimizer = AdamW(model.parameters(), lr=0.02)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        arguments: dict[str, Any] = {"macs": 0.4, "average": average, "clamp_weight_grad": 0.1} | RESUMED[name]
        return model, optimizer, average, Pruner(model, optimizer, X[:2], **arguments)

    def train(it: tuple[nn.Module, Optimizer, AveragedModel, Pruner], numbers: range) -> Iterator[bytes]:
        model, optimizer, average, pruner = it
        for number in numbers:
            step(model, optimizer, number)
            average.update_parameters(model)
            pruner.step()
            require_zeros(model, pruner.plan)
            require_zeros(average.module, pruner.plan)
            file = io.BytesIO()
            torch.save([each.state_dict() for each in it], file)
            yield file.getvalue()

    whole = begun(0)
    saved = list(train(whole, range(13)))
    assert whole[3].done
    if name == "regrown":
        assert sum(change.regrown for change in whole[3].changes)
    if whole[3].settings.pattern is not None:
        assert sum(change.weights_regrown for change in whole[3].changes)
    for at in (0, 3, 4, 8, 11):
        again = begun(7)
        for each, state in zip(again, torch.load(io.BytesIO(saved[at]), weights_only=True), strict=True):
            each.load_state_dict(state)
        assert list(train(again, range(at + 1, 13)))
        assert again[3].changes == whole[3].changes
        assert again[3].plan.digest == whole[3].plan.digest
        assert again[3].clamped == whole[3].clamped
        first, second = (torch.load(io.BytesIO(saved[-1])), [each.state_dict() for each in again])
        for one, other in zip(first[::2], second[::2], strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one), at
    small, _ = whole[3].finish()
    assert whole[3].average is not None
    assert {key: value.shape for key, value in whole[3].average.module.state_dict().items()} == {
        key: value.shape for key, value in small.state_dict().items()
    }


SCALED: dict[str, tuple[Callable[[Any], Optimizer], float | None]] = {
    "plain": (partial(SGD, lr=0.0), None),
    "scaled": (partial(SGD, lr=0.0), 2.0**12),
    "scaled, fused": (partial(AdamW, lr=0.0, fused=True), 2.0**12),
    "closure": (partial(SGD, lr=0.0), None),
}


@pytest.mark.parametrize("name", SCALED)
def test_gradients_are_those_of_the_steps_with_and_without_a_scale(name: str) -> None:
    make, scale = SCALED[name]
    model = small_net()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with StepGradients(model, pk.trace(model, (X[:2],)), optimizer) as seen:
        for number in range(3):

            def backward(images: Tensor, labels: Tensor) -> float:
                optimizer.zero_grad()
                for part in (slice(4), slice(4, None)):  # micro-batches
                    loss = F.cross_entropy(model(images[part]), labels[part]) / 2
                    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                return loss.item()

            if name == "closure":
                optimizer.step(partial(backward, *batch(number)))
            else:
                backward(*batch(number))
                scaler.step(optimizer)
                scaler.update()
        found = seen.terms()
        assert seen.terms().terms.keys() == found.terms.keys()  # until the next step the same again
    assert count_all(model, optimizer) == 0
    wanted = collect_gradients(model, [batch(n) for n in range(3)], F.cross_entropy)
    for key, values in found.terms.items():
        np.testing.assert_allclose(values, wanted.terms[key], rtol=1e-3, atol=1e-6)


def test_gradients_of_many_steps_are_spread_over_all_of_them() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = SGD(model.parameters(), lr=0.0)
    with StepGradients(model, pk.trace(model, (torch.ones(1, 2),)), optimizer) as seen:
        for number in range(2 * STEPS + 5):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(number))
            optimizer.step()
        terms = seen.terms().terms["0.bias", 0]
        steps = terms[:, 0] / model[0].bias[0].item()
        np.testing.assert_allclose(
            steps, np.arange(0, 2 * STEPS + 5, 4), rtol=1e-5
        )  # every second of twice as many, and so on


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_do_not_count(fused: bool) -> None:
    model = small_net()
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-20)
    pruner = Pruner(
        model, optimizer, X[:2], macs=0.5, steps=4, criterion="taylor", scaler=scaler, clamp_activation_grad=1.0
    )
    counts = []
    for number in range(12):
        images, labels = batch(number)
        scaler.scale(100 * F.cross_entropy(model(images), labels)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pruner.step()
        counts.append(pruner.step_count)
        require_zeros(model, pruner.plan)
    skipped = 12 - counts[-1]
    assert 0 < skipped < 6
    assert counts == [0] * skipped + list(range(1, counts[-1] + 1))
    assert pruner.changes[-1].step == 4
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    pruner.finish()


def test_accelerate_accumulates_and_its_steps_count() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model, optimizer = accelerator.prepare(small_net(), AdamW(small_net().parameters(), lr=1e-2))
        with pytest.raises(UsageError, match="this AdamW has none of them; make it from"):
            Pruner(model, optimizer, X[:2], macs=0.5, steps=4)
        inside = small_net()
        model, optimizer, rates = accelerator.prepare(
            inside, inner := AdamW(inside.parameters(), lr=1e-2), CosineAnnealingLR(inner, 20)
        )
        pruner = Pruner(model, optimizer, X[:2], macs=0.5, steps=4, criterion="taylor")
        for number in range(12):
            images, labels = batch(number)
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
            pruner.step()
            assert pruner.step_count == (number + 1) // 2
        assert [change.step for change in pruner.changes] == [1, 2, 3, 4]
        small, same = pruner.finish()
        assert same is optimizer
        small = accelerator.prepare_model(small)
        before = [parameter.clone() for parameter in small.parameters()]
        with accelerator.accumulate(small):
            accelerator.backward(small(X).square().mean())
            optimizer.step()
        with accelerator.accumulate(small):
            accelerator.backward(small(X).square().mean())
            optimizer.step()
        assert any(not torch.equal(one, other) for one, other in zip(before, small.parameters(), strict=True))
        assert count_all(inside, inner) == 0
    finally:
        accelerator.free_memory()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


def _replicated() -> tuple[Any, ...]:
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(Net(rank))  # which gives all the first one's weights
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    told: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {"criterion": "taylor", "scope": "global", "on_change": told.append}
    pruner = Pruner(model, optimizer, X[:2], macs=0.4, steps=4, **arguments)
    for number in range(6):
        step(model, optimizer, 10 * number + rank)
        pruner.step()
    small, _ = pruner.finish()
    return (
        pruner.plan.keep,
        [change.step for change in pruner.changes],
        [*small.parameters()],
        count_all(model, optimizer),
        [row["step"] for row in told],
    )


@pytest.mark.slow
def test_processes_follow_one_plan(tmp_path: Path) -> None:
    first, second = together(2, tmp_path, _replicated)
    assert np.array_equal(first[0], second[0])
    assert not first[0].all()
    assert first[1] == second[1]
    assert all(torch.equal(one, other) for one, other in zip(first[2], second[2], strict=True))
    assert first[3] == second[3] == 0
    assert (first[4], second[4]) == (first[1], [])  # a logger needs to be told once


@pytest.mark.parametrize(
    "arguments",
    [
        {"criterion": "apoz", "calibration": X, "scope": "global"},
        {"criterion": "taylor2", "calibration": [batch(1), batch(2)], "loss": F.cross_entropy},
        {"criterion": "obd", "calibration": [batch(1)], "loss": F.cross_entropy, "scope": "global"},
        {"calibration": [(X, Y)]},
        {"criterion": "l2", "gradient_masks": False, "clamp_weight_grad": ClampSettings(0.1, "norm")},
        {"schedule": "exponential", "ratios": {"0": 0.5}, "criterion": "random", "round_to": 2},
    ],
    ids=["apoz", "taylor2", "obd", "elimination", "clamped", "ratios"],
)
def test_criteria_and_options(arguments: dict[str, Any]) -> None:
    model = small_net()
    optimizer = MOMENTUM(model.parameters())
    pruner = Pruner(model, optimizer, None if "calibration" in arguments else X[:2], macs=0.5, steps=4, **arguments)
    masked_gradients = any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert masked_gradients is arguments.get("gradient_masks", True)
    for number in range(5):
        step(model, optimizer, number)
        pruner.step()
        require_zeros(model, pruner.plan)
    assert model.training
    assert all(0 <= share <= 1 for shares in pruner.clamped.values() for share in shares.values())
    assert bool(pruner.clamped) is ("clamp_weight_grad" in arguments)
    assert pruner.sparsity.channels > 0
    small, _ = pruner.finish()
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_budget_of_time_is_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    left, prepare, find = [0.5, 0.7], Request.prepare, PlanSearch.find

    def prepared(request: Request) -> None:
        request.settings = replace(request.settings, budget=BudgetSettings(macs=left.pop(0)))
        prepare(request)

    def measured(search: PlanSearch, inputs: CriterionInputs) -> Planned:
        """Comes to another plan each time, as measuring does."""
        found = find(search, inputs)
        budgets = {"speedup": {"asked": 1.5, "left": 1.5, "dense": 1.0}}
        plan = replace(found.plan, provenance={**found.plan.provenance, "budgets": budgets})
        return replace(found, plan=plan)

    monkeypatch.setattr(Request, "prepare", prepared)
    monkeypatch.setattr(PlanSearch, "find", measured)
    model = small_net()
    optimizer = MOMENTUM(model.parameters())
    with pytest.raises(UsageError, match="the final plan for a budget of time is measured then, got 'taylor'"):
        Pruner(model, optimizer, X[:2], speedup=1.5, steps=4, criterion="taylor")
    pruner = Pruner(model, optimizer, X[:2], speedup=1.5, steps=4, target=ONE_BY_ONE)
    state = pruner.state_dict()
    loop(model, optimizer, pruner, range(4))
    assert "speedup" in pruner.plan.provenance["budgets"]
    assert [set(change.shares) for change in pruner.changes] == [{"macs"}] * 4
    again = small_net()
    resumed = Pruner(again, other := MOMENTUM(again.parameters()), X[:2], speedup=1.5, steps=4, target=ONE_BY_ONE)
    resumed.load_state_dict(state)
    loop(again, other, resumed, range(4))
    assert resumed.plan.digest == pruner.plan.digest


@pytest.mark.slow
def test_a_compiled_model_is_pruned_if_it_has_not_run_yet() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    pruner = Pruner(compiled, optimizer := MOMENTUM(model.parameters()), X[:2], macs=0.5, steps=2)
    loop(compiled, optimizer, pruner, range(3))
    require_zeros(model, pruner.plan)
    pruner.close()
    with pytest.raises(ModelError, match="has compiled the model already, and hooks added later"):
        Pruner(compiled, optimizer, X[:2], macs=0.5, steps=2)
    torch._dynamo.reset()


def test_leaving_gives_back_what_was_pruned_and_leaves_no_hooks() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.0)
    average = AveragedModel(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    with Pruner(model, optimizer, X[:2], macs=0.5, steps=2, average=average) as pruner:
        loop(model, optimizer, pruner, range(3))
        require_zeros(model, pruner.plan)
        assert not all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert count_all(model, optimizer) == count_all(average) == 0
    for it in (model, average.module):
        assert all(torch.equal(value, before[name]) for name, value in it.named_parameters())
    pruner.close()
    for use in (pruner.step, pruner.finish, pruner.state_dict):
        with pytest.raises(UsageError, match=f"{use.__name__}: this pruner is closed"):
            use()


def test_an_average_may_be_any_module_of_the_structure() -> None:
    model = Net()
    optimizer, average = SGD(model.parameters(), lr=0.1), copy.deepcopy(model).requires_grad_(False)
    pruner = Pruner(model, optimizer, X[:2], macs=0.5, steps=2, average=average)
    for number in range(3):
        step(model, optimizer, number)
        for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
            if mean.is_floating_point():
                mean.lerp_(value, 0.5)
        pruner.step()
        require_zeros(average, pruner.plan)
    masked = average.eval()(X)
    small, _ = pruner.finish()
    assert type(pruner.average) is Net
    torch.testing.assert_close(pruner.average(X), masked)
    assert {name: value.shape for name, value in pruner.average.named_parameters()} == {
        name: value.shape for name, value in small.named_parameters()
    }


def test_an_average_is_none_of_the_model_itself() -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for wrong, got in ((model, "got the model itself"), (3, "got int")):
        with pytest.raises(UsageError, match=f"average: expected a module of the model's structure .*; {got}"):
            Pruner(model, optimizer, X[:2], macs=0.5, steps=2, average=wrong)  # type: ignore[arg-type]
    assert count_all(model, optimizer) == 0


def test_an_example_may_be_given_by_name() -> None:
    model = Net()
    pruner = Pruner(model, MOMENTUM(model.parameters()), {"x": X[:2]}, macs=0.5, schedule="oneshot")
    pruner.finish()
    assert pruner.verification is not None
    assert pruner.verification.inputs == 2


def test_all_at_once_is_pruned_when_it_is_made() -> None:
    model = Net()
    pruner = Pruner(model, MOMENTUM(model.parameters()), X[:2], macs=0.5, schedule="oneshot")
    assert pruner.done
    require_zeros(model, pruner.plan)
    assert [row["step"] for row in pruner.rows()] == [0]
    assert "final plan" in str(pruner)
    pruner.finish()


class Fixed(nn.Module):
    """A network whose Python needs all outputs of its last convolution, whose least important half is plain."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem, self.middle, self.last = (nn.Conv2d(inputs, 64, 3, padding=1) for inputs in (3, 64, 64))
        self.classify = nn.Linear(64, 4)
        with torch.no_grad():
            self.last.weight[16:] *= 0.01

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.last(F.relu(self.middle(F.relu(self.stem(x)))))).mean((2, 3))
        return self.classify(x.view(-1, 64) if self.way == "view" else x if x.shape[1] == 64 else 2 * x)


@pytest.mark.parametrize("way", ["view", "width"])
@pytest.mark.parametrize("seed", range(3))
def test_steps_prune_nothing_that_only_their_own_trial_would_lock(way: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Fixed(way)
    optimizer = SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 3, 8, 8)
    limits: dict[str, Any] = {"macs": 0.85, "round_to": 16, "scope": "global", "criterion": "l2"}
    with Pruner(model, optimizer, x, steps=3, schedule=ScheduleSettings("linear", rounds=3), seed=seed, **limits) as p:
        while not p.done:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            p.step()
        small, _ = p.finish()
        assert (p.plan.widths().get("last", (64, 64))[0] < 64) is (way == "view")  # whose size is set
    torch.testing.assert_close(small(x), model(x))

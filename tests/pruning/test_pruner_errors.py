"""Refusals of a pruner in a loop of one's own, and their messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from process_group import together
from pruner_loops import MOMENTUM, Net, X, count_all, loop, small_net, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prunekit as pk
from prunekit.errors import ArtifactError, ModelError, PlanError, UsageError
from prunekit.pruning.pruner import Pruner
from prunekit.settings.pruning import PruneSettings, ScheduleSettings


def test_finishing_early_and_late_says_what_is_missing() -> None:
    model = Net()
    optimizer = MOMENTUM(model.parameters())
    pruner = Pruner(model, optimizer, X[:2], macs=0.5, steps=10, criterion="taylor")
    step(model, optimizer, 0)
    with pytest.raises(UsageError, match=r"made 1 steps, and pruner.step\(\) was never called; call it"):
        pruner.finish()
    pruner.step()
    pruner.step()  # as after a micro-batch
    with pytest.raises(UsageError, match="made 1 of the schedule's 10 steps, so the budget isn't met yet; train on"):
        pruner.finish()
    small, _ = pruner.finish(early=True)
    chart = pruner.plan.channel_map
    assert chart.macs(pruner.plan.keep) <= 0.5 * chart.macs()
    assert "has finished" in repr(pruner)
    with pytest.raises(UsageError, match="step: this pruner has finished: go on with the compact model"):
        pruner.step()
    with pytest.raises(PlanError):
        pk.compact(small, pruner.plan)


def test_a_loop_that_never_calls_step_is_told() -> None:
    model = Net()
    optimizer = MOMENTUM(model.parameters())
    pruner = Pruner(model, optimizer, X[:2], macs=0.5, steps=2)
    for number in range(3):
        step(model, optimizer, number)
    with pytest.raises(UsageError, match=r"schedule's 2 steps are over, and pruner.step\(\) was never called"):
        step(model, optimizer, 3)
    pruner.close()
    pruner = Pruner(model, MOMENTUM(model.parameters()), X[:2], macs=0.5, steps=2)
    loop(model, optimizer, pruner, range(3))  # of another optimizer
    with pytest.raises(UsageError, match="this SGD has made no step, so no plan came into force; give the optimizer"):
        pruner.finish()
    pruner.close()


def test_a_state_of_something_else_is_refused() -> None:
    model = Net()
    arguments: dict[str, Any] = {"macs": 0.5, "steps": 4}
    state = Pruner(model, MOMENTUM(model.parameters()), X[:2], **arguments).state_dict()
    for changed, what in (({"macs": 0.4}, "other settings .budget"), ({"steps": 5}, "other settings .schedule")):
        other = Net()
        pruner = Pruner(other, MOMENTUM(other.parameters()), X[:2], **(arguments | changed))
        with pytest.raises(ArtifactError, match=what):
            pruner.load_state_dict(state)
    other = small_net()
    with pytest.raises(ArtifactError, match="of other channels than this one; make this one of the same model"):
        Pruner(other, MOMENTUM(other.parameters()), X[:2], **arguments).load_state_dict(state)
    with pytest.raises(ArtifactError, match=r"expected what its state_dict.. returned, got one with 'model'"):
        pruner.load_state_dict({"model": {}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "steps: expected how many steps of the optimizer the schedule 'cubic' takes, such as steps=1000"),
        ({"steps": 0}, "steps: expected a number of optimizer steps, at least 1, got 0"),
        ({"steps": 4, "begin": 4}, "begin: expected less than the schedule's end of 4 steps, got 4"),
        ({"steps": 4, "begin": -1}, "begin: expected a number of optimizer steps"),
        ({"steps": 4, "schedule": "cubik"}, "schedule: expected oneshot, .* got 'cubik'; did you mean 'cubic'"),
        (
            {"steps": 4, "schedule": "oneshot"},
            "steps: expected none, because schedule is 'oneshot'.*begin=4 prunes then",
        ),
        ({"schedule": ScheduleSettings(end=3)}, "schedule.unit: expected 'step', because end is given"),
        ({"steps": 4, "schedule": ScheduleSettings(unit="step", end=3)}, "steps: expected nothing beside schedule.end"),
        ({"steps": 4, "schedule": ScheduleSettings("iterative", rewind_lr=True)}, "schedule.rewind_lr: expected false"),
        (
            {"schedule": ScheduleSettings("linear", unit="step", end=9, every=2, rounds=3)},
            "^schedule.every: expected nothing beside rounds",
        ),
        (
            {"schedule": ScheduleSettings("oneshot", unit="step", score="movement")},
            "^schedule.begin: expected at least one step before the first pruning",
        ),
        (
            {"macs": None, "speedup": 2, "schedule": ScheduleSettings(unit="step", end=9, regrow=True)},
            "^schedule.regrow: expected false, because speedup is given: ",
        ),
        (
            {"schedule": "oneshot", "criterion": "taylor"},
            "begin: expected at least one step before the first pruning step",
        ),
        ({"steps": 4, "criterion": "apoz"}, "calibration: criterion 'apoz' looks at activations"),
        ({"steps": 4, "criterion": "obd"}, "calibration: criterion 'obd' needs second derivatives"),
        ({"steps": 4, "criterion": "l2", "calibration": X}, "calibration: expected none, because criterion 'l2'"),
        (
            {"steps": 4, "average": nn.Linear(2, 2)},
            "average: expected a module of the model's structure .*; got Linear: ",
        ),
        ({"steps": 4, "clamp_weight_grad": -1.0}, "clamp_weight_grad"),
        ({"steps": 4, "macs": None}, "budget: expected at least one of"),
        (
            {"steps": 4, "macs": None, "settings": PruneSettings(schedule=ScheduleSettings())},
            "settings.schedule: expected None beside a pruner's own; give it as schedule=",
        ),
    ],
)
def test_bad_arguments_are_told_before_anything_is_hooked(arguments: dict[str, Any], message: str) -> None:
    model = Net()
    optimizer = MOMENTUM(model.parameters())
    with pytest.raises(UsageError, match=message):
        Pruner(model, optimizer, X[:2], **({"macs": 0.5} | arguments))
    assert count_all(model, optimizer) == 0


def test_an_optimizer_of_something_else_is_refused() -> None:
    model = Net()
    head = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="parameters alone, but it has 2 others, the first of shape"):
        Pruner(model, MOMENTUM([*model.parameters(), *head.parameters()]), X[:2], macs=0.5, steps=4)
    with pytest.raises(UsageError, match="optimizer`, got str"):
        Pruner(model, "sgd", X[:2], macs=0.5, steps=4)  # type: ignore[arg-type]


def test_one_pruner_at_a_time() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = pk.Pruner(model, optimizer, X, macs=0.5, steps=4)
    with pytest.raises(UsageError, match=r"a Pruner counts its steps already; call that one's finish\(\) or close"):
        pk.Pruner(model, optimizer, X, macs=0.5, steps=4)
    first.close()
    pk.Pruner(model, optimizer, X, macs=0.5, steps=4).close()


def test_what_never_has_a_gradient_is_named() -> None:
    model = small_net()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = MOMENTUM(model.parameters())
    pruner = Pruner(model, optimizer, X[:2], macs=0.5, steps=2, criterion="taylor")
    step(model, optimizer, 0)
    with pytest.raises(UsageError, match="no parameter on which the channels of group '0' lie had a gradient"):
        pruner.step()
    pruner.close()


def _sharded() -> str:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), mesh=mesh)
    try:
        Pruner(model, MOMENTUM(model.parameters()), torch.ones(1, 4), macs=0.5, steps=4)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_sharded_model_is_refused(tmp_path: Path) -> None:
    assert all("use DistributedDataParallel, or prune at once" in said for said in together(2, tmp_path, _sharded))

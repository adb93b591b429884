"""Schedule and optimizer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from prunekit.errors import UsageError
from prunekit.settings.train import TrainSettings
from prunekit.training.optimizers import build_optimizer, build_schedule


def rates(steps: int, warmup: float) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, steps, warmup)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*found, optimizer.param_groups[0]["lr"]]


def test_warm_up_then_cosine() -> None:
    found = rates(100, 0.1)
    assert found[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert found[55] == pytest.approx(0.5)
    assert found[100] == pytest.approx(0.0, abs=1e-12)
    assert max(found) == found[10] == 1.0
    assert all(a > b for a, b in pairwise(found[10:]))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 0.9), (2, 0.5), (0, 0.1)])
def test_very_short_runs(steps: int, warmup: float) -> None:
    assert all(0 <= rate <= 1 for rate in rates(steps, warmup))
    assert all(rate > 0 for rate in rates(steps, warmup)[:steps])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_weight_decay_acts_on_weights_alone(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    settings = TrainSettings(optimizer=name, lr=0.01, weight_decay=0.3)  # type: ignore[arg-type]
    decays = {
        parameter: group["weight_decay"]
        for group in build_optimizer(model, settings).param_groups
        for parameter in group["params"]
    }
    names = {key: decays.get(parameter) for key, parameter in model.named_parameters()}
    assert names == {
        "0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.3, "2.bias": None
    }  # fmt: skip


def test_a_model_of_biases_alone_can_be_optimized() -> None:
    model = nn.BatchNorm2d(3)
    assert len(build_optimizer(model, TrainSettings()).param_groups) == 1


def test_nesterov_momentum_is_its_formula() -> None:
    weight = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        weight.weight.copy_(torch.tensor([[1.0, -2.0]]))
    optimizer = build_optimizer(weight, TrainSettings(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0))
    value, momentum = torch.tensor([[1.0, -2.0]]), torch.zeros(1, 2)
    for gradient in (torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]])):
        weight.weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + gradient
        value = value - 0.1 * (gradient + 0.9 * momentum)
        torch.testing.assert_close(weight.weight.detach(), value)


def test_the_users_own_gets_groups_with_their_weight_decay_and_the_learning_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    settings = TrainSettings(optimizer="own", lr=0.3, weight_decay=0.02)
    optimizer = build_optimizer(model, settings, torch.optim.RMSprop)
    assert isinstance(optimizer, torch.optim.RMSprop)
    found = [(group["weight_decay"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
    assert found == [(0.02, 0.3, 1), (0.0, 0.3, 3)]


@pytest.mark.parametrize(
    ("settings", "own", "message"),
    [
        (TrainSettings(optimizer="own"), None, "optimizer is 'own' and one of your own was not given"),
        (TrainSettings(), torch.optim.SGD, "optimizer is 'sgd' and one of your own was given"),
        (TrainSettings(optimizer="own"), lambda groups, lr: 3, "expected a torch.optim.Optimizer, got int"),
        (TrainSettings(nesterov=True, momentum=0.0), None, "nesterov: expected sgd with momentum, got sgd with 0"),
        (TrainSettings(nesterov=True, optimizer="adam"), None, "nesterov: expected sgd with momentum, got adam"),
    ],
)
def test_optimizers_that_cannot_be_built_are_refused(settings: TrainSettings, own: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_optimizer(nn.Linear(2, 2), settings, own)

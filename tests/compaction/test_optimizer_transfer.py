"""Training that goes on with the compact model, as if it had gone on under the masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import prunekit
from prunekit.errors import PlanError
from prunekit.planning.plan import Plan

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": partial(SGD, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "nesterov": partial(SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=1e-3, weight_decay=1e-3),
    "adamw, amsgrad, foreach": partial(AdamW, lr=1e-3, amsgrad=True, foreach=True),
    "adamw, fused": partial(AdamW, lr=1e-3, fused=True),
    "rmsprop": partial(RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": partial(Adagrad, lr=1e-3),
}


class Residual(nn.Module):
    """Convolutions with BatchNorm, a shortcut and a linear layer behind a flatten; the same weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.two, self.twice = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.back, self.fc = nn.Conv2d(12, 8, 1, bias=False), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(x)).relu()
        x = x + self.back(self.two(self.twice(self.twice(x))).relu())
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


def made(build: Callable[[], nn.Module] = Residual, size: int = 8) -> tuple[nn.Module, Plan, Tensor]:
    torch.manual_seed(0)
    model = build().double()
    images = torch.randn(6, 3, size, size, dtype=torch.float64)
    plan = prunekit.plan(model.float(), (images[:2].float(),), channels=0.5)
    return model.double().train(), plan, images


def step(model: nn.Module, optimizer: Optimizer, images: Tensor, *, clip: float | None = 1.0) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), torch.arange(len(images)) % 4)
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def steps(model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, images: Tensor, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(step(model, optimizer, images))
        schedule.step()
    return losses


def same(small: nn.Module, masked: nn.Module, plan: Plan) -> None:
    """The compact model is the masked one cut now."""
    for name, value in prunekit.compact(masked, plan).state_dict().items():
        torch.testing.assert_close(small.state_dict()[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_equal_losses(name: str) -> None:
    model, plan, images = made()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = CosineAnnealingLR(optimizer, 8)
    with prunekit.masked(model, plan, optimizer):
        steps(model, optimizer, schedule, images, 3)
        on = copy.deepcopy(optimizer.state_dict())
        small = prunekit.compact(model, plan)
        under_masks = steps(model, optimizer, schedule, images, 4)
    rates = optimizer.param_groups[0]["lr"]
    other, _, _ = made()
    again = OPTIMIZERS[name](other.parameters())
    follows = CosineAnnealingLR(again, 8)
    with prunekit.masked(other, plan, again):
        steps(other, again, follows, images, 3)
    prunekit.transfer(again, other, small, plan)
    for key, state in on["state"].items():
        assert any(isinstance(value, Tensor) and value.dim() and value.any() for value in state.values()), key
    assert [parameter for group in again.param_groups for parameter in group["params"]] == list(small.parameters())
    compact = steps(small, again, follows, images, 4)
    assert compact == pytest.approx(under_masks, rel=1e-12)
    assert again.param_groups[0]["lr"] == rates
    same(small, model, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "size"),
    [
        (lambda: torchvision.models.resnet18(num_classes=4), 16),
        (lambda: torchvision.models.VisionTransformer(16, 8, 2, 4, 32, 64, num_classes=4), 16),
    ],
    ids=["resnet18", "vit"],
)
def test_real_models_go_on(build: Callable[[], nn.Module], size: int) -> None:
    model, plan, images = made(build, size)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with prunekit.masked(model, plan, optimizer):
        for _ in range(2):
            step(model, optimizer, images)
    small, going_on = prunekit.compact(model, plan), copy.deepcopy(model)
    twin = AdamW(going_on.parameters(), lr=1e-3)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    prunekit.transfer(optimizer, model, small, plan)
    with prunekit.masked(going_on, plan, twin):
        under_masks = [step(going_on, twin, images) for _ in range(3)]
    assert [step(small, optimizer, images) for _ in range(3)] == pytest.approx(under_masks, rel=1e-9)


def test_without_the_momentum_it_is_another_run() -> None:
    """What the first test would not see if a new optimizer did as well."""
    model, plan, images = made()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with prunekit.masked(model, plan, optimizer):
        for _ in range(3):
            step(model, optimizer, images)
        small = prunekit.compact(model, plan)
        under_masks = [step(model, optimizer, images) for _ in range(3)]
    fresh = OPTIMIZERS["momentum"](small.parameters())
    assert [step(small, fresh, images) for _ in range(3)][-1] != pytest.approx(under_masks[-1], rel=1e-6)


def test_gradients_that_are_being_gathered_are_carried() -> None:
    model, plan, images = made()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with prunekit.masked(model, plan, optimizer):
        step(model, optimizer, images)
        optimizer.zero_grad()
        F.cross_entropy(model(images[:3]), torch.arange(3)).backward()  # type: ignore[no-untyped-call]
        small, going_on = prunekit.compact(model, plan), copy.deepcopy(model)
        for dense, copied in zip(model.parameters(), going_on.parameters(), strict=True):
            assert dense.grad is not None
            copied.grad = dense.grad.clone()
    twin = OPTIMIZERS["momentum"](going_on.parameters())
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    prunekit.transfer(optimizer, model, small, plan)
    with prunekit.masked(going_on, plan, twin):
        for net, stepping in ((going_on, twin), (small, optimizer)):
            F.cross_entropy(net(images[3:]), torch.arange(3)).backward()  # type: ignore[no-untyped-call]
            stepping.step()
    same(small, going_on, plan)


@pytest.mark.parametrize("ema", [True, False])
def test_averages_go_on(ema: bool) -> None:
    model, plan, images = made()
    how = {"multi_avg_fn": get_ema_multi_avg_fn(0.8)} if ema else {}
    average = AveragedModel(model, use_buffers=ema, **how)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with prunekit.masked(model, plan, optimizer):
        average.update_parameters(model)
        for _ in range(2):
            step(model, optimizer, images)
            average.update_parameters(model)
        small, carried = prunekit.compact(model, plan), prunekit.transfer_average(average, plan)
        twin, going_on = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
        for _ in range(2):
            step(model, optimizer, images)
            average.update_parameters(model)
    again = OPTIMIZERS["momentum"](going_on.parameters())
    again.load_state_dict(twin)
    prunekit.transfer(again, going_on, small, plan)
    for _ in range(2):
        step(small, again, images)
        carried.update_parameters(small)
    assert int(carried.n_averaged) == int(average.n_averaged) == 5
    same(carried.module, average.module, plan)


def test_groups_keep_their_settings_and_frozen_parameters_stay_out() -> None:
    model, plan, images = made()
    model.get_parameter("two.bias").requires_grad_(False)
    decayed = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() == 1]
    optimizer = SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.5}], lr=0.01, momentum=0.9)
    step(model, optimizer, images, clip=None)
    small = prunekit.compact(model, plan)
    prunekit.transfer(optimizer, model, small, plan)
    first, second = optimizer.param_groups
    assert (first["weight_decay"], first["lr"], second["lr"]) == (0.1, 0.01, 0.5)
    assert {id(parameter) for parameter in first["params"]} == {id(p) for p in small.parameters() if p.dim() > 1}
    assert all(parameter is not small.get_parameter("two.bias") for parameter in second["params"])


def test_what_does_not_belong_together_is_refused_and_nothing_changes() -> None:
    model, plan, images = made()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step(model, optimizer, images)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(PlanError, match=r"one.weight: expected \(4, 3, 3, 3\) in the compact model, got"):
        prunekit.transfer(optimizer, model, copy.deepcopy(model), plan)
    with pytest.raises(PlanError, match="not the model's; give the model that it was made for"):
        prunekit.transfer(optimizer, copy.deepcopy(model), prunekit.compact(model, plan), plan)
    factored = model.get_parameter("two.weight")
    optimizer.state[factored]["row"] = torch.ones(12)
    with pytest.raises(PlanError, match=r"two.weight: the optimizer's state 'row' has the shape \(12,\) and the"):
        prunekit.transfer(optimizer, model, prunekit.compact(model, plan), plan)
    del optimizer.state[factored]["row"]
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert torch.equal(after["state"][key]["momentum_buffer"], state["momentum_buffer"])
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


class Codebook(nn.Module):
    """A layer, and a codebook that forward replaces by a moving average in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.average = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x).relu())
        if self.training:
            self.average = nn.Parameter(self.average * 0.9 + 0.1 * x.detach().mean(0))
        return x - self.average.detach()


def test_parameters_that_forward_replaces_are_left_out() -> None:
    model, x = Codebook(), torch.randn(4, 6)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    plan = prunekit.plan(model, x, macs=0.5)
    model.train()(x).sum().backward()
    optimizer.step()
    small = prunekit.compact(model, plan)
    prunekit.transfer(optimizer, model, small, plan)
    (group,) = optimizer.param_groups
    assert {id(one) for one in group["params"]} == {id(one) for one in small.parameters() if one is not small.average}
    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.ones(2)
    other = OPTIMIZERS["momentum"]([*model.parameters(), foreign])
    with pytest.raises(PlanError, match="not the model's"):
        prunekit.transfer(other, model, small, plan)

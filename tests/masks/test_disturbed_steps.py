"""After a step pruned entries are zero, whatever was written to weights, gradients and state before it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_nets import SmallNet, assert_pruned_are_zero, backward, handmade_plan, randomized, step
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from prunekit.masks.masked_model import ChangingMasks, masked
from prunekit.planning.plan import Plan

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda parameters: Adam(parameters, lr=0.05, amsgrad=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.05, weight_decay=0.5, fused=True),
}


def test_momentum_from_before_the_masks_goes_on_being_written_over() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5)
    optimizer = KINDS["momentum"](model.parameters())
    step(model, optimizer)
    with masked(model, plan, optimizer):
        for _ in range(10):
            step(model, optimizer)
            assert_pruned_are_zero(model, plan)


Disturbance = Callable[[nn.Module, Optimizer, Plan], None]


def spots(model: nn.Module, plan: Plan) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
    """A pruned entry of each parameter, neither the first nor the last, which are looked at after every step."""
    for name, parameter in model.named_parameters():
        mask = plan.mask(name)
        if mask is not None:
            pruned = (~mask.expand(parameter.shape)).nonzero().tolist()
            if len(pruned) > 2:
                yield parameter, tuple(pruned[len(pruned) // 2])


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _gradients_written(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    for parameter, spot in spots(model, plan):
        gradient_of(parameter)[spot] = 1.0


def _gradients_replaced(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    for parameter, spot in spots(model, plan):
        parameter.grad = gradient_of(parameter).clone()
        parameter.grad[spot] = 1.0


def _gradients_not_finite(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    for parameter in model.parameters():
        gradient_of(parameter).data.mul_(torch.nan)  # moves no version counter, as a scale that has overflowed


@torch.no_grad()
def _weights_written(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    for parameter, spot in spots(model, plan):
        parameter[spot] = 1.0


def _weights_written_behind(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    for parameter in model.parameters():
        parameter.data.add_(1.0)


def _state_loaded(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    parameters = list(model.parameters())
    for index, kept in state["state"].items():
        for parameter, spot in spots(model, plan):
            if parameter is parameters[index]:
                one = torch.zeros_like(parameter.detach())
                one[spot] = 1.0
                kept[MOMENTUM[type(optimizer)]] = kept[MOMENTUM[type(optimizer)]] + one  # its version counter is at 0
    optimizer.load_state_dict(state)


def _state_written(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    for parameter, spot in spots(model, plan):
        optimizer.state[parameter][MOMENTUM[type(optimizer)]][spot] = 1.0


def _another_optimizer(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    other = SGD(model.parameters(), lr=0.1, fused=True)
    kept = [p.grad for p in model.parameters()]
    _gradients_replaced(model, optimizer, plan)
    other.step()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient


def _clipped(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


MOMENTUM = {SGD: "momentum_buffer", AdamW: "exp_avg"}
DISTURBANCES: list[Disturbance] = [
    _gradients_written,
    _gradients_replaced,
    _gradients_not_finite,
    _weights_written,
    _weights_written_behind,
    _state_loaded,
    _state_written,
    _another_optimizer,
    _clipped,
]


@pytest.mark.parametrize("disturb", DISTURBANCES)
@pytest.mark.parametrize("kind", ["momentum", "fused", "adamw"])
def test_whatever_is_written_between_backward_and_step_is_written_over(kind: str, disturb: Disturbance) -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5, 6)
    optimizer = KINDS[kind](model.parameters())
    with masked(model, plan, optimizer):
        for _ in range(3):
            step(model, optimizer)
        optimizer.zero_grad()
        backward(model)
        disturb(model, optimizer, plan)
        optimizer.step()
        assert_pruned_are_zero(model, plan)
        for _ in range(3):  # what it left in the optimizer's state goes on
            step(model, optimizer)
            assert_pruned_are_zero(model, plan)


@pytest.mark.parametrize("settings", [{"eps": 0.0}, {"weight_decay": 30.0}])
def test_steps_that_are_not_zero_at_zero(settings: dict[str, float]) -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5, 6)  # 0 / 0, and a factor below zero that makes -0.0
    optimizer = AdamW(model.parameters(), lr=0.05, **settings)
    with masked(model, plan, optimizer):
        for _ in range(4):
            step(model, optimizer)
            assert_pruned_are_zero(model, plan)


def test_a_closure_makes_its_gradients_in_the_step() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5, 6)
    optimizer = KINDS["momentum"](model.parameters())

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        _gradients_written(model, optimizer, plan)
        return 0.0

    with masked(model, plan, optimizer):
        for _ in range(3):
            step(model, optimizer)
        for _ in range(3):
            optimizer.step(closure)
            assert_pruned_are_zero(model, plan)


def test_what_a_hook_of_the_optimizer_writes_is_written_over() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5, 6)
    optimizer = KINDS["fused"](model.parameters())
    with masked(model, plan, optimizer):
        for _ in range(3):
            step(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: _weights_written(model, optimizer, plan))  # before the masks'
    with masked(model, plan, optimizer):
        for _ in range(3):
            step(model, optimizer)
            assert_pruned_are_zero(model, plan)


def test_another_plan_holds_from_its_next_step_on() -> None:
    model, plans = randomized(SmallNet()), (handmade_plan(2), handmade_plan(2, 5, 6), handmade_plan(6))
    optimizer = KINDS["momentum"](model.parameters())
    with ChangingMasks(model, plans[0], optimizer) as masks:
        for plan in plans:
            masks.update(plan)
            for _ in range(4):
                step(model, optimizer)
                assert_pruned_are_zero(model, plan)


@pytest.mark.slow
def test_a_compiled_step() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2, 5, 6)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with masked(model, plan, optimizer):
        compiled = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            compiled()
            assert_pruned_are_zero(model, plan)

"""Masked weights that learn behind their zeros do what SR-STE does with a dense copy, and the model has the zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_nets import SmallNet, assert_pruned_are_zero, handmade_map, randomized
from torch import Tensor
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, Optimizer

from prunekit.errors import UsageError
from prunekit.hooks.hook import count_hooks
from prunekit.masks.masked_model import ChangingMasks
from prunekit.planning.plan import Plan

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adam": (Adam, {"lr": 0.01, "foreach": True}),
    "adamw, fused": (AdamW, {"lr": 0.01, "weight_decay": 0.5, "fused": True}),
}
DECAY = 0.05
NAMES = ("conv2.weight", "fc.weight")


def plan_at(seed: int, *channels: int) -> Plan:
    keep = np.ones(9, bool)
    keep[list(channels)] = False
    whole = Plan(handmade_map(), keep)
    generator, masks = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name in NAMES:
        left = whole.mask(name)
        mask = torch.rand(whole.channel_map.shapes[name], generator=generator) > 0.5
        masks[name] = mask if left is None else mask | ~left
    return Plan(whole.channel_map, keep, element_masks=masks)


def images(number: int) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_values_behind_zeros_are_those_of_a_dense_copy(name: str, closure: bool) -> None:
    kind, settings = OPTIMIZERS[name]
    model, dense = (randomized(SmallNet()).double() for _ in range(2))
    mine, theirs = (kind(it.parameters(), **settings) for it in (model, dense))
    plans = [plan_at(0), plan_at(1), plan_at(2)]
    with ChangingMasks(model, plans[0], mine, straight_through=DECAY) as masks:
        for number in range(9):
            plan = plans[number // 3]
            if number % 3 == 0 and number:
                masks.update(plan)

            def compute() -> Tensor:
                mine.zero_grad()
                loss = model(images(number).double()).square().mean()  # noqa: B023
                loss.backward()  # type: ignore[no-untyped-call]
                return loss  # type: ignore[no-any-return]

            if closure:
                mine.step(compute)
            else:
                compute()
                mine.step()
            assert_pruned_are_zero(model, plan)
            theirs.zero_grad()
            seen = {n: p * plan.element_masks[n] if n in NAMES else p for n, p in dense.named_parameters()}
            for one in NAMES:
                seen[one].retain_grad()
            functional_call(dense, seen, images(number).double()).square().mean().backward()
            for one in NAMES:
                weight = dense.get_parameter(one)
                weight.grad = seen[one].grad + DECAY * weight.detach() * ~plan.element_masks[one]
            theirs.step()
            for one, parameter in dense.named_parameters():
                kept = plan.element_masks.get(one, torch.ones((), dtype=torch.bool))
                torch.testing.assert_close(model.get_parameter(one), parameter * kept, rtol=1e-9, atol=1e-12)
                if one in NAMES:
                    torch.testing.assert_close(masks.held.whole(one), parameter * ~kept, rtol=1e-9, atol=1e-12)
        masks.end_straight_through()
        frozen = {one: masks.held.whole(one) for one in NAMES}
        mine.zero_grad()
        model(images(9).double()).square().mean().backward()
        for one in NAMES:
            grad = model.get_parameter(one).grad
            assert grad is not None
            assert (grad[~plan.element_masks[one]] == 0).all()
        mine.step()
        assert_pruned_are_zero(model, plan)
        assert all(torch.equal(masks.held.whole(one), values) for one, values in frozen.items() if values is not None)
    assert count_hooks(model) == 0


def test_weights_of_removed_channels_rest_meanwhile() -> None:
    model, plan = randomized(SmallNet()), plan_at(0, 2, 5)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ChangingMasks(model, plan, optimizer, straight_through=0.0) as masks:
        for number in range(3):
            optimizer.zero_grad()
            model(images(number)).square().mean().backward()
            optimizer.step()
            assert_pruned_are_zero(model, plan)
        for name in NAMES:
            gone = ~Plan(plan.channel_map, plan.keep).mask(name).expand(before[name].shape)
            held, behind = masks.held.whole(name), ~plan.element_masks[name]
            assert torch.equal(held[gone], before[name][gone])
            assert not torch.equal(held[behind], before[name][behind])


def test_nothing_learns_without_an_optimizer() -> None:
    with pytest.raises(UsageError, match="straight_through: expected None without an optimizer"):
        ChangingMasks(SmallNet(), plan_at(0), straight_through=0.1)

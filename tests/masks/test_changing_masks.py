"""Masks whose plan changes while a model is trained."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from small_nets import SmallNet, assert_pruned_are_zero, handmade_map, handmade_plan, randomized, step
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from prunekit.channels.trace import trace
from prunekit.errors import ArtifactError
from prunekit.hooks.hook import count_hooks
from prunekit.masks.gradient_masks import GradientMasks
from prunekit.masks.masked_model import ChangingMasks
from prunekit.masks.weight_masks import WeightMasks
from prunekit.planning.plan import Plan

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (Adam, {"lr": 0.05, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.05, "weight_decay": 0.5}),
]
PLANS = ((), (2,), (2, 5, 6), (1, 5), (1, 2, 3, 4, 5, 6, 7))


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_zero_after_every_step_across_changes(
    kind: type[Optimizer], settings: dict[str, Any], how: dict[str, bool]
) -> None:
    model = randomized(SmallNet())
    optimizer = kind(model.parameters(), **settings, **how)
    with ChangingMasks(model, handmade_plan(), optimizer) as masks:
        for pruned in PLANS[1:]:
            step(model, optimizer)
            masks.update(handmade_plan(*pruned))
            assert_pruned_are_zero(model, masks.plan)
            for _ in range(3):
                step(model, optimizer)
                assert_pruned_are_zero(model, masks.plan)
                for name, parameter in model.named_parameters():
                    mask = masks.plan.mask(name)
                    assert parameter.grad is not None
                    if mask is not None:
                        assert (parameter.grad[~mask.expand(parameter.shape)] == 0).all(), name
    assert count_hooks(model) == 0


def test_what_comes_back_has_the_values_it_had_when_it_was_pruned() -> None:
    model = randomized(SmallNet())
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    with ChangingMasks(model, handmade_plan(), optimizer) as masks:
        step(model, optimizer)
        before = copy.deepcopy(model.state_dict())
        masks.update(handmade_plan(2, 5))
        for _ in range(5):
            step(model, optimizer)
        during = copy.deepcopy(model.state_dict())
        masks.update(handmade_plan(5, 7))  # 2 comes back, 7 goes, 5 stays away
        for name, now in model.state_dict().items():
            if name.endswith("num_batches_tracked"):
                continue
            back = (~handmade_plan(2).mask(name)).expand(now.shape) if handmade_plan(2).mask(name) is not None else None
            if back is None:
                assert torch.equal(now, during[name])
                continue
            there = handmade_plan(5, 7).mask(name).expand(now.shape) | torch.tensor(name.endswith("running_var"))
            both = back & there
            assert both.any()
            assert torch.equal(now[both], before[name][both]), name
            assert not torch.equal(now[both], during[name][both]), name
        assert_pruned_are_zero(model, masks.plan)
        masks.update(handmade_plan())
        seven = handmade_plan(7).mask("conv1.weight").expand(8, 3, 3, 3)
        assert torch.equal(model.conv1.weight[~seven], during["conv1.weight"][~seven])


def test_leaving_restores_only_where_it_is_asked_to() -> None:
    for restore in (True, False):
        model = randomized(SmallNet())
        before = copy.deepcopy(model.state_dict())
        with ChangingMasks(model, handmade_plan(3), restore=restore) as masks:
            masks.update(handmade_plan(3, 4))
            model(torch.randn(4, 3, 8, 8))  # in train mode: statistics of BatchNorms move
        same = [torch.equal(before[name], now) for name, now in model.named_parameters()]
        assert all(same) == restore
        assert torch.equal(model.bn1.running_var[2:4], before["bn1.running_var"][2:4]) == restore
        assert masks.plan.keep.sum() == 7


def test_hooks_stay_where_they_were_among_others() -> None:
    """A hook of the user's that came after the masks still runs after them, whatever plans came since."""
    model, seen = randomized(SmallNet()), []
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ChangingMasks(model, handmade_plan(), optimizer) as masks:
        handles = [
            optimizer.register_step_post_hook(lambda *_: seen.append(bool((model.conv1.weight[1] == 0).all()))),
            model.conv1.register_forward_pre_hook(lambda *_: seen.append(bool((model.conv1.weight[1] == 0).all()))),
        ]
        hooks = count_hooks(model)
        step(model, optimizer)
        assert seen == [False, False]
        masks.update(handmade_plan(2))
        assert count_hooks(model) == hooks
        with torch.no_grad():
            model.conv1.weight += 1
        step(model, optimizer)
        assert seen[2:] == [True, True]
        for handle in handles:
            handle.remove()
    assert count_hooks(model) == 0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).relu())  # type: ignore[no-any-return]


def test_norms_see_what_the_plan_of_the_moment_keeps() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(5, 6)
    chart = trace(model, (x,))
    free = chart.groups[0].labels

    def plan(*pruned: int) -> Plan:
        keep = np.ones(chart.n_labels, dtype=bool)
        keep[free[list(pruned)]] = False
        return Plan(chart, keep)

    with ChangingMasks(model, plan()) as masks:
        for pruned in ((1, 2), (2, 3, 4), ()):
            masks.update(plan(*pruned))
            fresh = copy.deepcopy(model)
            with WeightMasks(fresh, plan(*pruned)):
                want = fresh(x)
            assert torch.equal(model(x), want)


def test_masks_of_single_weights_change_too() -> None:
    """Where no channel goes, and in a tensor that no plan's channels lie on."""
    model, chart = randomized(SmallNet()), handmade_map()
    optimizer = Adam(model.parameters(), lr=0.05)
    keep, scores = np.ones(9, bool), {name: p.detach().abs() for name, p in model.named_parameters() if p.ndim > 1}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ChangingMasks(model, Plan(chart, keep), optimizer) as masks:
        for share in (0.3, 0.7, 0.5):  # the last lets weights come back
            found = {name: values > values.quantile(share) for name, values in scores.items()}
            masks.update(Plan(chart, keep, element_masks=found))
            if share == 0.5:
                came_back = ~(scores["fc.weight"] > scores["fc.weight"].quantile(0.7)) & found["fc.weight"]
                early = scores["fc.weight"] > scores["fc.weight"].quantile(0.3)
                assert (model.fc.weight[came_back & ~early] == before["fc.weight"][came_back & ~early]).all()
                assert (model.fc.weight[came_back] != 0).all()
            for _ in range(3):
                step(model, optimizer)
                for name, mask in found.items():
                    assert (model.get_parameter(name)[~mask] == 0).all(), name


def test_only_masks_that_were_made_to_change_do() -> None:
    model = SmallNet()
    for masks in (WeightMasks(model, handmade_plan(1)), GradientMasks(model, handmade_plan(1))):
        with masks, pytest.raises(RuntimeError, match="changing=True"):
            masks.update(handmade_plan(2))
    with pytest.raises(RuntimeError, match="active masks"):
        ChangingMasks(model, handmade_plan(1)).update(handmade_plan(2))
    with pytest.raises(RuntimeError, match="active masks"):
        _ = ChangingMasks(model, handmade_plan(1)).held


def test_gradient_masks_change_by_themselves() -> None:
    model = randomized(SmallNet())
    with GradientMasks(model, handmade_plan(), changing=True) as masks:
        for pruned in ((1,), (2, 3), ()):
            masks.update(handmade_plan(*pruned))
            model.zero_grad()
            model(torch.randn(4, 3, 8, 8)).square().sum().backward()
            zero = (model.conv1.weight.grad == 0).flatten(1).all(1)
            assert (zero.nonzero().flatten() + 1).tolist() == list(pruned)


def test_held_values_of_another_plan_are_refused() -> None:
    with ChangingMasks(SmallNet(), handmade_plan(1)) as masks, pytest.raises(ArtifactError, match="of another plan"):
        masks.held.load({"conv1.weight": torch.zeros(3)})

"""Gradient masks: pruned gradients are exactly zero, and nothing spreads from them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from equivalence import assert_only_rounded
from in_place import CNN_FAMILIES, out_of_place
from small_nets import SmallNet, handmade_plan, random_plan, randomized
from torch import Tensor, nn
from torchvision import models

import prunekit
from prunekit.channels.trace import trace
from prunekit.errors import PlanError
from prunekit.hooks.hook import count_hooks
from prunekit.masks.gradient_masks import GradientMasks
from prunekit.masks.masked_model import masked, sparsity
from prunekit.masks.weight_masks import WeightMasks
from prunekit.planning.plan import Plan


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = getattr(models, name)(weights=None, num_classes=5)
    if name == "vgg11_bn":  # the family's own features; its classifier alone has 100 million weights
        model.avgpool = nn.AdaptiveAvgPool2d(2)
        model.classifier = nn.Sequential(nn.Linear(512 * 4, 64), nn.ReLU(inplace=True), nn.Linear(64, 5))
    return model


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)  # dropout
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_masked(found: dict[str, Tensor], plan: Plan) -> None:
    checked = 0
    for name, gradient in found.items():
        mask = plan.mask(name)
        if mask is not None:
            pruned = gradient[~mask.expand(gradient.shape)]
            assert (pruned == 0).all(), name
            checked += pruned.numel()
    assert checked > 0


def test_pruned_gradients_are_zero_on_every_axis() -> None:
    model, plan, x = randomized(SmallNet()), handmade_plan(2, 5, 6), torch.randn(4, 3, 8, 8)
    with GradientMasks(model, plan):
        found = gradients(model, x)
    assert_masked(found, plan)
    assert all(gradient.abs().sum() > 0 for gradient in found.values())
    loose = gradients(model, x)
    with pytest.raises(AssertionError, match=r"conv1\.weight"):
        assert_masked(loose, plan)


def test_gradients_accumulate_over_backwards() -> None:
    model, plan, x = randomized(SmallNet()).eval(), handmade_plan(2, 5), torch.randn(4, 3, 8, 8)
    with masked(model, plan):
        once = gradients(model, x)
        model(x).square().sum().backward()
        twice = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient)
    assert_masked(twice, plan)


def test_under_weight_masks_the_kept_gradients_are_those_without_gradient_masks() -> None:
    model, plan, x = randomized(SmallNet()).double(), handmade_plan(2, 5), torch.randn(4, 3, 8, 8).double()
    with WeightMasks(model, plan):
        plain = gradients(model, x)
        with GradientMasks(model, plan):
            found = gradients(model, x)
    for name, gradient in found.items():
        mask = plan.mask(name)
        expected = plain[name] if mask is None else plain[name] * mask
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_nan_in_a_pruned_channel_does_not_spread() -> None:
    model, plan, x = randomized(SmallNet()), handmade_plan(2), torch.randn(4, 3, 8, 8)
    spoil = torch.zeros(8)
    spoil[1] = torch.nan

    def spoiled(module: nn.Module, arguments: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient + spoil.view(1, 8, 1, 1))

    model.bn2.register_forward_hook(spoiled)  # type: ignore[union-attr]
    with masked(model, plan):
        found = gradients(model, x)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert_masked(found, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", CNN_FAMILIES)
def test_masked_on_every_family_and_equal_without_in_place_operations(name: str) -> None:
    model = build(name).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    plan = random_plan(trace(model, (x,)))
    with GradientMasks(model, plan):
        found = gradients(model, x)
    assert count_hooks(model) == 0
    assert_masked(found, plan)
    with out_of_place(model), GradientMasks(model, plan):
        expected = gradients(model, x)
    assert_only_rounded(found, expected)


def test_frozen_parameters_and_no_grad_are_left_alone() -> None:
    model, plan, x = randomized(SmallNet()), handmade_plan(2), torch.randn(4, 3, 8, 8)
    model.conv1.requires_grad_(False)  # type: ignore[union-attr, operator]
    with GradientMasks(model, plan):
        with torch.no_grad():
            model(x)
        found = gradients(model, x)
    assert "conv1.weight" not in found
    assert_masked(found, plan)


def test_nothing_stays_also_on_an_exception() -> None:
    model, plan, x = randomized(SmallNet()), handmade_plan(2), torch.randn(4, 3, 8, 8)
    with GradientMasks(model, plan):
        loss = model(x).square().sum()
    loss.backward()
    grad = model.conv1.bias.grad  # type: ignore[union-attr]
    assert isinstance(grad, Tensor)
    assert grad[1] != 0
    with pytest.raises(KeyError), masked(model, plan):
        raise KeyError
    assert count_hooks(model) == 0


def test_an_output_that_does_not_fit_is_named() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(2)
    chart = plan.channel_map
    short = {key: labels[:5] if key[0] == "bn2" else labels for key, labels in chart.activations.items()}
    wrong = Plan(dataclasses.replace(chart, activations=short), plan.keep)
    with GradientMasks(model, wrong), pytest.raises(PlanError, match="bn2: expected 5 output channels on axis 1"):
        gradients(model, torch.randn(2, 3, 8, 8))


def test_masked_composes_both_and_sparsity_measures_it() -> None:
    model, plan = randomized(SmallNet()), handmade_plan(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert sparsity(model, plan).weights == 0.0
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    with masked(model, plan, optimizer):
        assert sparsity(model, plan).weights > 0
    assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())
    with masked(model, plan, optimizer, restore=False) as same:
        assert same is model
        assert optimizer._optimizer_step_post_hooks
        found = sparsity(model, plan)
    conv = 2 * 27 + (64 - 36) * 9 + (64 - 36) + 5 * 8
    assert found.weights == pytest.approx(conv / (8 * 27 + 64 * 9 + 64 + 5 * 32))
    assert found.channels == 0.25
    with masked(model, handmade_plan(3)):
        pass
    assert sparsity(model, plan) == found


def test_sparsity_of_a_model_without_weights_or_channels() -> None:
    plan = handmade_plan()
    empty = Plan(dataclasses.replace(plan.channel_map, groups=()), plan.keep)
    assert sparsity(nn.ReLU(), empty).weights == 0.0
    assert sparsity(nn.ReLU(), empty).channels == 0.0


def test_parameters_that_take_the_place_of_others_are_masked_too() -> None:
    model, plan, x = randomized(SmallNet()), handmade_plan(2, 5), torch.randn(4, 3, 8, 8)
    with GradientMasks(model, plan):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        assert_masked(gradients(model, x), plan)
    assert count_hooks(model) == 0


def test_sparse_gradients_are_masked() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    keep = torch.tensor([True, False, True, False]).expand(10, 4)
    chart = dataclasses.replace(
        handmade_plan().channel_map, labels={"weight": (None, None)}, shapes={"weight": (10, 4)}, activations={}
    )
    plan = Plan(chart, handmade_plan().keep, element_masks={"weight": keep})
    with GradientMasks(table, plan):
        table(torch.tensor([1, 3, 3])).square().sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    dense, expected = (
        gradient.to_dense(),
        2 * table.weight.detach() * torch.bincount(torch.tensor([1, 3, 3]), None, 10)[:, None],
    )
    torch.testing.assert_close(dense, expected * keep)


def test_second_order_gradients_pass_the_masks() -> None:
    model, plan = randomized(SmallNet()).double().eval(), handmade_plan(2, 5)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)

    def penalty() -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)

    with WeightMasks(model, plan):
        plain = penalty()
        with GradientMasks(model, plan):
            masked_ = penalty()
    names = [name for name, _ in model.named_parameters()]
    compared = 0
    for name, one, two in zip(names, plain, masked_, strict=True):
        if one is not None and (mask := plan.mask(name)) is not None:
            kept = mask.expand(one.shape)
            torch.testing.assert_close(two[kept], one[kept], rtol=1e-9, atol=1e-12)
            compared += int(kept.sum())
    assert compared > 0


class Shifted(nn.Module):
    """A module whose only tensor of channels is a buffer, as tables of positions are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def test_modules_without_parameters_are_masked_by_their_buffers_device() -> None:
    model = nn.Sequential(nn.Linear(4, 12), Shifted(12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.randn(8, 4)
    plan = prunekit.plan(model, x, macs=0.5)
    assert "1.table" in plan.kept_indices
    with GradientMasks(model, plan, changing=True):
        assert_masked(gradients(model, x), plan)

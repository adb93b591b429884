"""CNNs of torchvision, one of each kind: masked == compact, what is free, and what is counted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torchvision
from accelerate import init_empty_weights
from equivalence import difference, masked_double, parity, random_keep, randomized, zero_removed
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.channels.tracing.execution import mode_for_trace
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.measure.model_size import count_macs, count_parameters
from prunekit.planning.plan import Plan
from prunekit.planning.solver import make_plan
from prunekit.settings.pruning import BudgetSettings, PruneSettings

CLASSES = 7
FAMILIES = (
    "alexnet", "vgg11_bn", "resnet18", "densenet121", "googlenet", "squeezenet1_1", "mobilenet_v3_small",
    "shufflenet_v2_x0_5", "efficientnet_b0", "regnet_y_400mf",
)  # fmt: skip
"""One member of each kind of network: `benchmarks/coverage.py` checks all of torchvision's."""

MACS_LEFT = {
    "squeezenet1_1": (0.34, "its last convolution makes the class scores, which are locked"),
}
"""Largest share of the MACs that may be left at half of the channels, where that is not 32 %, and why."""


def build(name: str, classes: int) -> nn.Module:
    arguments: dict[str, Any] = {}
    if name == "googlenet":
        arguments = {"init_weights": False, "aux_logits": True}
    elif name.startswith("vgg"):
        arguments = {"init_weights": False}
    return torchvision.models.get_model(name, weights=None, num_classes=classes, **arguments)


@cache
def family(name: str) -> nn.Module:
    """A randomized member with few classes, in eval mode.

    The hidden layers of AlexNet's and VGG's classifiers are narrower: 4096 wide they take a gigabyte in float64.
    """
    with init_empty_weights(include_buffers=False):
        model = build(name, CLASSES)
        if name.startswith(("alexnet", "vgg")):
            narrow_hidden_layers(model.classifier)
    for path, parameter in list(model.named_parameters()):
        owner, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(torch.empty(parameter.shape)))
    return randomized(model).eval()


def narrow_hidden_layers(classifier: nn.Sequential, width: int = 64) -> None:
    last = CLASSES
    for index in reversed([i for i, module in enumerate(classifier) if isinstance(module, nn.Linear)]):
        inputs = classifier[index].in_features
        classifier[index] = nn.Linear(width if inputs == 4096 else inputs, last)
        last = width


@cache
def chart(name: str) -> ChannelMap:
    return trace(family(name), (small_images(batch=1),))


def images_of_size() -> Tensor:
    """The size that the families were made for, without values."""
    return torch.empty(1, 3, 224, 224, device="meta")


def small_images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def enlivened(masked: nn.Module, plan: Plan, images: Tensor) -> nn.Module:
    """BatchNorm statistics of the masked model itself, shaken: else a deep net's signal dies out on the way."""
    norms = [module for module in masked.modules() if isinstance(module, nn.BatchNorm2d)]
    generator = torch.Generator().manual_seed(7)
    for norm in norms:
        norm.train().momentum = 1.0
    masked(images)
    for norm in norms:
        norm.eval().momentum = 0.1
        norm.running_mean.add_(0.2 * torch.randn(norm.num_features, generator=generator) * norm.running_var.sqrt())
        norm.running_var.mul_(torch.rand(norm.num_features, generator=generator) + 0.5)
    return zero_removed(masked, plan)


def assert_sizes_fit(model: nn.Module) -> None:
    """What modules say of themselves is what their tensors are."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            shape = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
            assert tuple(module.weight.shape) == shape, path
            assert module.in_channels % module.groups == module.out_channels % module.groups == 0, path
        elif isinstance(module, nn.Linear):
            assert tuple(module.weight.shape) == (module.out_features, module.in_features), path
        elif isinstance(module, nn.BatchNorm2d):
            vectors = (module.weight, module.bias, module.running_mean, module.running_var)
            assert {vector.numel() for vector in vectors if vector is not None} == {module.num_features}, path


def total(output: Any) -> Tensor:
    """One number from an output, to run backward from."""
    return output.sum() if isinstance(output, Tensor) else sum(part.sum() for part in output)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_masked_equals_compact(name: str) -> None:
    model, plan = family(name), Plan(chart(name), random_keep(chart(name), seed=1))
    images = small_images().double()
    masked = enlivened(masked_double(model, plan), plan, images)
    small = compact(masked, plan)
    with torch.no_grad():
        want = masked(images)
        assert difference(want, small(images)) <= 1e-9
    assert float((want[0] - want[1]).abs().max()) > 1e-2 * float(want.abs().max()), "the output must see its input"
    assert_sizes_fit(small)
    kept = plan.channel_map.parameters_kept(plan.keep, [key for key, _ in model.named_parameters()])
    assert count_parameters(small) == kept < count_parameters(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_compact_model_trains(name: str) -> None:
    plan = Plan(chart(name), random_keep(chart(name), seed=2, share=0.8))
    small = compact(family(name), plan).train()
    total(small(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3)))).backward()
    assert all(parameter.grad is not None for parameter in small.parameters())
    assert count_macs(small.eval().to("meta"), (images_of_size(),)) == chart_of_size(name).macs(plan.keep)


@cache
def chart_of_size(name: str) -> ChannelMap:
    return trace(family(name), (images_of_size(),))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_free_and_what_half_the_channels_cost(name: str) -> None:
    """With 1000 classes, at the size the family was made for, on tensors without values."""
    with init_empty_weights(include_buffers=False):
        model = build(name, 1000).to("meta").eval()
    found = trace(model, (images_of_size(),))
    assert found.free_share([key for key, _ in model.named_parameters()]) >= 0.95
    plan = make_plan(found, random_scores(found), PruneSettings(budget=BudgetSettings(channels=0.5)))
    limit, _ = MACS_LEFT.get(name, (0.32, ""))
    left = found.macs(plan.keep) / found.macs()
    assert 0.2 < left <= limit
    if name in MACS_LEFT:
        assert left > 0.32, "no exception is needed any more"
    assert found.macs() == count_macs(model, (images_of_size(),))
    assert sum(found.layer_macs(plan.keep).values()) == pytest.approx(found.macs(plan.keep), rel=1e-6)
    groups = [group.name for group in found.groups]
    assert len(set(groups)) == len(groups)


def random_scores(channel_map: ChannelMap) -> Any:
    return torch.rand(channel_map.n_labels, generator=torch.Generator().manual_seed(0)).double().numpy()


@pytest.mark.slow
def test_auxiliary_heads_are_pruned_with_the_rest() -> None:
    """Compared in train mode with norms and dropout in eval mode."""
    model, plan = family("googlenet"), Plan(chart("googlenet"), random_keep(chart("googlenet"), seed=4))
    images = small_images(batch=1).double()
    masked = enlivened(masked_double(model, plan), plan, images)
    small = compact(masked, plan)
    with torch.no_grad(), mode_for_trace(masked, True), mode_for_trace(small, True):
        want, got = masked(images), small(images)
    assert len(want) == len(got) == 3
    assert difference(tuple(want), tuple(got)) <= 1e-9
    heads = [key for key, _ in model.named_parameters() if key.startswith("aux")]
    assert heads
    shrunk = [key for key in heads if small.get_parameter(key).numel() < model.get_parameter(key).numel()]
    assert len(shrunk) > len(heads) // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "googlenet"])
def test_the_trial_finds_nothing_to_lock(name: str) -> None:
    example, first = (small_images(batch=1),), chart(name)
    settled = run_trial(family(name), first, lambda found: random_keep(found, seed=5), [example])
    assert settled.channel_map.locks == first.locks
    assert 0 < settled.difference <= 1e-9


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5", "mobilenet_v3_small"])
@pytest.mark.parametrize("seed", [11, 12])
def test_other_plans_and_harder_ones(name: str, seed: int) -> None:
    model = family(name)
    assert parity(model, Plan(chart(name), random_keep(chart(name), seed, share=0.9)), (small_images(),)) <= 1e-9


@pytest.mark.slow
def test_training_the_masked_model_keeps_it_equal_to_compact() -> None:
    """Batch statistics of removed channels must not leak: three steps with BatchNorm in train mode."""
    model = randomized(torchvision.models.resnet18(num_classes=CLASSES), seed=3)
    plan = Plan(chart("resnet18"), random_keep(chart("resnet18"), seed=6))
    masked = masked_double(model, plan).train()
    small = compact(masked, plan)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9) for net in (masked, small)]
    images = small_images(batch=4).double()
    for _ in range(3):
        for net, optimizer in zip((masked, small), optimizers, strict=True):
            optimizer.zero_grad()
            net(images).square().mean().backward()
            optimizer.step()
        zero_removed(masked, plan)
    with torch.no_grad():
        assert difference(masked.eval()(images), small.eval()(images)) <= 1e-9

"""Gradients of the masked model are those of the compact model, whatever comes back through a pruned channel."""

from __future__ import annotations

import copy

import pytest
import torch
from small_nets import random_plan
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.densenet import DenseNet
from torchvision.models.resnet import BasicBlock, ResNet

from prunekit.channels.cut.slicing import cut
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.masks.gradient_masks import GradientMasks
from prunekit.masks.masked_model import masked
from prunekit.masks.weight_masks import WeightMasks
from prunekit.planning.plan import Plan


class Roots(nn.Module):
    """Takes square roots, whose derivative at a pruned channel's zeros is infinite: NaN comes back through it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x).relu())).abs().sqrt()
        return self.last(x.mean((2, 3)))  # type: ignore[no-any-return]


class Functional(Roots):
    """The same with a weight that no module of its own applies: only the BatchNorm behind it can be hooked."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(self.first(x).relu(), self.second.weight, self.second.bias)  # type: ignore[arg-type]
        return self.last(self.norm(x).abs().sqrt().mean((2, 3)))  # type: ignore[no-any-return]


class Layered(nn.Module):
    """A LayerNorm, which spreads what comes back through one channel over all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)


def densenet() -> nn.Module:
    return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2, num_classes=5)


IMAGES, VECTORS = (4, 3, 16, 16), (4, 5)
NETS = {
    "resnet": (resnet, IMAGES),
    "densenet": (densenet, IMAGES),
    "roots": (Roots, IMAGES),
    "functional": (Functional, IMAGES),
    "norm": (Layered, VECTORS),
}


def made(name: str) -> tuple[nn.Module, Plan, Tensor]:
    torch.manual_seed(0)
    build, shape = NETS[name]
    model, x = build().double(), torch.randn(shape, dtype=torch.float64)
    plan = random_plan(trace(copy.deepcopy(model), (x,)))
    assert not plan.keep.all()
    return model, plan, x


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_the_compact_model(name: str) -> None:
    model, plan, x = made(name)
    with WeightMasks(model, plan):
        small = compact(model, plan)
    expected = gradients(small, x)
    with masked(model, plan):
        found = gradients(model, x)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        kept = cut(gradient, plan.kept_indices.get(key, ()))
        torch.testing.assert_close(
            kept, expected[key], rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}"
        )
        mask = plan.mask(key)
        assert mask is None or (gradient[~mask.expand(gradient.shape)] == 0).all(), key


@pytest.mark.parametrize("name", ["roots", "functional"])
def test_nan_would_spread_without_the_masks(name: str) -> None:
    model, plan, x = made(name)
    with WeightMasks(model, plan):
        kept = cut(gradients(model, x)["first.weight"], plan.kept_indices["first.weight"])
    assert kept.isnan().all()


@pytest.mark.parametrize(
    ("name", "hooked"),
    [
        ("roots", {"first", "second"}),
        ("functional", {"first", "norm"}),  # what `second` does is not seen: it is never called
        ("norm", {"first", "norm"}),
    ],
)
def test_modules_that_spread_nothing_are_hooked_only_behind_what_cannot_be(name: str, hooked: set[str]) -> None:
    model, plan, _ = made(name)
    with GradientMasks(model, plan):
        assert {path for path, module in model.named_modules() if path and module._forward_hooks} == hooked

"""Compact models: of the same class, trainable, compilable, and nothing shared with the model they came from."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torchvision
from equivalence import assert_unchanged, image, masked_double, random_keep, randomized, settled_plan, snapshot
from torch import Tensor, nn

from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.hooks.hook import count_hooks
from prunekit.planning.plan import Plan


def small_net() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(96, 4))
    return randomized(nn.Sequential(*layers))  # type: ignore[return-value]


@cache
def resnet() -> tuple[nn.Module, Plan]:
    model = randomized(torchvision.models.resnet18(num_classes=5)).eval()
    chart = trace(model, (torch.zeros(1, 3, 32, 32),))
    return model, Plan(chart, random_keep(chart))


def test_same_class_modes_and_flags() -> None:
    model = small_net().train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    plan = settled_plan(model, image())
    before = snapshot(model)
    small: Any = compact(model, plan)
    assert type(small) is type(model)
    assert [type(module) for module in small.modules()] == [type(module) for module in model.modules()]
    assert [module.training for module in small.modules()] == [module.training for module in model.modules()]
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(p.is_leaf and p.is_contiguous() for p in small.parameters())
    assert list(small.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        for tensor in small.state_dict().values():
            tensor.zero_()
    assert_unchanged(model, before)


def test_a_plan_that_keeps_everything_copies_the_model() -> None:
    model, plan = resnet()
    whole = compact(model, Plan(plan.channel_map, [True] * plan.channel_map.n_labels))  # type: ignore[arg-type]
    assert_unchanged(whole, snapshot(model))
    assert not {t.data_ptr() for t in whole.parameters()} & {t.data_ptr() for t in model.parameters()}


def test_what_removed_channels_hold_does_not_matter() -> None:
    model, plan = resnet()
    masked = masked_double(model, plan)
    want, got = compact(model, plan), compact(masked, plan).float()
    for (name, a), (_, b) in zip(want.named_parameters(), got.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precision_stays(dtype: torch.dtype) -> None:
    model = small_net().to(dtype)
    small = compact(model, settled_plan(model, (image()[0].to(dtype),)))
    assert {tensor.dtype for tensor in small.parameters()} == {dtype}
    assert small(image()[0].to(dtype)).dtype == dtype


def test_compact_trains_and_learns() -> None:
    model, plan = resnet()
    small = compact(model, plan).train()
    optimizer = torch.optim.SGD(small.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(small(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_compact_compiles_without_a_graph_break() -> None:
    model, plan = resnet()
    small = compact(model, plan).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about its own calls
        compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(images), small(images), atol=1e-4, rtol=1e-4)
    torch._dynamo.reset()


def test_a_compact_model_can_be_exported_and_copied() -> None:
    model, plan = resnet()
    small = compact(model, plan).eval()
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(small)(images), small(images))


def test_two_compact_models_share_nothing() -> None:
    model, plan = resnet()
    first, second = compact(model, plan), compact(model, plan)
    before = snapshot(second)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1)
    assert_unchanged(second, before)


def test_compaction_leaves_no_hooks_and_takes_the_users_along() -> None:
    model = small_net()
    plan = settled_plan(model, image())
    seen: list[int] = []

    def widths(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output.shape[1])

    model[0].register_forward_hook(widths)
    small = compact(model, plan)
    assert count_hooks(model) == count_hooks(small) == 1
    model(*image())
    small(*image())
    assert seen == [8, plan.kept("0.weight", 0).size]


def test_compacting_under_active_masks() -> None:
    from prunekit.masks.masked_model import masked

    model = small_net().eval()
    plan = settled_plan(model, image())
    with masked(model, plan):
        small = compact(model, plan)
        assert count_hooks(small) == 0
        assert small(*image()).shape == (2, 4)

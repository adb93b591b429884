"""Passes that begin at a mask: the same to the last bit as whole ones, and whole where torch does not see all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Net, randomized
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.trace import trace
from prunekit.hooks.hook import count_hooks
from prunekit.masks.weight_masks import WeightMasks
from prunekit.measure import partial_forward
from prunekit.measure.partial_forward import WHOLE, DensePrefix
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import keep_in_group

PARTS = 3


def chained(self: Any, x: Tensor) -> Tensor:
    for part in self.parts:
        x = F.relu_(part(x).add_(x))
    return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def overwritten(self: Any, x: Tensor) -> Tensor:
    """The stream is one tensor that each part writes to: what a part reads is gone afterwards."""
    x = x + 1
    for part in self.parts:
        x.add_(part(x))
    return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def split(self: Any, x: Tensor) -> Tensor:
    """Views of one tensor, one of which is written to while the other is yet to be read."""
    left, right = torch.cat([x, x.flip(1)], 1).chunk(2, 1)
    for part in self.parts:
        left = part(left) + right.mul_(0.9)
    return self.head(left.mean((2, 3)))  # type: ignore[no-any-return]


def looped(self: Any, x: Tensor) -> Tensor:
    """As many calls before the parts as there are images."""
    return chained(self, torch.stack([image / image.abs().max() for image in x]))


def unseen(self: Any, x: Tensor) -> Tensor:
    for part in self.parts:
        with torch._C.DisableTorchFunction():
            x = part(x)
        x = x * 0.9
    return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def net(function: Any) -> nn.Module:
    parts = [
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 3, 1)) for _ in range(PARTS)
    ]
    return randomized(Net(function, parts=nn.ModuleList(parts), head=nn.Linear(3, 4))).eval()


def prefixed(model: nn.Module, batch: int = 4) -> tuple[DensePrefix, dict[str, Plan]]:
    """With the plans that leave two channels of the inner group of one part each."""
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    chart = trace(model, (x,))
    inner = [group for group in chart.groups if group.labels.size == 6]
    plans = {group.name: Plan(chart, keep_in_group(chart, group.labels, 2)) for group in inner}
    assert list(plans) == [f"parts.{index}.0" for index in range(PARTS)]
    tensors = {name: list(plan.kept_indices) for name, plan in plans.items()}
    return DensePrefix(model, x, tensors, lambda name: WeightMasks(model, plans[name], restore=True), batch), plans


def assert_same_bits(model: nn.Module, found: DensePrefix, plans: dict[str, Plan]) -> None:
    for seed in (1, 2):
        images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(found.record(images), model(images))
        for _ in range(2):  # the first must leave what was recorded as it was
            for name, plan in plans.items():
                with WeightMasks(model, plan, restore=True):
                    assert torch.equal(found.run(name, images), model(images))
    assert count_hooks(model) == 0


@torch.no_grad()
@pytest.mark.parametrize("function", [chained, overwritten, split])
def test_outputs_are_the_same_bits_as_those_of_a_whole_pass(function: Any) -> None:
    model = net(function)
    found, plans = prefixed(model)
    assert_same_bits(model, found, plans)
    assert (len(set(found.starts.values())) == PARTS) == (function is chained)


@torch.no_grad()
def test_passes_with_other_calls_than_those_that_were_tried_are_whole() -> None:
    model = net(looped)
    found, plans = prefixed(model)
    assert len(set(found.starts.values())) == PARTS
    assert_same_bits(model, found, plans)


@torch.no_grad()
def test_what_lies_before_a_mask_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(chained)
    found, plans = prefixed(model)
    ran: list[int] = []

    class Spy(partial_forward._Replay):
        def call(self, call: Any) -> Any:
            if call.name == "conv2d":
                ran.append(call.number >= self._start)
            return super().call(call)

    monkeypatch.setattr(partial_forward, "_Replay", Spy)
    images = torch.randn(4, 3, 6, 6)
    found.record(images)
    for index, (name, plan) in enumerate(plans.items()):
        ran.clear()
        with WeightMasks(model, plan, restore=True):
            found.run(name, images)
        assert ran == ([False] * 2 * index + [True] * 2 * (PARTS - index) if index else [])  # of the first it is whole


@torch.no_grad()
def test_where_torch_does_not_see_what_reads_a_mask_the_pass_is_whole() -> None:
    model = net(unseen)
    found, plans = prefixed(model)
    assert set(found.starts.values()) == {WHOLE}
    assert_same_bits(model, found, plans)


@torch.no_grad()
def test_what_does_not_fit_into_memory_is_not_held() -> None:
    found, _ = prefixed(net(chained), batch=10**9)
    assert set(found.starts.values()) == {WHOLE}
    assert not found._needed

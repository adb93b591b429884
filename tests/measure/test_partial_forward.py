"""Passes that begin at a mask: the same to the last bit as whole ones, and whole where torch does not see all of it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from equivalence import Net, randomized
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from prunekit.channels.trace import trace
from prunekit.hooks.hook import count_hooks
from prunekit.masks.weight_masks import WeightMasks
from prunekit.measure import group_sensitivity
from prunekit.measure.group_sensitivity import WHOLE, PartialRuns, Quality
from prunekit.planning.plan import Plan
from prunekit.planning.sensitivity_curves import keep_in_group
from prunekit.utils.tensors import gather

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


def below_functions(self: Any, x: Tensor) -> Tensor:
    """Torch's functions show neither what reads the masked weights nor what writes to the stream."""
    for part in self.parts:
        with torch._C.DisableTorchFunction():
            x = part(x)
        x = x * 0.9
    return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def unseen(self: Any, x: Tensor) -> Tensor:
    """The last weight is read as an extension in C++ does, without any operator, in front of all parts."""
    if not getattr(self, "mapped", False):
        return chained(self, x)
    with torch._C.DisableTorchFunction():
        address = self.parts[-1][2].weight.data_ptr()
    return chained(self, x * sum((ctypes.c_float * 18).from_address(address)))


def early(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is returned was made in front of all parts, and is read by none."""
    return x * 2, chained(self, x)


def net(function: Any) -> nn.Module:
    parts = [
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 3, 1)) for _ in range(PARTS)
    ]
    return randomized(Net(function, parts=nn.ModuleList(parts), head=nn.Linear(3, 4))).eval()


def partial(model: nn.Module) -> tuple[PartialRuns, dict[str, WeightMasks]]:
    """With the masks that leave two channels of the inner group of one part each."""
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    chart = trace(model, (x[:2],))
    model.mapped = True  # type: ignore[assignment]
    inner = [group for group in chart.groups if group.labels.size == 6]
    plans = {group.name: Plan(chart, keep_in_group(chart, group.labels, 2)) for group in inner}
    assert list(plans) == [f"parts.{index}.0" for index in range(PARTS)]
    tensors = {name: list(plan.kept_indices) for name, plan in plans.items()}
    masks = {name: WeightMasks(model, plan, restore=True) for name, plan in plans.items()}
    return PartialRuns(model, Quality(), tensors, masks, (x,)), masks


def assert_same_bits(model: nn.Module, runs: PartialRuns, masks: dict[str, WeightMasks]) -> None:
    for seed in (1, 2):
        images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        assert_equal(runs.dense((images,)).output, model(images.clone()))
        for name, mask in masks.items():
            runs.advance(name, (images,))
            for _ in range(2):  # the first must leave the saved state as it was
                with mask:
                    assert_equal(runs.masked(name, (images,), name).output, model(images.clone()))
    assert count_hooks(model) == 0


def assert_equal(one: Any, other: Any) -> None:
    assert all(map(torch.equal, gather(one), gather(other)))


class Convolutions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts those that are computed."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.convolution.default
        return function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("function", [chained, overwritten, split, early])
def test_outputs_are_the_same_bits_as_those_of_a_whole_pass(function: Any) -> None:
    model = net(function)
    runs, masks = partial(model)
    assert_same_bits(model, runs, masks)
    assert len(set(runs.starts.values())) == PARTS


@torch.no_grad()
def test_passes_with_other_calls_than_those_that_were_tried_are_whole() -> None:
    model = net(looped)
    runs, masks = partial(model)
    assert len(set(runs.starts.values())) == PARTS
    assert_same_bits(model, runs, masks)


@torch.no_grad()
def test_what_lies_before_a_mask_is_not_computed_again() -> None:
    model = net(chained)
    runs, masks = partial(model)
    images = (torch.randn(4, 3, 6, 6),)
    runs.dense(images)
    for index, (name, mask) in enumerate(masks.items()):
        runs.advance(name, images)
        with mask, Convolutions() as counted:  # type: ignore[no-untyped-call]
            runs.masked(name, images, name)
        assert counted.count == 2 * (PARTS - index)


@torch.no_grad()
@pytest.mark.parametrize("function", [below_functions, unseen])
def test_where_torch_does_not_see_what_reads_a_mask_the_pass_is_whole(function: Any) -> None:
    model = net(function)
    runs, masks = partial(model)
    assert runs.starts["parts.2.0"] == WHOLE
    assert_same_bits(model, runs, masks)


@torch.no_grad()
def test_what_does_not_fit_into_memory_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sensitivity, "MEMORY_BYTES", 1)
    runs, _ = partial(net(chained))
    assert set(runs.starts.values()) == {WHOLE}

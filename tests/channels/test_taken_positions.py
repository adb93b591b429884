"""Tables that forward makes and orders that a model stores: the compact model states which positions it takes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import TOLERANCE, parity, random_keep, randomized, settled_plan
from nets_taken import CLASSES, WIDTH, Added, Attribute, OnAMap, Ordered, Taken, Time, example_of, waves
from torch import Tensor, nn

from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.trace import trace
from prunekit.channels.trial.trial import run_trial
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, save
from prunekit.planning.plan import Plan, load_plan

EXAMPLE = example_of(Added)


def places(plan: Plan) -> set[str]:
    found = [CodePlace.named(size.name) for size in plan.channel_map.sizes]
    return {place.text for place in found if place is not None and place.axis is not None}


@pytest.mark.parametrize("cls", CLASSES)
def test_the_compact_model_is_as_narrow_as_an_expert_would_make_it(cls: type[Taken]) -> None:
    net, example = randomized(cls()).eval(), example_of(cls)
    plan = settled_plan(net, example, share=0.5)
    small: Any = compact(net, plan)
    assert small.a.weight.shape[0] < WIDTH
    assert small.b.weight.shape[:2] == (small.c.weight.shape[1], small.norm.weight.shape[0])
    assert parity(net, plan, example_of(cls, batch=3, length=7)) <= TOLERANCE
    small(*example).square().mean().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in small.parameters())
    assert torch.equal(pickle.loads(pickle.dumps(small))(*example), small(*example))


def test_the_kept_channels_of_a_table_are_added_and_put_in_their_order() -> None:
    net = randomized(OnAMap()).eval()
    plan = settled_plan(net, example_of(OnAMap), share=0.5)
    small: Any = compact(net, plan)
    kept = plan.kept("a.weight", 0)
    y = small.a(*example_of(OnAMap)) + waves(torch.arange(3)).t()[kept, :, None]
    order = [kept.tolist().index(number) for number in net.order.tolist() if number in kept]
    assert torch.equal(small.meet(small.a(*example_of(OnAMap)), *example_of(OnAMap)), y.relu()[:, order])
    assert np.array_equal(plan.kept("b.weight", 1), [i for i, n in enumerate(net.order.tolist()) if n in kept])


@pytest.mark.parametrize("cls", [Time, OnAMap])
def test_plans_and_folders_hold_the_positions(cls: type[Taken], tmp_path: Path) -> None:
    net, example = randomized(cls()).eval(), example_of(cls)
    plan = settled_plan(net, example, share=0.5)
    small = compact(net, plan)
    plan.save(tmp_path / "plan")
    assert torch.equal(compact(net, load_plan(tmp_path / "plan"))(*example), small(*example))
    save(small, tmp_path / "small", plan)
    assert torch.equal(load(tmp_path / "small", model=cls())(*example), small(*example))


@pytest.mark.parametrize("cls", [Added, Attribute])
def test_a_compact_model_is_pruned_again(cls: type[Taken]) -> None:
    net = randomized(cls()).eval()
    small: Any = compact(net, settled_plan(net, EXAMPLE, share=0.3)).eval()
    again = settled_plan(small, EXAMPLE, seed=1, share=0.4)
    assert parity(small, again, EXAMPLE) <= TOLERANCE
    assert compact(small, again).a.out_features < small.a.out_features < WIDTH  # type: ignore[union-attr, operator]


def test_plain_classes_keep_what_their_python_fixes() -> None:
    for cls, advice in ((Added, "of a buffer in its place"), (Ordered, "in the order of an index that the model sto")):
        net = randomized(cls()).eval()
        settled = run_trial(net, trace(net, EXAMPLE), random_keep, [EXAMPLE], plain=True)
        assert settled.compact.a.out_features == WIDTH  # type: ignore[union-attr]
        assert type(settled.compact) is cls
        assert any(advice in lock.reason for lock in settled.channel_map.locks)


class Summed(Added):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return super().meet(y, x).sum(-1, keepdim=True) * self.b.bias


class Mixed(Taken):
    """One expression meets a table first, and then a parameter, which loses channels."""

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        for other in (self.scale, self.norm.weight):
            y = y * other
        return y


class OfTheInput(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y + x.repeat(1, 1, 2)


class ByTheInput(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y[..., x[0, 0].repeat(2).argsort()]


class OfAWidthGivenOn(Taken):
    """Its table is made by a function that is given the width of the tensor, narrow in the compact model."""

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y + waves(torch.arange(y.shape[1]), y.shape[2])


class Looped(Taken):
    """One expression meets a table with other channels each time: it cannot take those of both."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        for layer in (nn.Identity(), self.between):
            y = layer(y).relu() + self.scale
        return y


@pytest.mark.parametrize("cls", [Summed, Mixed, OfTheInput, ByTheInput, Looped])
def test_no_positions_are_stated_where_they_would_not_do(cls: type[Taken]) -> None:
    net = randomized(cls()).eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert not places(plan)
    assert plan.kept("a.weight", 0).size == WIDTH


class PartsOfChannels(Taken):
    """Its index picks of a part of the channels, and its table meets another."""

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        some = y[..., 2:][..., self.order % 10]
        return some + torch.cat([y[..., :4] * self.scale[:4], y[..., 4:]], -1)


@pytest.mark.parametrize("cls", [PartsOfChannels, OfAWidthGivenOn])
def test_positions_of_parts_and_of_a_table_made_of_a_width_are_stated(cls: type[Taken]) -> None:
    net = randomized(cls()).eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert len(places(plan)) == (2 if cls is PartsOfChannels else 1)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert parity(net, plan, example_of(cls, batch=3, length=7)) <= TOLERANCE


class SortPool(nn.Module):
    """Points in the order of their last channel, of which the first few are read (as in DGCNN's sort pooling, 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(3 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        points = self.b(self.a(x).tanh()).tanh()
        order = points[:, :, -1].argsort(1, descending=True)[:, :3, None]
        return self.c(points.gather(1, order.expand(-1, -1, points.size(2))).flatten(1))  # type: ignore[no-any-return]


def test_the_channel_that_a_sort_reads_stays_the_last() -> None:
    net, points = randomized(SortPool()).eval(), (torch.randn(2, 7, 6),)
    plan = settled_plan(net, points, share=0.5)
    kept = plan.kept("b.weight", 0)
    assert kept[-1] == WIDTH - 1
    assert kept.size < 0.6 * WIDTH
    assert parity(net, plan, (torch.randn(3, 9, 6),)) <= TOLERANCE

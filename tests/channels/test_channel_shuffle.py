"""Channel shuffles: if ties would lock all channels, the compact model states the order of the kept ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import TOLERANCE, parity, random_keep, randomized, settled_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from nets_shuffled import WIDTH, HalvedUnit, Unit, UnitOfModules, channel_shuffle, units
from torch import Tensor, nn

from prunekit.channels.labels.code_places import CodePlace
from prunekit.channels.rewrite.size_expressions import avoidable
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_expressions
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import SizeAttribute
from prunekit.channels.tracing.tracer import trace_model
from prunekit.compaction.compact_model import compact
from prunekit.compaction.model_folder import load, save
from prunekit.planning.plan import Plan, load_plan

EXAMPLE = (torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(3)),)
MANY = 5
"""Units after which ties by halves of halves leave one class."""


def orders(plan: Plan) -> list[tuple[str, str]]:
    places = [(size.module, CodePlace.named(size.name)) for size in plan.channel_map.sizes]
    return [(module, place.text) for module, place in places if place is not None and place.axis is not None]


@pytest.mark.parametrize("cls", [Unit, UnitOfModules])
def test_the_order_of_a_shuffle_is_found(cls: type[Unit]) -> None:
    net = units(cls, 2).eval()
    found = [size for one in avoidable(trace_model(net, [EXAMPLE])) for size in one.sizes if size.order is not None]
    moved = channel_shuffle(torch.arange(WIDTH).reshape(1, -1, 1, 1), 2).reshape(-1)
    owners = ["1", "2"] if cls is Unit else ["1.shuffle", "2.shuffle"]
    assert [size.module for size in found] == owners
    for size in found:
        assert np.array_equal(size.order, moved)  # type: ignore[arg-type]
        assert CodePlace.named(size.name).axis == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("cls", [Unit, UnitOfModules])
def test_every_channel_is_free_however_often_it_is_shuffled(cls: type[Unit], tmp_path: Path) -> None:
    net = randomized(units(cls, MANY)).eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert parity(net, plan, (torch.randn(3, 3, 6, 5),)) <= TOLERANCE
    assert len(orders(plan)) == MANY
    free = [labels[0] for name, labels in plan.channel_map.labels.items() if "mix.weight" in name or name == "0.weight"]
    assert len(np.unique(np.concatenate(free))) == WIDTH + MANY * WIDTH // 2  # type: ignore[arg-type]
    small = compact(net, plan)
    save(small, tmp_path / "small", plan)
    assert torch.equal(load(tmp_path / "small", model=units(cls, MANY))(*EXAMPLE), small(*EXAMPLE))
    plan.save(tmp_path / "plan")
    again = load_plan(tmp_path / "plan")
    assert attribute_values(net, again.channel_map, again.keep) == attribute_values(net, plan.channel_map, plan.keep)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 10_000), st.floats(0.1, 0.8), st.sampled_from([Unit, UnitOfModules]))
def test_orders_follow_any_plan(seed: int, share: float, cls: type[Unit]) -> None:
    net = randomized(units(cls, MANY)).eval()
    assert parity(net, settled_plan(net, EXAMPLE, seed, share), EXAMPLE) <= TOLERANCE


def test_the_compact_model_trains_and_can_be_exported_and_pruned_again() -> None:
    net = randomized(units(Unit, MANY)).eval()
    small = compact(net, settled_plan(net, EXAMPLE, share=0.3))
    small(*EXAMPLE).sum().backward()
    exported = torch.export.export(small, EXAMPLE).module()
    assert torch.allclose(exported(*EXAMPLE), small(*EXAMPLE), rtol=1e-5, atol=1e-6)
    again = settled_plan(small.eval(), EXAMPLE, seed=1, share=0.3)
    assert parity(small, again, EXAMPLE) <= TOLERANCE


def test_a_map_alone_is_enough_to_compact() -> None:
    net = randomized(units(Unit, MANY)).eval()
    chart = trace(net, EXAMPLE)
    assert parity(net, Plan(chart, random_keep(chart, 1, 0.5), {}), EXAMPLE) <= TOLERANCE


class OnTheFirstAxis(nn.Module):
    """Splits and shuffles heads that are merged with the batch: how many there are then is no size."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x).flatten(0, 1).flatten(1)[:, None]  # (N * WIDTH, 1, H * W)
        first, second = y.chunk(2, 0)
        y = torch.cat([first, second.relu()], 0)
        y = y.view(2, len(y) // 2, *y.shape[1:]).transpose(0, 1).reshape(y.shape)
        return y.view(x.shape)


def test_nothing_is_stated_of_an_axis_that_grows_with_the_batch() -> None:
    net = randomized(nn.Sequential(nn.Conv2d(3, WIDTH, 1), OnTheFirstAxis(), nn.Conv2d(WIDTH, 5, 1))).eval()
    assert not avoidable(trace_model(net, [EXAMPLE]))
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert parity(net, plan, (torch.randn(4, 3, 6, 5),)) <= TOLERANCE


class Loop(Unit):
    """One expression shuffles other channels each time: it cannot state two orders."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(MANY):
            x = super().forward(x)
        return x


def test_an_expression_that_runs_on_other_channels_each_time_is_left_alone() -> None:
    net = randomized(units(Loop, 1)).eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert not orders(plan)


def test_where_ties_do_the_code_stays_as_it_is() -> None:
    net = randomized(units(Unit, 1)).eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert plan.removed > 0
    assert not plan.channel_map.sizes
    assert type(compact(net, plan)[1]) is Unit  # type: ignore[index]


def test_a_function_that_does_more_than_shuffle_is_not_replaced() -> None:
    net = randomized(units(HalvedUnit, MANY)).eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE
    assert not orders(plan)


def test_an_order_of_what_is_left() -> None:
    labels, order = np.arange(1, 7)[:, None], np.array([0, 3, 1, 4, 2, 5])
    keep = np.array([True, True, False, True, True, True, False])
    size = SizeAttribute("", "x", None, labels, order)
    assert size.value(keep) == [0, 2, 3, 1]  # of positions 0, 2, 3, 4: in the order 0, 3, 4, 2
    assert SizeAttribute("", "x", None, labels).value(keep) == 4


def test_an_order_that_is_none_is_refused() -> None:
    unit: Any = Unit()
    _, found = avoidable(trace_model(nn.Sequential(nn.Conv2d(3, WIDTH, 1), unit), [EXAMPLE]))
    (order,) = found.sizes
    assert str(CodePlace.named(order.name)) == order.name
    for value in ([0, -1], [0, "1"], "01", [1.0]):
        with pytest.raises(ValueError, match="is no size"):
            set_expressions(unit, {order.name: value})
    assert type(unit) is Unit

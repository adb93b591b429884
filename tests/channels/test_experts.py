"""Mixtures of experts: what an expert would cut by hand, and products of grouped rows with a stack of matrices."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence import difference, masked_double, randomized
from net_cases import CASES
from nets_experts import EXPERTS, INNER, TAKEN, WIDTH, mixture
from torch import Tensor, nn

import prunekit
from prunekit.channels.rules.compute import OF_STACK
from prunekit.channels.trial.float64 import AS_DOUBLE
from prunekit.channels.trial.trial import run_trial
from prunekit.measure.model_size import count_macs


def by_parts(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """The product of each part of the rows with its own matrix, a row at a time."""
    expert = torch.searchsorted(offs, torch.arange(len(left)), right=True)
    return torch.stack([row @ right[index] for row, index in zip(left, expert.tolist(), strict=True)])


def grouped(net: Any, x: Tensor, shares: Tensor, taken: Tensor) -> Tensor:
    """Experts as transformers runs them by default: rows sorted by expert, and one product for all of them."""
    expert, order = taken.flatten().sort()
    offsets = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    both = torch._grouped_mm(x[order // TAKEN], net.up.transpose(1, 2), offs=offsets)
    gate, up = both.chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, net.down.transpose(1, 2), offs=offsets)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return ((out * shares.flatten()[order, None])[back]).view(len(x), TAKEN, -1).sum(1)


def words() -> tuple[Tensor]:
    return (torch.randint(0, 9, (2, 8), generator=torch.Generator().manual_seed(1)),)


def mixed_in_groups(inner: int = 16, width: int = 16) -> nn.Module:
    model = mixture(grouped)
    model.first, model.router, model.head = nn.Linear(7, width), nn.Linear(width, EXPERTS), nn.Linear(width, 5)
    model.up = nn.Parameter(torch.zeros(EXPERTS, 2 * inner, width))
    model.down = nn.Parameter(torch.zeros(EXPERTS, width, inner))
    return randomized(model).eval()


@pytest.mark.parametrize("name", ["experts_one_after_the_other", "experts_with_gates_between_values"])
def test_half_of_the_channels_is_half_of_every_width_but_the_number_of_experts(name: str) -> None:
    model, example = CASES[name][0]()
    small = prunekit.prune(randomized(model).eval(), example, channels=0.5).model
    assert small.up.shape == (EXPERTS, INNER, WIDTH // 2)  # type: ignore[union-attr]
    assert small.down.shape == (EXPERTS, WIDTH // 2, INNER // 2)  # type: ignore[union-attr]
    assert small.router.weight.shape == (EXPERTS, WIDTH // 2)  # type: ignore[union-attr]


def test_grouped_rows_are_proven_equal_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = mixed_in_groups(), words()
    result = prunekit.prune(model, example, channels=0.5)
    assert result.model.up.shape == (EXPERTS, 16, 8)  # type: ignore[union-attr]
    assert result.model.down.shape == (EXPERTS, 8, 8)  # type: ignore[union-attr]
    assert result.max_relative_difference <= 1e-12
    assert any(lock.reason == OF_STACK for lock in result.plan.channel_map.locks)
    result.model(*example).sum().backward()
    assert result.model.up.grad is not None  # type: ignore[union-attr]
    monkeypatch.setattr(torch, "_grouped_mm", by_parts)
    masked, small = masked_double(model, result.plan), copy.deepcopy(result.model).double()
    with torch.no_grad():
        assert difference(masked(*example), small(*example)) <= 1e-12


def test_multiply_accumulates_of_grouped_rows_are_counted() -> None:
    model, example = mixed_in_groups(), words()
    plan = prunekit.plan(model, example, channels=0.5)
    rows = 8 * TAKEN  # of one sample
    ends = 8 * (7 * 16 + 16 * EXPERTS + 16 * 5)
    assert plan.channel_map.macs() == ends + rows * (16 * 32 + 16 * 16) == count_macs(model, example)
    assert plan.channel_map.macs(plan.keep) == count_macs(prunekit.compact(model, plan), example)


def test_widths_of_grouped_rows_are_multiples_that_kernels_take_in_half_precision() -> None:
    model, example = mixed_in_groups(inner=40, width=24), words()
    small = prunekit.prune(model, example, channels=0.7).model
    assert small.up.shape == (EXPERTS, 48, 16)  # type: ignore[union-attr]
    assert small.bfloat16()(*example).isfinite().all()


def test_a_plan_with_other_widths_is_locked_there() -> None:
    model, example = mixed_in_groups(), words()
    chart = prunekit.trace(model, example)

    def choose(known: Any) -> Any:
        keep = np.ones(known.n_labels, dtype=bool)
        for group in known.groups:
            keep[group.labels[:1]] = False
        return keep

    settled = run_trial(model, chart, choose, [example])
    assert settled.keep[settled.channel_map.labels["up"][2]].all()
    assert not settled.keep.all()
    assert any("multiples of 8" in lock.reason for lock in settled.channel_map.locks)


@pytest.mark.parametrize(
    "shapes",
    [((10, 8), (3, 8, 16)), ((3, 8, 16), (16, 10)), ((8, 10), (10, 16)), ((3, 8, 8), (3, 8, 16))],
    ids=["rows and a stack", "a stack and columns", "parts of what is summed", "two stacks"],
)
def test_parts_in_float64_are_the_parts_of_the_kernel(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator) for shape in shapes)
    right = right.transpose(-1, -2).contiguous().transpose(-1, -2)
    offsets = None if left.dim() == right.dim() == 3 else torch.tensor([2, 5, 10], dtype=torch.int32)
    with AS_DOUBLE[0]():
        wide = torch._grouped_mm(left.double(), right.double(), offs=offsets)
    assert wide.dtype == torch.float64
    if offsets is not None and left.dim() == right.dim() == 2:
        left, right = F.pad(left, (0, 2)), F.pad(right.T, (0, 2)).T  # rows of 16 bytes
    torch.testing.assert_close(torch._grouped_mm(left, right, offs=offsets), wide.float(), rtol=1e-5, atol=1e-5)


class TakenByNumber(nn.Module):
    """Takes one of several layers that are alike, by the first number of its input."""

    def __init__(self, heads: bool) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(4, 6), heads
        self.second = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        x = self.first(x).relu()
        if self.heads:
            return self.last(self.experts[1](self.second(self.experts[0](x)).relu()))
        return self.last(self.experts[number](x) + self.experts[1](x))


def test_an_expert_that_no_example_takes_is_cut_like_the_others() -> None:
    model, x = randomized(TakenByNumber(heads=False)).eval(), torch.randn(3, 4)
    result = prunekit.prune(model, (x,), channels=0.5)
    assert [tuple(expert.weight.shape) for expert in result.model.experts] == [(3, 3)] * 4  # type: ignore[union-attr]
    with prunekit.masked(model, result.plan):
        for number in range(4):
            torch.testing.assert_close(result.model(x, number), model(x, number))
    assert result.plan.channel_map.macs() == 4 * 6 + 2 * 6 * 6 + 6 * 2


def test_members_on_other_channels_say_nothing_of_one_that_is_not_taken() -> None:
    model = randomized(TakenByNumber(heads=True)).eval()
    chart = prunekit.trace(model, (torch.randn(3, 4),))
    assert {lock.module for lock in chart.locks if "more_examples" in lock.reason} == {"experts.2", "experts.3"}


def test_a_plan_remembers_the_multiples(tmp_path: Any) -> None:
    model, example = mixed_in_groups(), words()
    plan = prunekit.plan(model, example, channels=0.5)
    plan.save(tmp_path)
    steps = plan.channel_map.steps.tolist()
    assert set(steps) == {1, 8}
    assert prunekit.load_plan(tmp_path).channel_map.steps.tolist() == steps

"""Numbers that a module's Python makes of a width stay those of the dense model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence import TOLERANCE, parity, randomized, settled_plan
from nets_stated import WIDTH, Correlation, ScaleOfAWidth
from torch import Tensor, nn

from prunekit.channels.labels.code_places import CodePlace
from prunekit.compaction.compact_model import compact

EXAMPLE = (torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64),)


def numbers(plan: Any) -> set[tuple[str, str, int]]:
    """Module, expression and value of all sizes that no plan changes."""
    fixed = [size for size in plan.channel_map.sizes if not size.labels.any()]
    places = [CodePlace.named(size.name) for size in fixed]
    return {(size.module, place.text, len(size.labels)) for size, place in zip(fixed, places, strict=True) if place}


def test_attention_keeps_the_scale_of_its_dense_width() -> None:
    """Against a narrow model written by hand."""
    net = randomized(nn.Sequential(ScaleOfAWidth(), ScaleOfAWidth())).double().eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert numbers(plan) == {(path, "k.size(-1)", WIDTH // 3) for path in ("0", "1")}
    small: Any = compact(net, plan)[0]  # type: ignore[index]
    x = EXAMPLE[0]
    q, k, v = (part(x).unflatten(-1, (small.num_heads, -1)).transpose(1, 2) for part in (small.q, small.k, small.v))
    assert q.shape[-1] < WIDTH // 3
    scores = (q @ k.transpose(-2, -1)) / 2.0
    assert torch.allclose(small(x), small.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), rtol=1e-12)


def test_a_number_read_before_its_tensor_is_gone_stays() -> None:
    net = randomized(Correlation()).double().eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert numbers(plan) == {("", "n_features", 8)}
    small: Any = compact(net, plan)
    first, second = small.a(*EXAMPLE), small.b(*EXAMPLE)
    assert first.shape[-1] < 8
    root = torch.tensor(8).sqrt()  # in float32, as everything that torch makes of a whole number
    assert torch.allclose(small(*EXAMPLE), small.c(first @ second.transpose(1, 2) / root), rtol=1e-12)


class FanIn(nn.Module):
    """Scales weights by numbers of their entries, each written in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 8), nn.Linear(8, 9), nn.Linear(9, WIDTH)
        self.d = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.a.weight * math.sqrt(2 / self.a.weight.numel()))
        w = self.b.weight
        x = F.linear(x, w * math.sqrt(2 / np.prod(w.size()[1:])))
        x = F.linear(x, self.c.weight / len(self.b.weight))
        scale = 3 / self.d.weight[0].numel()
        return F.linear(x, self.d.weight * scale)


def test_numbers_of_entries_stay_those_of_the_dense_model() -> None:
    net = randomized(nn.Sequential(nn.Linear(WIDTH, WIDTH), FanIn(), nn.Linear(10, 4))).double().eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert numbers(plan) == {
        ("1", "self.a.weight.numel()", 8 * WIDTH),
        ("1", "np.prod(w.size()[1:])", 8),
        ("1", "len(self.b.weight)", 9),
        ("1", "self.d.weight[0].numel()", WIDTH),
    }
    for part in "abcd":
        assert 0 < plan.kept(f"1.{part}.weight", 0).size < getattr(net[1], part).out_features
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


class Folded(nn.Module):
    """Divides by a number that grows with its width and with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).transpose(1, 2).flatten(0, 1)  # (N * 8, L)
        y = y / y.shape[0]
        return self.b(y.unflatten(0, (len(x), -1)).transpose(1, 2))  # type: ignore[no-any-return]


class SizeOfATable(nn.Module):
    """Makes a table of so many columns out of their number: as a number it would be right, as a size it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y + torch.full((y.shape[-1],), 1 / y.shape[-1], dtype=y.dtype))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", [Folded, SizeOfATable])
def test_what_cannot_be_fixed_is_locked_and_said(cls: type[nn.Module]) -> None:
    net = randomized(nn.Sequential(nn.Linear(WIDTH, WIDTH), cls(), nn.Linear(WIDTH, 4))).double().eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert numbers(plan) == set()
    assert plan.kept("1.a.weight", 0).size == 8
    assert plan.kept("0.weight", 0).size < WIDTH
    assert [lock for lock in plan.channel_map.locks if lock.module == "1"]
    for batch in (2, 7):
        assert parity(net, plan, (torch.randn(batch, 5, WIDTH, dtype=torch.float64),)) <= TOLERANCE

"""Fields that meet others on part of their axes: heads against tables, norms and biases of one head's width."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from equivalence import TOLERANCE, Net, parity, randomized, settled_plan
from torch import Tensor, nn

from prunekit.compaction.compact_model import compact

HEADS, DEPTH, WIDTH = 4, 6, 8


def heads_of(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, DEPTH).transpose(1, 2)


def rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """As decoders do, with the table computed from a buffer."""
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    half = torch.cat([-x[..., DEPTH // 2 :], x[..., : DEPTH // 2]], -1)
    return x * angles.cos() + half * angles.sin()


def attention(net: Any, x: Tensor) -> Tensor:
    """Two heads of queries for each of keys and values."""
    q, k, v = (heads_of(part(net.i(x))) for part in (net.q, net.k, net.v))
    q, k = rotated(q * net.scale, net.frequencies), rotated(k, net.frequencies)
    k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(*q.shape) for y in (k, v))
    return net.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def rotary() -> nn.Module:
    full, half = HEADS * DEPTH, HEADS * DEPTH // 2
    parts = {"q": nn.Linear(WIDTH, full), "k": nn.Linear(WIDTH, half), "v": nn.Linear(WIDTH, half)}
    scale = nn.Parameter(torch.ones(DEPTH))
    table = {"scale": scale, "frequencies": torch.linspace(1, 0.1, DEPTH // 2)}
    return randomized(Net(attention, i=nn.Linear(5, WIDTH), **parts, **table, o=nn.Linear(full, 3))).eval()


@pytest.mark.parametrize("length", [1, 4, 9])
def test_rotary_embeddings_leave_whole_heads_free(length: int) -> None:
    net, example = rotary(), (torch.randn(2, 4, 5),)
    plan = settled_plan(net, example, share=0.5)
    queries, keys = (plan.kept(f"{name}.weight", 0) // DEPTH for name in "qk")
    assert np.array_equal(np.unique(queries), np.unique(keys) * 2 + [0, 1])
    assert (queries.size, keys.size) == (2 * DEPTH, DEPTH)
    assert plan.kept("v.weight", 0).size == DEPTH
    assert not any(labels.any() for name in ("scale", "frequencies") for labels in plan.channel_map.labels[name])
    assert plan.kept("i.weight", 0).size < WIDTH
    assert parity(net, plan, (torch.randn(2, length, 5),)) <= TOLERANCE


@pytest.mark.parametrize("swapped", [False, True])
def test_the_same_positions_of_every_head_go_with_what_they_meet(*, swapped: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).view(len(x), 2, -1)
        return net.b((net.c * y if swapped else y * net.c).sum(1))

    net = randomized(Net(forward, a=nn.Linear(5, 12), b=nn.Linear(6, 3), c=nn.Parameter(torch.ones(6))))
    plan = settled_plan(net, (torch.randn(2, 5),))
    assert plan.kept("c", 0).size == 4
    assert np.array_equal(plan.kept("a.weight", 0), np.concatenate([plan.kept("c", 0), plan.kept("c", 0) + 6]))
    assert parity(net, plan, (torch.randn(2, 5),)) <= TOLERANCE


@pytest.mark.parametrize("swapped", [False, True])
def test_heads_stay_where_what_they_meet_is_as_wide_and_has_no_labels(*, swapped: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).view(len(x), 2, 6)
        wide = net.c.expand(len(x), 2, 6)
        return net.b((wide * y if swapped else y * wide).flatten(1))

    net = randomized(Net(forward, a=nn.Linear(5, 12), b=nn.Linear(12, 3), c=nn.Parameter(torch.ones(6))))
    plan = settled_plan(net, (torch.randn(2, 5),))
    assert compact(net, plan)(torch.randn(2, 5)).shape == (2, 3)
    assert parity(net, plan, (torch.randn(2, 5),)) <= TOLERANCE

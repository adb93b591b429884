"""Heads and positions in heads: what two resolutions have in common, and what of attention follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence import TOLERANCE, Net, heads_and_positions, parity, random_keep, randomized, settled_plan
from torch import Tensor, nn

from prunekit.channels.labels.constraint_solver import Numbering, numbered
from prunekit.channels.labels.label_union import Labels
from prunekit.channels.trace import trace
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.errors import PlanError
from prunekit.planning.plan import Plan

HEADS, DEPTH = 3, 4
EXAMPLE = (torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)),)


def grid(heads: int, positions: int) -> tuple[Labels, Labels]:
    """Labels 1 .. heads * positions in rows: each by the first label of its row, and of its column."""
    labels = np.arange(heads * positions).reshape(heads, positions) + 1
    by_head, by_position = (np.append(0, np.broadcast_to(part, labels.shape)) for part in (labels[:, :1], labels[:1]))
    return by_head, by_position


def numbers(heads: Labels, positions: Labels) -> Numbering:
    return numbered([heads, positions], np.arange(heads.size))


def test_heads_and_positions_number_what_they_decide_on() -> None:
    found = numbers(*grid(2, 3))
    assert found.final.tolist() == [0, 6, 7, 8, 9, 10, 11]
    assert found.n_labels == 12
    assert found.joint.tolist() == [[6, 1, 2], [7, 1, 3], [8, 1, 4], [9, 5, 2], [10, 5, 3], [11, 5, 4]]


def test_what_both_resolutions_say_is_one_label() -> None:
    alike = np.array([0, 1, 1, 3, 0])
    for positions in (alike, alike.copy()):
        found = numbers(alike, positions)
        assert (found.final.tolist(), found.n_labels, found.joint.size) == ([0, 1, 1, 2, 0], 3, 0)


def test_where_heads_are_locked_positions_go_alone() -> None:
    _, positions = grid(2, 3)
    found = numbers(np.zeros_like(positions), positions)
    assert (found.final.tolist(), found.joint.size) == ([0, 1, 2, 3, 1, 2, 3], 0)


def test_where_positions_are_locked_heads_go_alone() -> None:
    heads, _ = grid(2, 3)
    found = numbers(heads, np.zeros_like(heads))
    assert (found.final.tolist(), found.joint.size) == ([0, 1, 1, 1, 2, 2, 2], 0)


@pytest.mark.parametrize("missing", range(1, 7))
def test_only_where_every_head_has_every_position_both_may_go(missing: int) -> None:
    heads, positions = grid(2, 3)
    heads, positions = np.append(heads, 7), np.append(positions, 7)
    heads[missing] = positions[missing] = 7
    assert numbers(heads, positions).joint.size == 0


# Traced


Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(mix: Mix) -> nn.Module:
    """Attention whose mixing of queries, keys and values, (N, heads, L, depth) each, is given."""

    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, net.depth[i])).transpose(1, 2) for i, part in enumerate(net.parts))
        return net.out(net.o(mix(q, k, v).transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]

    parts = nn.ModuleList(nn.Linear(6, HEADS * DEPTH) for _ in range(3))
    net = randomized(Net(forward, parts=parts, o=nn.Linear(HEADS * DEPTH, 7), out=nn.Linear(7, 2))).eval()
    net.depth = [DEPTH] * 3  # type: ignore[assignment]
    return net


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v


def explicit_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.5)


def scale_of_the_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(key=k, query=q, value=v)


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(5, dtype=x.dtype)[:, None] / (torch.arange(DEPTH // 2, dtype=x.dtype) + 1)
    cos, sin = (part.repeat(1, 2) for part in (angle.cos(), angle.sin()))
    return x * cos + torch.cat([-x[..., DEPTH // 2 :], x[..., : DEPTH // 2]], -1) * sin


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return explicit_scale(rotated(q), rotated(k), v)


def normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)


@pytest.mark.parametrize(("mix", "keys"), [
    (plain, 2), (explicit_scale, 2), (rotary, DEPTH), (normalized, DEPTH),
])  # fmt: skip
def test_what_attention_may_lose(mix: Mix, keys: int) -> None:
    net = attention(mix)
    for seed in range(3):
        plan = settled_plan(net, EXAMPLE, seed=seed, share=0.5)
        q, k, v = (heads_and_positions(plan.kept(f"parts.{i}.weight", 0), DEPTH) for i in range(3))
        assert q == k
        assert q[0] == v[0] == heads_and_positions(plan.kept("o.weight", 1), DEPTH)[0]
        assert (len(q[0]), len(q[1]), len(v[1])) == (1, keys, DEPTH // 2)
        assert parity(net, plan, EXAMPLE) <= TOLERANCE


@pytest.fixture(scope="module")
def chart() -> ChannelMap:
    return trace(attention(plain), EXAMPLE)


def test_groups_tell_heads_from_positions(chart: ChannelMap) -> None:
    assert {(group.labels.size, group.slots[0]) for group in chart.groups} == {
        (HEADS, ("parts.0.weight", 0)), (DEPTH, ("parts.0.weight", 0)), (DEPTH, ("parts.2.weight", 0)),
        (7, ("o.weight", 0)),
    }  # fmt: skip
    assert chart.free_share(["parts.0.weight"]) == 1


def test_a_joint_label_is_kept_if_both_that_decide_on_it_are(chart: ChannelMap) -> None:
    for seed in range(4):
        chosen = random_keep(chart, seed)
        keep = chart.completed(chosen)
        rows = chart.labels["parts.2.weight"][0]
        assert rows is not None
        head, position = chart.deciding(rows)
        assert np.array_equal(keep[rows], chosen[head] & chosen[position])
        assert np.array_equal(chart.completed(keep), keep)


def test_a_plan_takes_no_choice_of_joint_labels(chart: ChannelMap) -> None:
    keep = np.ones(chart.n_labels, dtype=bool)
    keep[chart.joint[0, 0]] = False
    with pytest.raises(PlanError, match="whole head"):
        Plan(chart, keep)
    keep[chart.joint[0, 1]] = False
    assert Plan(chart, keep).removed == 1

"""Query heads that share heads of keys and values: whole groups go, and as many query heads of every group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence import TOLERANCE, Net, difference, masked_double, parity, random_keep, randomized, settled_plan
from torch import Tensor, nn

from prunekit.channels.cut.narrow_norms import NarrowNorms
from prunekit.channels.labels.constraint_solver import numbered
from prunekit.channels.trace import trace
from prunekit.compaction.compact_model import compact
from prunekit.planning.budgets.cost_model import cost_model, entries
from prunekit.planning.candidates import free_parts
from prunekit.planning.plan import Plan, load_plan
from prunekit.planning.solver import make_plan
from prunekit.pruning.prune import prune
from prunekit.settings.pruning import BudgetSettings, PruneSettings

WIDTH, KEYS, GROUP, DEPTH = 12, 3, 4, 4
EXAMPLE = (torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)),)

Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class GroupedAttention(nn.Module):
    """Attention with `KEYS` heads of keys and values, each of which serves `GROUP` query heads."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.heads, self.keys, self.group, self.attend = KEYS * GROUP, KEYS, GROUP, attend
        self.q, self.o = nn.Linear(WIDTH, KEYS * GROUP * DEPTH), nn.Linear(KEYS * GROUP * DEPTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KEYS * DEPTH), nn.Linear(WIDTH, KEYS * DEPTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], -1, DEPTH).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = self.attend(self, q, k, v) if mask is None else by_torch(self, q, k, v, mask)
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v


def repeated(x: Tensor, times: int) -> Tensor:
    n, heads, length, depth = x.shape
    return x[:, :, None].expand(n, heads, times, length, depth).reshape(n, heads * times, length, depth)


def expanded(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mixed(q, repeated(k, net.group), repeated(v, net.group))


def interleaved(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mixed(q, *(one.repeat_interleave(net.group, dim=1) for one in (k, v)))


def by_division(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mixed(q, *(repeated(one, q.shape[1] // one.shape[1]) for one in (k, v)))


def broadcast(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mixed(q.unflatten(1, (-1, net.group)), k[:, :, None], v[:, :, None]).flatten(1, 2)


def by_torch(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
    k, v = repeated(k, module.group), repeated(v, module.group)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.5)


def grouped(attend: Attend) -> nn.Sequential:
    parts = nn.Linear(WIDTH, WIDTH), GroupedAttention(attend), nn.Linear(WIDTH, 4)
    return randomized(nn.Sequential(*parts)).eval()  # type: ignore[return-value]


def left(plan: Plan, name: str, axis: int = 0) -> tuple[list[int], ...]:
    """Heads of keys, query heads of each, and positions that are left of queries; or heads and positions of keys."""
    kept = plan.kept(name, axis)
    shape = (KEYS, GROUP, DEPTH) if plan.channel_map.shapes[name][axis] > KEYS * DEPTH else (KEYS, DEPTH)
    found = [np.unique(index) for index in np.unravel_index(kept, shape)]
    assert np.array_equal(np.ravel_multi_index(np.ix_(*found), shape).reshape(-1), kept)
    return tuple(index.tolist() for index in found)


@pytest.mark.parametrize("attend", [expanded, interleaved, by_division, broadcast, by_torch])
def test_groups_go_and_query_heads_of_every_group(attend: Attend) -> None:
    net = grouped(attend)
    for seed in range(2):
        plan = settled_plan(net, EXAMPLE, seed=seed, share=0.5)
        heads, within, _ = left(plan, "1.q.weight")
        assert (len(heads), len(within)) == (1, GROUP // 2)
        assert left(plan, "1.o.weight", 1)[:2] == (heads, within)
        assert left(plan, "1.k.weight")[0] == left(plan, "1.v.weight")[0] == heads
        assert parity(net, plan, EXAMPLE) <= TOLERANCE


@pytest.mark.parametrize("attend", [expanded, by_torch])
def test_query_heads_go_where_keys_and_values_stay(attend: Attend) -> None:
    net = grouped(attend)
    result = prune(net, EXAMPLE, channels=0.5, ignore=["1.k", "1.v"])
    small = result.model[1]
    assert (small.q.out_features, small.k.out_features, small.o.in_features) == (24, 12, 24)
    assert small.group == GROUP // 2
    assert parity(net, result.plan, EXAMPLE) <= TOLERANCE


def test_the_number_of_copies_that_only_another_line_of_the_function_reads_is_set() -> None:
    net = grouped(by_torch)
    result = prune(net, EXAMPLE, channels=0.5)
    masked, small = masked_double(net, result.plan), compact(net, result.plan).double()
    x, mask = torch.randn(2, 5, WIDTH, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    with NarrowNorms(masked, result.plan.channel_map, result.plan.keep):
        want, got = (net[2](net[1](net[0](x), mask)) for net in (masked, small))  # type: ignore[index]
    assert difference(want, got) <= TOLERANCE


def test_an_axis_that_is_split_into_what_was_repeated_is_as_before() -> None:
    """A batch of queries that are the same for all samples, merged with the heads for the products."""

    def forward(net: Any, x: Tensor) -> Tensor:
        queries = net.norm(net.queries).expand(len(x), -1, -1)
        q, k, v = (
            part(one).unflatten(-1, (-1, DEPTH)).transpose(1, 2).flatten(0, 1)
            for part, one in zip(net.parts, (queries, x, x), strict=True)
        )
        heads = mixed(q, k, v).unflatten(0, (len(x), -1)).transpose(1, 2)
        return net.out(net.norm(net.o(heads.flatten(2)) + queries))  # type: ignore[no-any-return]

    parts = nn.ModuleList(nn.Linear(WIDTH, 3 * DEPTH) for _ in range(3))
    inner = {"queries": nn.Parameter(torch.zeros(1, 7, WIDTH)), "norm": nn.LayerNorm(WIDTH), "parts": parts}
    net = randomized(Net(forward, **inner, o=nn.Linear(3 * DEPTH, WIDTH), out=nn.Linear(WIDTH, 2))).eval()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    widths = [plan.kept(f"parts.{i}.weight", 0).size for i in range(3)]
    assert widths == [DEPTH] * 3
    assert plan.kept("queries", 2).size == WIDTH // 2
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_query_heads_stay_where_each_has_another_use() -> None:
    """A weight for each query head, which cannot follow, leaves whole groups of them."""

    def weighted(net: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return expanded(net, q, k, v) * torch.arange(1.0, 5.0, dtype=q.dtype).repeat(q.shape[1] // 4)[:, None, None]

    net = grouped(weighted)
    plan = settled_plan(net, EXAMPLE, share=0.5)
    assert left(plan, "1.q.weight")[1] == list(range(GROUP))
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_three_solutions_number_what_they_decide_on() -> None:
    """Two heads of keys of one position each, and two copies of each of them."""
    keys, queries = [1, 2], [3, 4, 5, 6]
    heads, copies = np.array([0, 1, 2, 1, 1, 2, 2]), np.array([0, 0, 0, 3, 4, 3, 4])
    found = numbered([heads, heads, copies], np.array(keys + queries))
    assert found.joint.tolist() == [[5, 1, 0, 3], [6, 1, 0, 4], [7, 2, 0, 3], [8, 2, 0, 4]]
    assert found.final.tolist() == [0, 1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("round_to", [1, 4, 8])
def test_rounding_holds_for_every_width(round_to: int) -> None:
    chart = trace(grouped(expanded), EXAMPLE)
    settings = PruneSettings(budget=BudgetSettings(channels=0.5), round_to=round_to)
    plan = make_plan(chart, np.ones(chart.n_labels), settings)
    for name in ("1.q.weight", "1.k.weight", "1.v.weight"):
        width = plan.kept(name, 0).size
        assert width % round_to == 0
        assert width < chart.shapes[name][0]


def test_a_ratio_takes_whole_groups() -> None:
    chart = trace(grouped(expanded), EXAMPLE)
    settings = PruneSettings(budget=BudgetSettings(channels=0.9), ratios={"1.q": 0.4})
    plan = make_plan(chart, np.ones(chart.n_labels), settings)
    assert [len(part) for part in left(plan, "1.q.weight")] == [1, GROUP, DEPTH]


def test_costs_count_what_three_labels_decide_on() -> None:
    chart = trace(grouped(expanded), EXAMPLE)
    parts = free_parts(chart, np.ones(chart.n_labels), PruneSettings(budget=BudgetSettings(channels=0.5)))
    model = cost_model(chart, parts, [[entries(chart, name)] for name in chart.labels])
    for seed in range(3):
        counts = np.random.default_rng(seed).integers(1, [part.labels.size + 1 for part in parts])
        keep = np.zeros(chart.n_labels, dtype=bool)
        keep[0] = True
        for part, count in zip(parts, counts, strict=True):
            keep[part.labels[:count]] = True
        keep = chart.completed(keep)
        assert model(counts).tolist() == [chart.parameters_kept(keep, [name]) for name in chart.labels]


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    net = grouped(expanded)
    plan = settled_plan(net, EXAMPLE, share=0.5)
    plan.save(tmp_path)
    again = load_plan(tmp_path)
    assert np.array_equal(again.channel_map.joint, plan.channel_map.joint)
    assert [(group.name, group.labels.tolist()) for group in again.channel_map.groups] == [
        (group.name, group.labels.tolist()) for group in plan.channel_map.groups
    ]
    assert parity(net, again, EXAMPLE) <= TOLERANCE
    keep = random_keep(again.channel_map, 3, 0.5)
    assert np.array_equal(again.channel_map.completed(keep), plan.channel_map.completed(keep))

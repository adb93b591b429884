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
from prunekit.channels.float64 import AS_DOUBLE
from prunekit.channels.rules.compute import OF_STACK
from prunekit.channels.trial.trial import run_trial
from prunekit.criteria.elimination import eliminations
from prunekit.measure.model_size import count_macs
from prunekit.statistics.gram_matrices import collect_patches


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


# Whole experts


class Router(nn.Module):
    """Chooses experts, if need be only within the better half of two groups of them, as DeepSeek does."""

    def __init__(self, width: int, groups: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.correction = nn.Buffer(torch.zeros(experts))
        self.groups, self.num_experts = groups, experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        scores = logits.sigmoid()
        choice = scores + self.correction
        if self.groups > 1:
            best = choice.view(-1, self.groups, self.num_experts // self.groups).topk(2)[0].sum(-1)
            taken = torch.zeros_like(best).scatter_(1, best.topk(1)[1], 1)
            choice = choice.masked_fill(~taken.repeat_interleave(self.num_experts // self.groups, 1).bool(), 0.0)
        chosen = choice.topk(TAKEN)[1]
        return logits, scores.gather(1, chosen), chosen


class Mixture(nn.Module):
    """Experts behind a router, of which one may be read by its number, as no expert may."""

    def __init__(self, width: int = 8, inner: int = 6, groups: int = 1, experts: int = 8, first: bool = False) -> None:
        super().__init__()
        self.router, self.first = Router(width, groups, experts), first
        self.up, self.down = (nn.Parameter(torch.zeros(experts, *shape)) for shape in ((inner, width), (width, inner)))
        self.num_experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, 1)
        _, shares, chosen = self.router(rows)
        out = torch.zeros_like(rows)
        for expert in F.one_hot(chosen, self.num_experts).sum((0, 1)).nonzero():
            token, place = torch.where(chosen == expert)
            inner = F.gelu(F.linear(rows[token], self.up[expert[0]]))
            out.index_add_(0, token, F.linear(inner, self.down[expert[0]]) * shares[token, place, None])
        if self.first:
            out = out + F.linear(F.gelu(F.linear(rows, self.up[0])), self.down[0])
        return out.view_as(x), shares


class WithMixture(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 5)
        self.mixture = Mixture(**options)
        self.num_experts = self.mixture.num_experts

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + self.mixture(x)[0])


def routed(**options: Any) -> WithMixture:
    model = randomized(WithMixture(**options)).eval()
    assert isinstance(model, WithMixture)
    return model


def of_experts(chart: prunekit.ChannelMap) -> np.ndarray[Any, Any]:
    labels = chart.labels["mixture.router.weight"][0]
    assert labels is not None
    return labels


def never_taken(model: WithMixture, kept: np.ndarray[Any, Any]) -> WithMixture:
    """A copy that computes its choice among the kept experts by hand: the others' scores are below all."""
    twin = copy.deepcopy(model)
    removed = np.delete(np.arange(len(twin.mixture.router.weight)), kept)
    twin.mixture.router.correction[removed] = -1e9
    return twin


def test_experts_are_removed_whole_and_none_of_the_removed_is_taken() -> None:
    model, example = routed(), words()
    result = prunekit.prune(model, example, channels=0.5)
    small = result.model
    assert small.mixture.up.shape == (4, 3, 4)  # type: ignore[union-attr, operator]
    assert small.mixture.router.correction.shape == (4,)  # type: ignore[union-attr, operator]
    assert small.mixture.num_experts == small.num_experts == 4  # type: ignore[union-attr]
    kept = result.plan.kept("mixture.router.weight", 0)
    with torch.no_grad(), prunekit.masked(model, result.plan):
        expected = model(*example)
        torch.testing.assert_close(small(*example), expected)
        torch.testing.assert_close(never_taken(model, kept)(*example), expected)
    assert prunekit.verify(model, small, result.plan, example).max_relative_difference <= 1e-9


def test_masked_experts_learn_what_compact_ones_learn() -> None:
    model, example = routed(), words()
    plan = prunekit.plan(model, example, channels=0.5)
    small = prunekit.compact(model, plan)
    small(*example).square().sum().backward()
    with prunekit.masked(model, plan):
        model(*example).square().sum().backward()
        kept = np.ix_(*(plan.kept("mixture.up", axis) for axis in range(3)))
        torch.testing.assert_close(model.mixture.up.grad[kept], small.mixture.up.grad)  # type: ignore[union-attr, index]


def test_groups_of_experts_keep_equal_numbers() -> None:
    model, example = routed(groups=2), words()
    chart = prunekit.trace(model, example)
    experts = of_experts(chart)
    assert experts.all()
    assert experts[:4].tolist() == experts[4:].tolist()
    result = prunekit.prune(model, example, channels=0.5)
    assert result.model.mixture.up.shape[0] == result.model.mixture.router.num_experts == 4  # type: ignore[union-attr, operator]
    assert prunekit.verify(model, result.model, result.plan, example).max_relative_difference <= 1e-9


def test_no_fewer_experts_are_left_than_a_token_takes() -> None:
    model, example = routed(), words()
    small = prunekit.prune(model, example, channels=0.15).model
    assert small.mixture.up.shape[0] == TAKEN  # type: ignore[union-attr, operator]


def test_experts_of_which_one_is_read_by_its_number_all_stay() -> None:
    model, example = routed(first=True), words()
    assert not of_experts(prunekit.trace(model, example)).any()
    small = prunekit.prune(model, example, channels=0.5).model
    assert small.mixture.up.shape == (8, 3, 4)  # type: ignore[union-attr, operator]


def many_words() -> Tensor:
    return torch.randint(0, 9, (16, 8), generator=torch.Generator().manual_seed(2))


def test_experts_that_no_token_takes_go_before_any_channel() -> None:
    model, ids = routed(), many_words()
    model.mixture.router.correction.zero_()[[1, 4, 6]] = -10.0
    result = prunekit.prune(model, calibration={"ids": ids}, params=0.68, repair=False)  # a third of it is in these
    assert result.plan.kept("mixture.router.weight", 0).tolist() == [0, 2, 3, 5, 7]
    assert result.model.mixture.up.shape == (5, 6, 8)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        torch.testing.assert_close(result.model(ids), model(ids))


def test_an_expert_costs_what_it_adds_to_the_tokens_that_take_it() -> None:
    model, ids = routed().double(), many_words()
    model.mixture.router.correction.zero_()
    chart, stats = prunekit.trace(model, words()), collect_patches(model, [(ids,)], rows=10**6)
    group = chart.groups[chart.group_of[of_experts(chart)[0]]]
    with torch.no_grad():
        rows = model.table(ids).flatten(0, 1)
        numbers = model.mixture.router(rows)[2]
        inner = F.gelu(torch.einsum("nd,nkid->nki", rows, model.mixture.up[numbers]))
        added = torch.einsum("nki,nkdi->nkd", inner, model.mixture.down[numbers]).flatten(0, 1)
    (found,) = (one for one in stats.layers if one.layer.weight == "mixture.down")
    variance = found.variance.view(8, -1)[numbers[0, 0]] * found.counts[numbers[0, 0]] / len(added)
    squares = added.square() / variance / len(added)
    costs = torch.zeros(chart.n_labels, dtype=torch.float64)
    costs.index_add_(0, torch.from_numpy(of_experts(chart))[numbers.flatten()], squares.sum(1))
    order = eliminations(model, chart, stats, [group])[group.name]
    expected = costs[group.labels].sort().values.cumsum(0)
    assert order.errors == pytest.approx(expected.numpy(), rel=1e-2)  # its ridge
    assert order.labels.tolist() == group.labels[costs[group.labels].argsort()].tolist()
    assert order.outputs == 8


class ReturnsChoices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WithMixture()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(ids), self.inner.mixture.router(self.inner.table(ids).flatten(0, 1))[0]


def test_experts_stay_where_the_model_returns_a_score_for_each() -> None:
    chart = prunekit.trace(randomized(ReturnsChoices()).eval(), words())
    labels = chart.labels["inner.mixture.router.weight"][0]
    assert labels is not None
    assert not labels.any()


def test_a_plan_of_whole_experts_is_saved_and_read(tmp_path: Any) -> None:
    model, example = routed(), words()
    result = prunekit.prune(model, example, channels=0.5)
    prunekit.save(result, tmp_path)
    plan = prunekit.load_plan(tmp_path)
    with torch.no_grad():
        expected = result.model(*example)
        torch.testing.assert_close(prunekit.compact(model, plan)(*example), expected)
        with prunekit.masked(model, plan):
            torch.testing.assert_close(model(*example), expected)


class NeedsEvenRows(nn.Module):
    """Views rows as complex numbers, whose strides have to be even in memory, though not after a copy to float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 12), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, turned = self.a(self.first(x).relu()).split([8, 4], -1)
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (2, 2)))
        return self.b(y.relu()) + torch.view_as_real(pairs).flatten(-2)


def test_a_model_that_raises_only_in_its_own_precision_is_locked_there() -> None:
    model, x = randomized(NeedsEvenRows()).eval(), torch.randn(3, 4)
    result = prunekit.prune(model, x, channels=0.7)
    assert result.model(x).shape == (3, 4)
    assert result.model.first.out_features == 4  # type: ignore[union-attr]
    assert any("stride" in lock.reason for lock in result.plan.channel_map.locks)

"""Sizes in attributes: set when a trial needs them and passes with them, never else; what stays locked says where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import (
    TOLERANCE,
    Net,
    difference,
    doubled,
    heads_and_positions,
    parity,
    randomized,
    settled_plan,
)
from torch import Tensor, nn

import prunekit as pk
from prunekit.channels.rewrite.source_rewriter import attribute_values, set_attributes
from prunekit.channels.trace import trace
from prunekit.channels.trial.size_search import BatchAxes, ScaleSearch, SizeSearch
from prunekit.compaction.compact_model import compact
from prunekit.planning.plan import load_plan

WIDTH = 12


class Attention(nn.Module):
    """Self-attention that keeps its sizes in attributes; in front of it and behind it the width is free."""

    def __init__(self, heads: int, depth: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.all_head_size = heads, depth, heads * depth
        self.number_of_calls = heads
        self.scale = depth**-0.5
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * depth) for _ in range(3))
        self.o = nn.Linear(heads * depth, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) * self.scale  # (N, heads, L, L)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.o(mixed.reshape(*x.shape[:2], self.all_head_size)) * self.number_of_calls

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


class Shaped(Attention):
    """The sizes in a tuple and a list."""

    def __init__(self, heads: int, depth: int) -> None:
        super().__init__(heads, depth)
        self.shape, self.joined = (-1, heads, depth), [heads * depth]

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), *self.shape).transpose(1, 2)


class Grouped(Attention):
    """Every head of keys and values serves a group of query heads."""

    def __init__(self, heads: int, depth: int, *, interleaved: bool) -> None:
        super().__init__(heads, depth)
        self.kv_heads, self.group, self.interleaved = heads // 2, 2, interleaved
        self.k, self.v = (nn.Linear(WIDTH, self.kv_heads * depth) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x))
        k, v = (self.repeated(layer(x)) for layer in (self.k, self.v))
        scores = q @ k.transpose(-2, -1) * self.scale
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.o(mixed.flatten(2))

    def repeated(self, x: Tensor) -> Tensor:
        x = x.view(*x.shape[:2], self.kv_heads, self.head_dim).transpose(1, 2)
        if self.interleaved:
            return x.repeat_interleave(self.group, dim=1)
        n, heads, length, depth = x.shape
        return x[:, :, None].expand(n, heads, self.group, length, depth).reshape(n, -1, length, depth)


def around(attention: nn.Module) -> nn.Sequential:
    return randomized(nn.Sequential(nn.Linear(6, WIDTH), attention, nn.Linear(WIDTH, 4))).eval()  # type: ignore[return-value]


EXAMPLE = (torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2)),)


@pytest.mark.parametrize(("heads", "depth"), [(4, 3), (4, 4), (3, 6), (2, 12)])
def test_sizes_that_the_trial_needs_are_set(heads: int, depth: int) -> None:
    """Also where the number of heads is that of their channels, or another attribute has the same value."""
    net = around(Attention(heads, depth))
    plan = settled_plan(net, EXAMPLE, share=0.5)
    small: Any = compact(net, plan)[1]  # type: ignore[index]
    left, positions = (len(found) for found in heads_and_positions(plan.kept("1.q.weight", 0), depth))
    assert 0 < left < heads
    assert 0 < positions < depth
    assert (small.num_heads, small.head_dim, small.all_head_size) == (left, positions, left * positions)
    assert (small.number_of_calls, small.scale) == (heads, depth**-0.5)
    assert {size.name for size in plan.channel_map.sizes} == {"num_heads", "head_dim", "all_head_size"}
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_against_a_narrow_model_by_hand() -> None:
    net = around(Attention(4, 3)).double()
    plan = settled_plan(net, EXAMPLE, share=0.5)
    columns, values = plan.kept("0.weight", 0), plan.kept("1.v.weight", 0)
    assert [len(found) for found in heads_and_positions(values, 3)] == [2, 1]
    narrow: Any = around(Attention(2, 1)).double()
    with torch.no_grad():
        for name, tensor in narrow.named_parameters():
            dense = net.get_parameter(name)
            for axis, size in enumerate(dense.shape):
                own = {("1.o.weight", 1): values, ("2.weight", 1): plan.kept("1.o.weight", 0)}.get((name, axis))
                if own is None and name[:4] in ("1.q.", "1.k.", "1.v."):
                    own = plan.kept(f"{name[:4]}weight", 0) if axis == 0 else columns
                elif own is None and axis == 0:
                    own = plan.kept(name, 0)
                dense = dense if own is None or own.size == size else dense.index_select(axis, torch.from_numpy(own))
            tensor.set_(dense)
        narrow[1].number_of_calls, narrow[1].scale = 4, 3**-0.5
        assert difference(narrow(*doubled(EXAMPLE)), compact(net, plan)(*doubled(EXAMPLE))) <= 1e-12


def test_elements_of_tuples_and_lists() -> None:
    net = around(Shaped(4, 3))
    plan = settled_plan(net, EXAMPLE, share=0.5)
    small: Any = compact(net, plan)[1]  # type: ignore[index]
    assert (small.shape, small.joined) == ((-1, 2, 1), [12]), "what the trial did not need stays"
    assert net[1].shape == (-1, 4, 3)
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


@pytest.mark.parametrize("interleaved", [True, False])
def test_sizes_of_groups_of_query_heads_are_set(interleaved: bool) -> None:
    net = around(Grouped(6, 2, interleaved=interleaved))
    plan = settled_plan(net, EXAMPLE)
    small: Any = compact(net, plan)[1]  # type: ignore[index]
    assert (small.num_heads, small.kv_heads, small.group, small.head_dim) == (2, 2, 1, 1)
    (queries, positions), (keys, same) = (heads_and_positions(plan.kept(f"1.{n}.weight", 0), 2) for n in "qk")
    assert queries == [2 * head + queries[0] % 2 for head in keys]
    assert positions == same
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_every_module_of_a_class_is_set_at_once() -> None:
    net = randomized(nn.Sequential(*(Attention(4, 3) for _ in range(3)), nn.Linear(WIDTH, 4))).eval()
    example = (torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(2)),)
    plan = settled_plan(net, example, share=0.5)
    assert {size.module for size in plan.channel_map.sizes} == {"0", "1", "2"}
    assert [module.num_heads for module in compact(net, plan).children() if isinstance(module, Attention)] == [2] * 3
    assert parity(net, plan, example) <= TOLERANCE


def test_an_attribute_of_the_module_around() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 8
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu().reshape(-1, self.width))

    net = randomized(nn.Sequential(Outer())).eval()
    plan = settled_plan(net, EXAMPLE)
    assert compact(net, plan)[0].width == plan.kept("0.first.weight", 0).size < 8  # type: ignore[index, union-attr]
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_one_module_after_another_with_nothing_computed_between() -> None:
    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 24
            self.weight, self.bias = nn.Parameter(torch.zeros(6, 24)), nn.Parameter(torch.zeros(24))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:2], self.width)

    def forward(net: Any, x: Tensor) -> Tensor:
        a, b, c = net.p(x).split(net.part, -1)
        return net.o(a * b + c)

    net = randomized(Net(forward, p=Projection(), o=nn.Linear(8, 4))).eval()
    net.part = 8  # type: ignore[assignment]
    plan = settled_plan(net, EXAMPLE)
    assert plan.kept("o.weight", 1).size < 8
    assert {(size.module, size.name) for size in plan.channel_map.sizes} == {("p", "width"), ("", "part")}
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_an_attribute_that_only_equals_a_size_is_left_alone() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x) / net.width**0.5)

    net: Any = randomized(Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4))).eval()
    net.width = 8
    plan = settled_plan(net, EXAMPLE)
    assert plan.channel_map.sizes == ()
    assert plan.kept("a.weight", 0).size < 8
    assert compact(net, plan).width == 8
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def hard_coded(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x).view(-1, 4, 2).flatten(1))  # the line to be named


def scaled_by_the_width(net: Any, x: Tensor) -> Tensor:
    q, k, v = net.a(x).chunk(3, -1)
    return net.b((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v)  # the scale follows from the width of q


@pytest.mark.parametrize(("forward", "widths"), [(hard_coded, (8, 8)), (scaled_by_the_width, (24, 8))])
def test_locks_name_the_line(forward: Callable[..., Tensor], widths: tuple[int, int]) -> None:
    net = randomized(Net(forward, a=nn.Linear(6, widths[0]), b=nn.Linear(widths[1], 4))).eval()
    net.width = 8  # type: ignore[assignment]
    plan = settled_plan(net, EXAMPLE)
    assert plan.channel_map.sizes == ()
    number = forward.__code__.co_firstlineno + (1 if forward is hard_coded else 2)
    text = Path(__file__).read_text().splitlines()[number - 1].strip()
    added = [lock.reason for lock in plan.channel_map.locks if "the trial found a difference" in lock.reason]
    assert any(f"{Path(__file__).name}:{number}: {text.partition('  #')[0]}" in reason for reason in added), added


def test_many_modules_of_a_class_that_fails_are_locked_at_once() -> None:
    class HardCoded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if y.shape[-1] != 8:
                raise ValueError("expected 8 channels")
            return x + self.last(y)

    net = randomized(nn.Sequential(*(HardCoded() for _ in range(25)), nn.Linear(6, 7), nn.Linear(7, 4))).eval()
    plan = settled_plan(net, EXAMPLE)
    assert plan.kept("25.weight", 0).size < 7
    assert all(plan.kept(f"{i}.first.weight", 0).size == 8 for i in range(25))
    assert parity(net, plan, EXAMPLE) <= TOLERANCE


def test_a_plan_keeps_what_it_knows_of_sizes(tmp_path: Path) -> None:
    net = around(Attention(4, 3))
    plan = settled_plan(net, EXAMPLE, share=0.5)
    plan.save(tmp_path)
    again = load_plan(tmp_path)
    values = attribute_values(net, plan.channel_map, plan.keep)
    assert values == {"1": {"num_heads": 2, "head_dim": 1, "all_head_size": 2}}
    assert np.array_equal(again.channel_map.joint, plan.channel_map.joint)
    assert [group.name for group in again.channel_map.groups] == [group.name for group in plan.channel_map.groups]
    assert attribute_values(net, again.channel_map, again.keep) == values
    assert compact(net, again)[1].num_heads == 2  # type: ignore[index, union-attr]


def test_only_integers_that_are_there_are_set() -> None:
    net = around(Shaped(4, 3))
    set_attributes(net, {"1": {"num_heads": 2, "shape": [-1, 2, 3]}})
    assert (net[1].num_heads, net[1].shape) == (2, (-1, 2, 3))
    for wrong in ({"3": {}}, {"1": {"nothing": 2}}, {"1": {"scale": 2}}, {"1": {"_parameters": 2}}, {"": {"1": 2}},
                  {"1": {"forward": 2}}, {"1": {"training": False}}):  # fmt: skip
        with pytest.raises(KeyError):
            set_attributes(net, wrong)
    for value in ("2", True, 2.0, None, [2]):
        with pytest.raises(ValueError, match="num_heads"):
            set_attributes(net, {"1": {"num_heads": value}})
    for shape in ([1, 2], "abc", [1, 2, "3"], [True, 2, 3]):
        with pytest.raises(ValueError, match="shape"):
            set_attributes(net, {"1": {"shape": shape}})


def test_the_trace_alone_sets_nothing() -> None:
    assert trace(around(Attention(4, 3)), EXAMPLE).sizes == ()


def test_sizes_that_follow_from_a_layers_own_tensors_are_not_searched() -> None:
    net = randomized(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))).eval()
    plan = settled_plan(net, EXAMPLE)
    batches = BatchAxes(net, plan.channel_map.traced.trace, [EXAMPLE])
    known = (plan.channel_map, plan.keep, batches, ScaleSearch(net, [EXAMPLE]))
    search = SizeSearch(net, compact(net, plan), *known, lambda: (0.0, None))
    operators = [o for o in plan.channel_map.traced.trace.runs[0].operators if o.module == "0"]
    assert operators
    assert list(search._options("0", operators)) == []


class Rearranged(nn.Module):
    """Attention whose heads layers of einops part, by their number or by their size; two chunks of the tokens first."""

    def __init__(self) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        self.pooled = layers.Reduce("b (chunks n) d -> b n d", "mean", chunks=2)
        self.q, self.k, self.v = (nn.Linear(16, 24, bias=False) for _ in range(3))
        self.heads = layers.Rearrange("b n (h d) -> b h n d", h=4)
        self.parts = layers.Rearrange("b n (h d) -> b h n d", d=6)
        self.values = layers.Rearrange("b ... (h d) -> b h ... d", h=4)
        self.joined, self.out = layers.Rearrange("b h n d -> b n (h d)"), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pooled(x)
        q, k, v = self.heads(self.q(x)), self.parts(self.k(x)), self.values(self.v(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return self.out(self.joined(scores @ v))  # type: ignore[no-any-return]


def test_layers_of_einops_hold_the_sizes_that_are_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Rearranged().eval(), torch.randn(3, 8, 16)
    result = pk.prune(model, x, channels=0.5)
    assert not [lock for lock in result.plan.channel_map.locks if "trial" in lock.reason]
    small: Any = result.model
    assert small.q.out_features == small.heads.axes_lengths["h"] * small.parts.axes_lengths["d"] == 2 * 3
    assert model.heads.axes_lengths == {"h": 4}
    with torch.no_grad():
        wanted = small(x)
        with pk.masked(model, result.plan):
            torch.testing.assert_close(wanted, model(x))
        pk.save(small, tmp_path / "small", result.plan)
        for other in (copy.deepcopy(small), pk.load(tmp_path / "small", Rearranged)):
            assert torch.equal(other(x), wanted)
            assert repr(other.heads) == "Rearrange('b n (h d) -> b h n d', h=2)"


def parted(x: Tensor, sizes: dict[str, int]) -> Tensor:
    """In a function outside of the class, whose Python stays as it is."""
    heads = sizes["heads"]
    return x.view(len(x), -1, heads, x.shape[-1] // heads).transpose(1, 2)


class Mapped(Attention):
    """The sizes in a mapping."""

    def __init__(self, heads: int, depth: int) -> None:
        super().__init__(heads, depth)
        self.sizes = {"calls": 7, "heads": heads}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (parted(layer(x), self.sizes) for layer in (self.q, self.k, self.v))
        mixed = ((q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v).transpose(1, 2)
        return self.o(mixed.flatten(2))  # type: ignore[no-any-return]


def test_integers_of_a_mapping_are_sizes() -> None:
    torch.manual_seed(0)
    model, x = Mapped(4, 6).eval(), torch.randn(2, 5, WIDTH)
    result = pk.prune(model, x, channels=0.5)
    small: Any = result.model
    assert small.sizes == {"calls": 7, "heads": 2}
    assert model.sizes == {"calls": 7, "heads": 4}
    with torch.no_grad(), pk.masked(model, result.plan):
        torch.testing.assert_close(small(x), model(x))


class Biased(Rearranged):
    """Its bias for each head is computed when it is first needed, and kept in a buffer that was empty."""

    def __init__(self) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        self.heads = layers.Rearrange("b n (m h d) -> b h n (m d)", m=1, h=4)  # a name that sorts behind
        self.register_buffer("slopes", torch.arange(1.0, 5).view(4, 1, 1))
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pooled(x)
        q, k, v = self.heads(self.q(x)), self.parts(self.k(x)), self.values(self.v(x))
        if self.bias is None:
            self.register_buffer("bias", self.slopes * torch.eye(x.shape[1]), persistent=False)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) + self.bias
        return self.out(self.joined(scores.softmax(-1) @ v))  # type: ignore[no-any-return]


def test_a_buffer_that_forward_makes_is_no_tensor_of_the_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Biased().eval(), torch.randn(3, 8, 16)
    result = pk.prune(model, x, channels=0.5)
    small: Any = result.model
    assert small.heads.axes_lengths == {"m": 1, "h": 2}
    with torch.no_grad():
        wanted = small(x)
        assert pk.verify(model, small, result.plan, x).max_relative_difference < 1e-9
    pk.save(small, tmp_path / "small", result.plan)
    assert torch.equal(pk.load(tmp_path / "small", Biased)(x), wanted)

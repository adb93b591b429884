"""Functions as operators, transforms of functions, tensors that are no plain memory: what none follows stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equivalence import Net, randomized
from net_cases import CASES
from net_registry import tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import prunekit
from prunekit.channels.labels.constraints import NOT_ZERO
from prunekit.channels.tracing.storages import plain_in
from prunekit.criteria.scoring import score
from prunekit.measure.model_size import count_macs

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says of nearly all of these that they may change

MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {}
"""Name -> how to make a model of (N, 5, 6), and the operator that has no rule; empty where all is followed."""


def model(operator: str = "", **parts: Callable[[], nn.Module | Tensor]) -> Callable[[Any], Any]:
    """Registers a forward behind a branch that can be pruned whatever it does."""

    def register(forward: Callable[..., Any]) -> Any:
        def branched(net: Any, x: Tensor) -> Any:
            return forward(net, x + net.out(net.inner(x).relu()))

        def make() -> nn.Module:
            own = {name: part() for name, part in parts.items()}
            return Net(branched, inner=nn.Linear(6, 8), out=nn.Linear(8, 6), **own)

        MODELS[forward.__name__] = make, operator
        return forward

    return register


LAYERS: dict[str, Callable[[], nn.Module]] = {"a": lambda: nn.Linear(6, 8), "b": lambda: nn.Linear(8, 3)}


@model(**LAYERS, other=lambda: nn.Linear(6, 8))
def one_of_two_layers(net: Any, x: Tensor) -> Tensor:
    chosen: Tensor = torch.cond(x.std() > 100, lambda x: net.other(x), lambda x: net.a(x).relu(), (x,))
    return net.b(chosen)  # type: ignore[no-any-return]


@model(**LAYERS)
def as_long_as_it_is_small(net: Any, x: Tensor) -> Tensor:
    loop = torch.ops.higher_order.while_loop
    _, y = loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.relu() + y), (torch.tensor(0), net.a(x)), ())
    return net.b(y)  # type: ignore[no-any-return]


@model("higher_order.scan", **LAYERS)
def running_state(net: Any, x: Tensor) -> Tensor:
    y = net.a(x).movedim(1, 0)
    *_, states = torch.ops.higher_order.scan(lambda h, y: [h / 2 + y, h * y], [torch.zeros_like(y[0])], [y], ())
    return net.b(states.mean(0))  # type: ignore[no-any-return]


@model(**LAYERS, qkv=lambda: nn.Linear(6, 24))
def attention_with_a_score_function(net: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in net.qkv(x).chunk(3, -1))
    y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - (i - j).abs())
    return net.b(net.a(x).relu() + y.transpose(1, 2).flatten(2))  # type: ignore[union-attr, no-any-return]


@model(weights=lambda: nn.Parameter(torch.randn(3, 8, 6)), b=LAYERS["b"])
def several_networks_at_once(net: Any, x: Tensor) -> Tensor:
    return net.b(torch.vmap(lambda w: (x @ w.T).relu())(net.weights).sum(0))  # type: ignore[no-any-return]


@model(**LAYERS)
def jacobian(net: Any, x: Tensor) -> Tensor:
    slopes = torch.vmap(torch.func.jacrev(lambda row: net.a(row).sigmoid()))(x.mean(1))
    return net.b(slopes.sum(-1))  # type: ignore[no-any-return]


@model("aten._to_sparse", **LAYERS, links=lambda: (torch.eye(5) + torch.eye(5).roll(1, 0)).to_sparse())
def graph(net: Any, x: Tensor) -> Tensor:
    twice = torch.sparse.mm(net.links, net.links)
    y = torch.stack([twice @ rows for rows in net.a(x).relu()])
    part = torch.sparse.mm(net.a(x[0]).to_sparse(), net.b.weight.t().to_sparse()).to_dense()
    return net.b(y) + part  # type: ignore[no-any-return]


@model(**LAYERS)
def graph_made_of_edges(net: Any, x: Tensor) -> Tensor:
    edges = torch.tensor([[0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 0, 2]])
    links = torch.sparse_coo_tensor(edges, torch.ones(6, dtype=x.dtype), (5, 5))
    return torch.stack([net.b(torch.sparse.mm(links, rows)) for rows in net.a(x).relu()])


@model(**LAYERS, links=lambda: (torch.eye(5) + torch.eye(5).roll(2, 0)).to_sparse_csr())
def graph_of_compressed_rows(net: Any, x: Tensor) -> Tensor:
    return torch.stack([net.b(net.links @ rows) for rows in net.a(x).relu()])


@model("aten._to_sparse", **LAYERS)
def returns_a_sparse_tensor(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x).relu()).relu().to_sparse()  # type: ignore[no-any-return]


@model("aten.to_mkldnn", **LAYERS)
def through_another_library(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x).to_mkldnn().relu().to_dense())  # type: ignore[no-any-return]


def _of_lengths(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor([rows[: 3 + i % 3] for i, rows in enumerate(x)], layout=layout)


@model("aten.linear", **LAYERS)
def sequences_of_other_lengths(net: Any, x: Tensor) -> Tensor:
    y = net.a(_of_lengths(x, torch.jagged)).relu()
    return net.b(torch.nested.to_padded_tensor(y, 0.0))  # type: ignore[no-any-return]


@model("aten.linear", **LAYERS)
def returns_a_nested_tensor(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(_of_lengths(x, torch.strided)).relu())  # type: ignore[no-any-return]


@model("aten.mul", **LAYERS)
def values_with_a_mask(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    return net.b((torch.masked.masked_tensor(y, y > 0) * 2.0).to_tensor(0.0))  # type: ignore[no-any-return]


@model("aten.quantize_per_tensor", **LAYERS)
def rounded_to_bytes(net: Any, x: Tensor) -> Tensor:
    y = torch.quantize_per_tensor(net.a(x).relu().float(), 0.02, 0, torch.quint8).dequantize()
    return net.b(y.to(x.dtype))  # type: ignore[no-any-return]


@model("aten._pack_padded_sequence", a=LAYERS["a"], gru=lambda: nn.GRU(8, 4, batch_first=True))
def returns_a_packed_sequence(net: Any, x: Tensor) -> PackedSequence:
    lengths = torch.tensor([1 + (3 * i) % 5 for i in range(len(x))])
    packed = pack_padded_sequence(net.a(x), lengths, batch_first=True, enforce_sorted=False)
    return net.gru(packed)[0]  # type: ignore[no-any-return]


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_runs_is_pruned_and_saved(name: str, tmp_path: Path) -> None:
    dense, example = _made(name), (torch.randn(4, 5, 6),)
    plan = prunekit.prune(dense, example, ratios={"inner": 0.5}, macs=0.99).plan
    small = prunekit.compact(dense, plan)
    assert plan.kept("inner.weight", 0).size == 4
    assert prunekit.verify(dense, small, plan, [example]).max_relative_difference < 1e-3
    reasons = {lock.reason.partition(";")[0] for lock in plan.channel_map.locks if "has no rule" in lock.reason}
    operator = MODELS[name][1]
    assert (f"operator {operator} has no rule" in reasons) == bool(operator), reasons
    rows = prunekit.summary(dense, example)
    assert rows is not None
    prunekit.save(small, tmp_path / "small", plan)
    loaded = prunekit.load(tmp_path / "small", _made(name))
    with torch.no_grad():
        wanted, got = plain_in(small(*example)), plain_in(loaded(*example))
    assert [torch.equal(a, b) for a, b in zip(wanted, got, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("name", ["graph_made_of_edges", "graph_of_compressed_rows"])
def test_what_a_graph_sums_over_neighbors_is_pruned(name: str) -> None:
    dense, example = _made(name), (torch.randn(4, 5, 6),)
    plan = prunekit.prune(dense, example, ratios={"a": 0.5}, macs=0.99).plan
    small = prunekit.compact(dense, plan)
    assert plan.kept("a.weight", 0).size == 4
    assert prunekit.verify(dense, small, plan, [example]).max_relative_difference < 1e-9
    assert count_macs(small, example) == plan.channel_map.macs(plan.keep)


@pytest.mark.parametrize("name", MODELS)
def test_statistics_leave_out_what_has_no_values_of_its_own(name: str) -> None:
    stats = prunekit.calibrate(_made(name), [torch.randn(4, 5, 6)])
    assert {"inner", "out"} <= {key.module for key in stats}


def test_complex_parameters_are_scored_trained_and_saved(tmp_path: Path) -> None:
    factory, _ = CASES["complex_parameters"]
    model, example = factory()
    randomized(model)
    result = prunekit.prune(model, example, channels=0.5)
    small, plan = result.model, result.plan
    assert small.matrix.shape == (4, 4, 3)
    kept = plan.kept("matrix", 0)
    assert torch.equal(small.matrix, model.matrix[kept][:, kept])
    turned = copy.deepcopy(model)
    turned.matrix.data = 1j * turned.matrix.data  # its real and imaginary parts change places
    assert np.allclose(score("l1", model, plan.channel_map), score("l1", turned, plan.channel_map))
    with prunekit.masked(model, plan):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(*example).square().mean().backward()
            optimizer.step()
        removed = np.setdiff1d(np.arange(8), kept)
        assert not model.matrix[removed].any()
        assert not model.matrix[:, removed].any()
        trained = prunekit.compact(model, plan)
        assert torch.allclose(trained(*example), model(*example), atol=1e-6)
    prunekit.save(trained, tmp_path / "small", plan)
    loaded = prunekit.load(tmp_path / "small", model=model)
    assert torch.equal(loaded(*example), trained(*example))


def test_channels_in_a_stored_order_stay_and_the_lock_says_why() -> None:
    net = Net(lambda net, x: net.b(net.a(x)[..., net.order]), a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    net.register_buffer("order", torch.arange(8).flip(0))
    (lock,) = [lock for lock in prunekit.trace(net, tokens()).locks if lock.operator == "aten.index"]
    assert "in the order of an index that the model stores" in lock.reason


def test_a_write_into_a_part_takes_the_promise_of_zeros_from_the_whole() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        z = torch.zeros_like(y)
        z[:, 1:] = y[:, 1:].exp()
        return z @ z.mT

    net = Net(forward, a=nn.Linear(6, 8))
    (lock,) = [lock for lock in prunekit.trace(net, tokens()).locks if lock.operator == "aten.bmm"]
    assert lock.reason == NOT_ZERO


class PartsOfNeighbors(nn.Module):
    """Sums over neighbors, which the matrix that it is given tells, and splits the sums by fixed widths."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(3, 3), nn.Linear(5, 3)

    def forward(self, links: Tensor, x: Tensor) -> Tensor:
        first, second = torch.sparse.mm(links, self.a(x).relu()).split([3, 5], 1)
        return self.b(first) + self.c(second)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sizes_in_python_are_found_where_an_input_cannot_be_joined_with_itself(layout: torch.layout) -> None:
    torch.manual_seed(0)
    example = (torch.eye(5) + torch.eye(5).roll(1, 0)).to_sparse(layout=layout), torch.randn(5, 6)
    dense = PartsOfNeighbors().eval()
    result = prunekit.prune(dense, example, channels=0.5)
    small: Any = result.model
    assert [small.get_submodule(path).weight.shape for path in "abc"] == [(3, 6), (3, 1), (3, 2)]
    assert prunekit.verify(dense, small, result.plan, [example]).max_relative_difference < 1e-5

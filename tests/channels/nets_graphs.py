"""Graph nets: what the nodes know is gathered along edges, and added up or compared where the edges end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from equivalence import Net
from net_registry import CASES, Case, case, weight
from torch import Tensor, nn

NODES = 9
Aggregate = Callable[[Tensor, Tensor], Tensor]


def graph(width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ends = torch.randint(0, NODES, (2, 2 * NODES), generator=generator)
    return torch.randn(NODES, width, generator=generator), ends[:, ends[1].argsort()]


def for_each_channel(ends: Tensor, x: Tensor) -> Tensor:
    return ends[:, None].expand(-1, x.shape[1])


def of_neighbors(x: Tensor, edges: Tensor) -> Tensor:
    """The adjacency matrix as a sparse tensor that forward makes."""
    ones = torch.ones(edges.shape[1], dtype=x.dtype)
    return torch.sparse_coo_tensor(edges.flip(0), ones, (len(x), len(x)), check_invariants=True)


def median(x: Tensor, edges: Tensor) -> Tensor:
    ordered, order = x[edges[0]].sort(0)
    ends = for_each_channel(edges[1], x).gather(0, order)
    _, order = ends.sort(dim=0, stable=True)
    return ordered.gather(0, order).index_select(0, torch.arange(NODES))


def segments(x: Tensor, edges: Tensor) -> Tensor:
    counts = torch.bincount(edges[1], minlength=NODES)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.segment_reduce(x[edges[0]], "max", offsets=ends, axis=0, initial=0.0)


AGGREGATIONS: dict[str, Aggregate] = {
    "sum": lambda x, e: torch.zeros(len(x), x.shape[1]).type_as(x).index_add_(0, e[1], x[e[0]]),
    "sum_scattered": lambda x, e: x.new_zeros(x.shape).scatter_add_(0, for_each_channel(e[1], x), x[e[0]]),
    "mean": lambda x, e: x.scatter_reduce(0, for_each_channel(e[1], x), x[e[0]], "mean"),
    "max": lambda x, e: x.new_zeros(x.shape).scatter_reduce_(
        0, e[1][:, None].repeat(1, x.shape[1]), x[e[0]], "amax", include_self=False
    ),
    "put": lambda x, e: x.index_put((e[1],), x[e[0]], accumulate=True),
    "median": median,
    "segments": segments,
    "sparse": lambda x, e: torch.sparse.mm(of_neighbors(x, e), x),
    "compressed": lambda x, e: of_neighbors(x, e).to_sparse_csr() @ x,
    "largest": lambda x, e: torch.sparse.mm(of_neighbors(x, e).to_sparse_csr(), x, "amax"),
    "kept_apart": lambda x, e: x.index_copy(0, e[1][:1], x[:1]).index_fill(0, e[0][:1], 0.0),
}  # fmt: skip


def net(aggregate: Aggregate) -> Case:
    def forward(net: Any, x: Tensor, edges: Tensor) -> Tensor:
        x = aggregate(net.a(x), edges).relu()
        return net.c(aggregate(net.b(x), edges).relu())

    return Net(forward, a=nn.Linear(6, 10), b=nn.Linear(10, 8), c=nn.Linear(8, 3)), graph()


for _name, _aggregate in AGGREGATIONS.items():
    CASES[f"graph_{_name}"] = partial(net, _aggregate), ("a.weight", "b.weight")


@case("a.weight", "b.weight")
def graph_attention() -> Case:
    """Scores each edge in several heads, and divides by what its end gets in all."""

    def forward(net: Any, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        x = net.a(x).view(-1, *net.start.shape[1:])
        of_start, of_end = (x * net.start).sum(-1), (x * net.end).sum(-1)
        scores = torch.nn.functional.leaky_relu(of_start[start] + of_end[end]).exp()
        sums = scores.new_zeros(NODES, scores.shape[1]).scatter_add_(0, end[:, None].expand_as(scores), scores)
        shares = scores / (sums[end] + 1e-8)
        x = x.new_zeros(x.shape).index_add(0, end, x[start] * shares[..., None])
        return net.c(net.b(x.flatten(1)).relu())

    parts = {"a": nn.Linear(6, 12), "b": nn.Linear(12, 8), "c": nn.Linear(8, 3)}
    return Net(forward, **parts, start=weight(1, 4, 3), end=weight(1, 4, 3)), graph()


@case("first.weight", "a.weight")
def weights_made_for_each_edge() -> Case:
    """The matrix of each edge reads channels that may be removed, and writes the model's output."""

    def forward(net: Any, x: Tensor, edges: Tensor) -> Tensor:
        x = net.a(x).relu()
        made = net.second(net.first(x[edges[1]] - x[edges[0]]).relu()).view(-1, x.shape[1], 3)
        return x.new_zeros(NODES, 3).index_add_(0, edges[1], (x[edges[0]][:, None] @ made)[:, 0])

    return Net(forward, a=nn.Linear(6, 8), first=nn.Linear(8, 5), second=nn.Linear(5, 24)), graph()

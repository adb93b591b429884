"""torch_geometric: ordinary graph networks on a small random graph, called with its features and its edges.

The networks are the package's own, or what its examples build of its layers. The package's sampling and neighbor search
need compiled extensions, so the point network finds neighbors by distances, in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as geometric
from torch import Tensor, nn
from zoo_cases import Networks

SIZE = "40 nodes, 160 edges"
NODES, EDGES, FEATURES, HIDDEN, CLASSES, LAYERS = 40, 160, 12, 64, 7, 3


class Convolutions(nn.Module):
    """Layers one after the other with ReLU between them, as in the package's examples."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        sizes = [FEATURES, *[HIDDEN] * (LAYERS - 1), CLASSES]
        self.convs = nn.ModuleList(map(make, sizes[:-1], sizes[1:]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


class GraphClassifier(nn.Module):
    """Graph isomorphism layers, and a score for each graph from the sum over its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.gnn = geometric.GIN(FEATURES, HIDDEN, LAYERS, norm="batch_norm")
        self.head = geometric.MLP([HIDDEN, HIDDEN, CLASSES], dropout=0.5)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.head(geometric.global_add_pool(self.gnn(x, edge_index), batch))


class SetAbstraction(nn.Module):
    """A level of PointNet++: some of the points, each with features of its neighborhood."""

    def __init__(self, ratio: float, neighbors: int, sizes: list[int]) -> None:
        super().__init__()
        self.ratio, self.neighbors = ratio, neighbors
        self.conv = geometric.PointNetConv(geometric.MLP(sizes), add_self_loops=False)

    def forward(self, x: Tensor | None, position: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.arange(0, len(position), int(1 / self.ratio))
        apart = torch.cdist(position[chosen], position) + 1e6 * (batch[chosen][:, None] != batch)
        near = apart.topk(self.neighbors, largest=False).indices
        rows = torch.arange(len(chosen)).repeat_interleave(self.neighbors)
        edges = torch.stack([near.flatten(), rows])
        x_chosen = None if x is None else x[chosen]
        x = self.conv((x, x_chosen), (position, position[chosen]), edges)
        return x, position[chosen], batch[chosen]


class PointNet(nn.Module):
    """PointNet++ that classifies clouds of points, as in the package's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = SetAbstraction(0.5, 8, [3, 32, 32, 64])
        self.second = SetAbstraction(0.25, 8, [64 + 3, 64, 64, 128])
        self.whole = geometric.MLP([128 + 3, 128, 256])
        self.head = geometric.MLP([256, 128, 64, CLASSES], dropout=0.5, norm=None)

    def forward(self, position: Tensor, batch: Tensor) -> Tensor:
        x, position, batch = self.first(None, position, batch)
        x, position, batch = self.second(x, position, batch)
        x = self.whole(torch.cat([x, position], dim=1))
        return self.head(geometric.global_max_pool(x, batch))


def _graph(batch: int) -> tuple[Tensor, Tensor]:
    """As many graphs as asked for, side by side in one."""
    edges = [torch.randint(0, NODES, (2, EDGES)) + NODES * index for index in range(batch)]
    return torch.randn(NODES * batch, FEATURES), torch.cat(edges, 1)


def _graphs(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return *_graph(batch), torch.arange(batch).repeat_interleave(NODES)


def _cloud(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(64 * batch, 3), torch.arange(batch).repeat_interleave(64)


def _package(name: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(geometric, name)(FEATURES, HIDDEN, LAYERS, CLASSES, **more)


def _layers(name: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: Convolutions(lambda before, after: getattr(geometric, name)(before, after, **more))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "gcn": (_package("GCN"), _graph),
    "gcn_norm": (_package("GCN", norm="layer_norm"), _graph),
    "gcn_jumps": (_package("GCN", jk="cat"), _graph),
    "sage": (_package("GraphSAGE"), _graph),
    "sage_max": (_package("GraphSAGE", aggr="max"), _graph),
    "gin": (_package("GIN"), _graph),
    "gat": (_package("GAT", heads=4), _graph),
    "gatv2": (_package("GAT", heads=4, v2=True), _graph),
    "pna": (_package("PNA", aggregators=["mean", "max", "std"], scalers=["identity", "amplification"],
            deg=torch.tensor([1, 4, 8, 12, 9, 4, 2])), _graph),
    "edge_cnn": (_package("EdgeCNN"), _graph),
    "graph_conv": (_layers("GraphConv"), _graph),
    "transformer_conv": (_layers("TransformerConv"), _graph),
    "cheb": (_layers("ChebConv", K=3), _graph),
    "tag": (_layers("TAGConv"), _graph),
    "sg": (_layers("SGConv", K=2), _graph),
    "arma": (_layers("ARMAConv"), _graph),
    "gin_graphs": (GraphClassifier, _graphs),
    "pointnet2": (PointNet, _cloud),
}  # fmt: skip
ZOO = Networks(NETWORKS)
names, knows, build = ZOO.names, ZOO.knows, ZOO.build

"""Tables looked up by integers, and values put in order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv
from torch import Tensor, nn


def words(length: int = 5) -> tuple[Tensor]:
    return (torch.randint(0, 7, (2, length), generator=torch.Generator().manual_seed(1)),)


@case("1.weight")
def embedding_then_linear() -> Case:
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), words()


@case("a.weight")
def embedding_that_is_the_output_layer_too() -> Case:
    def forward(net: Any, ids: Tensor) -> Tensor:
        return F.linear(net.b(net.a(net.e(ids)).relu()), net.e.weight)

    return Net(forward, e=nn.Embedding(7, 8), a=nn.Linear(8, 6), b=nn.Linear(6, 8)), words()


@case("b.weight")
def embeddings_of_words_and_positions() -> Case:
    def forward(net: Any, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        return net.c(net.b(net.words(ids) + net.places(places)).relu())

    tables = {"words": nn.Embedding(7, 8, padding_idx=0), "places": nn.Embedding(5, 8)}
    return Net(forward, **tables, b=nn.Linear(8, 6), c=nn.Linear(6, 3)), words()


@case("b.weight")
def bags_of_words() -> Case:
    def forward(net: Any, ids: Tensor) -> Tensor:
        offsets = torch.tensor([0, 4, 6])
        bags = [net.mean(ids), net.max(ids), net.sum(ids.flatten(), offsets)[:2]]
        return net.c(net.b(torch.cat(bags, 1)).relu())

    tables: dict[str, nn.Module] = {mode: nn.EmbeddingBag(7, 4, mode=mode) for mode in ("mean", "max", "sum")}
    return Net(forward, **tables, b=nn.Linear(12, 6), c=nn.Linear(6, 3)), words()


@case()
def bags_weighted_by_channels() -> Case:
    def forward(net: Any, ids: Tensor, x: Tensor) -> Tensor:
        return net.b(net.e(ids, per_sample_weights=net.a(x)))

    example = (*words(), torch.randn(2, 3, generator=torch.Generator().manual_seed(2)))
    return Net(forward, e=nn.EmbeddingBag(7, 4, mode="sum"), a=nn.Linear(3, 5), b=nn.Linear(4, 3)), example


@case("a.weight")
def best_positions_of_every_channel() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).flatten(2)
        return net.b(torch.cat([y.topk(3).values, y.sort().values, y.median(2, keepdim=True).values], 2))

    return Net(forward, a=conv(3, 8), b=nn.Conv1d(8, 4, 1)), image()


@case()
def best_channels_of_every_position() -> Case:
    return Net(lambda net, x: net.b(net.a(x).topk(3, 1).values), a=conv(3, 8), b=conv(3, 4, 1)), image()


@case()
def median_of_everything() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).exp()
        return net.b(x) * y.median()

    return Net(forward, a=conv(3, 8), b=conv(3, 4, 1)), image()


@case("a.weight", "b.weight")
def pooled_places_of_two_levels_in_one_table() -> Case:
    """As detection models collect what they pool from a pyramid of features."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        coarse = net.b(F.max_pool2d(y, 2)).flatten(2).mean(2)
        table = torch.zeros(4, y.shape[1], dtype=y.dtype)
        table[torch.tensor([0, 3])] = y.flatten(2).mean(2)
        table[torch.tensor([2, 1])] = coarse
        return net.c(table)

    return Net(forward, a=conv(3, 8), b=conv(8, 8), c=nn.Linear(8, 4)), image()


class FilledByLevel(nn.Module):
    """Rows written by number into zeros, whose other sizes are an attribute's, as pooling of regions does."""

    def __init__(self) -> None:
        super().__init__()
        self.side = 2

    def forward(self, x: Tensor) -> Tensor:
        result = torch.zeros(len(x), x.shape[1], self.side, self.side, dtype=x.dtype)
        for level in range(2):
            rows = torch.arange(level, len(x), 2)
            result[rows] = F.adaptive_max_pool2d(x[rows], self.side) * (level + 1)
        return result


@case("0.weight")
def zeros_of_a_known_side_filled_by_number() -> Case:
    return nn.Sequential(conv(3, 8), FilledByLevel(), nn.Flatten(), nn.Linear(32, 5)), image()

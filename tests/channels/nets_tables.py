"""Tables looked up by integers, and values put in order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv, tokens, weight
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


@case("1.weight")
def rows_no_longer_than_a_limit() -> Case:
    return nn.Sequential(nn.Embedding(7, 8, max_norm=0.5), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), words()


@case("a.weight", "b.weight")
def mask_token() -> Case:
    """Tokens that a mask of two axes picks are overwritten by one parameter."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).clone()
        y[x[..., 0] > 0] = net.token
        return net.c(net.b(y).relu())

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 6), c=nn.Linear(6, 3), token=weight(8)), tokens()


@case("a.weight", "b.weight")
def tokens_in_another_order() -> Case:
    """Some tokens are kept, mask tokens take the place of the others, and all are put back in order (MAE)."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y, order = net.a(x), x[..., 0].argsort(1)
        kept = y.gather(1, order[:, :2, None].repeat(1, 1, y.shape[2]))
        y = torch.cat([kept, net.token.expand(len(x), 3, -1)], 1)
        return net.c(net.b(y.take_along_dim(order.argsort(1)[..., None], 1)).relu())

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 6), c=nn.Linear(6, 3), token=weight(1, 1, 8)), tokens()


@case("a.weight", "b.weight")
def images_among_words() -> Case:
    """A mask that takes whole tokens says which of them other values fill, one after the other."""

    def forward(net: Any, x: Tensor, others: Tensor) -> Tensor:
        y = net.a(x)
        mask = (x[..., :1] > 0).expand_as(y)
        return net.c(net.b(y.masked_scatter(mask, net.others(others).relu())).relu())

    parts = {"a": nn.Linear(6, 8), "others": nn.Linear(6, 8), "b": nn.Linear(8, 6), "c": nn.Linear(6, 3)}
    return Net(forward, **parts), (*tokens(), tokens()[0].flip(1))


@case("a.weight", "b.weight")
def nearest_in_a_table() -> Case:
    """Each token is replaced by the row of a table that is nearest to it (VQ-VAE)."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.c(net.b(net.table(torch.cdist(y, net.table.weight).argmin(-1)) + y).relu())

    parts = {"a": nn.Linear(6, 8), "table": nn.Embedding(9, 8), "b": nn.Linear(8, 6), "c": nn.Linear(6, 3)}
    return Net(forward, **parts), tokens()


@case("a.weight")
def largest_of_the_nearest() -> Case:
    """Neighbors are found in the space of channels, by products of values that a maximum made (DGCNN)."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = torch.where(x[..., :1] > 0, net.a(x).relu(), 0.0).unfold(1, 2, 1).max(-1)[0]
        near = (2 * y @ y.mT - y.square().sum(2)[:, None]).topk(2)[1]
        found = y.gather(1, near.flatten(1)[..., None].expand(-1, -1, y.shape[2])).unflatten(1, (-1, 2))
        return net.b(torch.cat([found - y[:, :, None], y[:, :, None].expand_as(found)], -1).max(2)[0])

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(16, 3)), tokens()

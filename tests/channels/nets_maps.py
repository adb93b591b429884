"""Maps and sequences that a linear layer makes from a vector: its outputs lie on channels and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net
from net_registry import Case, case, conv
from torch import Tensor, nn

WIDTH, SIDE = 8, 4
Mixes = Callable[[Any, Tensor], Tensor]


def vector(features: int = 6) -> tuple[Tensor]:
    return (torch.randn(2, features, generator=torch.Generator().manual_seed(1)),)


def _map(mixes: Mixes, width: int = WIDTH, **parts: nn.Module) -> Case:
    """A vector becomes a map, which an operator that mixes positions reads."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(mixes(net, net.fc(x).view(len(x), -1, SIDE, SIDE)).relu())

    return Net(forward, fc=nn.Linear(6, WIDTH * SIDE * SIDE), out=nn.Conv2d(width, 3, 1), **parts), vector()


@case("fc.weight")
def map_that_is_pooled() -> Case:
    return _map(lambda net, y: F.interpolate(F.max_pool2d(y, 2), scale_factor=2, mode="bilinear"))


@case("fc.weight", "conv.weight")
def map_that_is_padded_on_both_sides() -> Case:
    return _map(lambda net, y: net.conv(F.pad(F.pad(y, (1, 1, 1, 1)), (1, 0, 0, 1), "reflect")), conv=conv(8, 8))


@case("fc.weight")
def map_that_is_mirrored_and_rolled() -> Case:
    return _map(lambda net, y: net.conv(y + y.flip(-1) + y.roll(1, 2)), conv=conv(8, 8))


@case("fc.weight", "norm.weight")
def map_whose_positions_are_normalized() -> Case:
    return _map(lambda net, y: net.norm(F.instance_norm(y)), norm=nn.GroupNorm(2, 8))


@case("fc.weight")
def map_beside_a_fixed_one() -> Case:
    def mixes(net: Any, y: Tensor) -> Tensor:
        return net.conv(torch.cat([y, y.new_ones(len(y), 3, *y.shape[2:])], 1))

    return _map(mixes, conv=conv(11, 8))


@case("fc.weight")
def map_whose_channels_become_positions() -> Case:
    return _map(lambda net, y: F.pixel_shuffle(y, 2), width=2)


@case("fc.weight")
def map_that_is_sampled() -> Case:
    def mixes(net: Any, y: Tensor) -> Tensor:
        return F.grid_sample(y, y.new_zeros(len(y), 5, 5, 2), align_corners=False)

    return _map(mixes)


@case("fc.weight")
def map_of_which_windows_and_rows_are_taken() -> Case:
    def mixes(net: Any, y: Tensor) -> Tensor:
        return y.unfold(2, 2, 2)[..., 0][:, :, torch.tensor([1, 0])].topk(2, -1)[0]

    return _map(mixes)


@case("fc.weight")
def map_that_a_point_wise_convolution_reads() -> Case:
    return _map(lambda net, y: y)


@case("fc.weight", "conv.weight")
def map_with_its_channels_last() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x).view(len(x), SIDE, SIDE, -1).permute(0, 3, 1, 2)
        return net.out(net.conv(y).relu())

    return Net(forward, fc=nn.Linear(6, 128), conv=conv(8, 5), out=conv(5, 3, 1)), vector()


class Generator(nn.Module):
    """A DCGAN (Radford et al. 2016): the map's shape stands in the code, as numbers and in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.shape = SIDE, (WIDTH, SIDE, SIDE)
        self.fc, self.other = nn.Linear(6, 128), nn.Linear(6, 128)
        self.flat, self.norm = nn.BatchNorm1d(128), nn.BatchNorm2d(WIDTH)
        self.up = nn.ConvTranspose2d(WIDTH, 5, 4, 2, 1)
        self.out = nn.ConvTranspose2d(5, 3, 4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        y = self.norm(self.flat(self.fc(z)).view(z.shape[0], 8, self.side, self.side))
        return self.out(self.up((y + self.other(z).reshape(-1, *self.shape)).relu()).relu())


@case("fc.weight", "up.weight")
def generator_of_images() -> Case:
    return Generator(), vector()


@case("0.weight")
def unflattened_by_a_size_of_torch() -> Case:
    return nn.Sequential(nn.Linear(6, 128), nn.Unflatten(1, torch.Size((WIDTH, SIDE, SIDE))), conv(8, 3)), vector()


class Tokens(nn.Module):
    """Tokens from a vector, with one more in front, read by attention behind a norm."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.number, self.width = 5, WIDTH
        self.fc, self.norm = nn.Linear(6, 5 * WIDTH), nn.LayerNorm(WIDTH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH)) if first else None
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).view(-1, self.number, self.width)
        if self.first is not None:
            y = torch.cat([self.first.expand(len(x), -1, -1), y], 1)
        return self.out(self.layer(self.norm(y)))


@case("fc.weight", "norm.weight", "layer.linear1.weight")
def tokens_from_a_vector() -> Case:
    return Tokens(first=False), vector()


@case("fc.weight", "norm.weight")
def tokens_from_a_vector_behind_a_learned_one() -> Case:
    return Tokens(first=True), vector()


@case("a.weight")
def mapped_over_the_batch() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: net.b(net.a(row).relu()))(x)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), vector()

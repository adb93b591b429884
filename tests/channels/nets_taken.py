"""Nets whose channels meet a table that forward makes, or are put in the order of an index that the model stores.

An expert takes the kept channels of the table, and puts the kept channels in their order.
"""

from __future__ import annotations

import math

import torch
from net_registry import Case, case
from torch import Tensor, nn

WIDTH = 12


def waves(positions: Tensor, width: int = WIDTH) -> Tensor:
    """Sines and cosines of positions, at as many frequencies as half of a width."""
    steps = positions[..., None] * torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    return torch.stack([steps.sin(), steps.cos()], -1).flatten(-2)


class Taken(nn.Module):
    """Tokens that pass a residual block and a norm after they met a table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, 5)
        generator = torch.Generator().manual_seed(4)
        self.__dict__["scale"] = torch.rand(WIDTH, generator=generator) + 0.5  # neither parameter nor buffer
        self.register_buffer("order", torch.randperm(WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        y = self.meet(self.a(x), x)
        return self.c(y + self.b(self.norm(y)).relu())

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class Added(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y + waves(torch.arange(x.shape[1]))


class AddedByAMethod(Taken):
    """As the layers of DETR do (2020)."""

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        positions = waves(torch.arange(x.shape[1]))
        return self.with_positions(self.with_positions(y, positions).relu(), positions)

    def with_positions(self, y: Tensor, positions: Tensor | None) -> Tensor:
        return y if positions is None else y + positions


class AddedInPlace(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        y += waves(torch.arange(x.shape[1]))
        return y


class AddedByAFunction(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return torch.add(waves(torch.arange(x.shape[1])), y).sub(self.scale)


class OfTheWidth(Taken):
    """Its table is made of a width that the compact model has not."""

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y + self.table(y)

    def table(self, y: Tensor) -> Tensor:
        return torch.arange(y.shape[1])[:, None] * torch.linspace(1, 0.1, y.shape[2])


class Attribute(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return self.scale * y / self.scale.exp()


class Time(Taken):
    """Its table depends on the input, and its channels do not."""

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y + waves(x.mean((1, 2)))[:, None]


class CountedByAMask(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y + waves((x[..., 0] > 0).float().cumsum(1))


class Ordered(Taken):
    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        return y[..., self.order]


class OrderedTwice(Taken):
    """Its index is moved to the device of the data, and picks some channels twice."""

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        some = self.order[: WIDTH // 2].repeat(2).to(x.device)
        return torch.index_select(y.index_select(2, self.order), 2, some)


class OnAMap(Taken):
    """A table of a map, and channels of a map in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.Conv2d(WIDTH, WIDTH, 1)  # type: ignore[assignment]
        self.c = nn.Conv2d(WIDTH, 5, 1)  # type: ignore[assignment]

    def meet(self, y: Tensor, x: Tensor) -> Tensor:
        height = waves(torch.arange(y.shape[2])).t()[:, :, None]
        return (y + height).relu()[:, self.order]


CLASSES: tuple[type[Taken], ...] = (
    Added, AddedByAMethod, AddedInPlace, AddedByAFunction, OfTheWidth, Attribute, Time, CountedByAMask, Ordered,
    OrderedTwice, OnAMap,
)  # fmt: skip


def example_of(cls: type[Taken], batch: int = 2, length: int = 4) -> tuple[Tensor]:
    shape = (batch, 3, length + 1, 5) if cls is OnAMap else (batch, length, 6)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)),)


def registered(cls: type[Taken]) -> None:
    def factory() -> Case:
        return cls(), example_of(cls)

    factory.__name__ = f"taken_{cls.__name__}"
    case("a.weight", "b.weight")(factory)


for one in CLASSES:
    registered(one)

"""Modules whose sizes stand in their Python: in no attribute, or only in a sum or quotient of some."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 12


class Quotient(nn.Module):
    """Attention as most write it: the width of a head is a quotient, that of all heads the input's."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.scale = (WIDTH // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = (q * self.scale @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(
            mixed.transpose(1, 2)
            .reshape(n, length, width)
        )  # fmt: skip


class Unscaled(nn.Module):
    """One head whose scale torch takes from its width."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x)[:, None] for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class UnequalParts(nn.Module):
    """Values, gates and three weights in one projection; sizes in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [WIDTH, WIDTH, 3]
        self.a, self.b, self.c = nn.Linear(WIDTH, 2 * WIDTH + 3), nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values, gates, weights = torch.split(self.a(x), self.sizes, dim=-1)
        return self.b(values * gates.sigmoid()) + self.c(weights)


class Chunks(nn.Module):
    """Parts of which the last is smaller, through a function of torch and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.c = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.chunk(self.a(x), 3, dim=-1)  # 3, 3, 2
        *_, last = self.b(x).chunk(3, -1)
        return self.c(first.relu() + second) + F.pad(third * last, (0, WIDTH - 2))


class Partial(nn.Module):
    """Works on a part of its channels only, through a method that an attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(WIDTH // 4, WIDTH // 4)
        self.forward = self._front  # type: ignore[method-assign]

    def _front(self, x: Tensor) -> Tensor:
        front = self.conv(x[..., : WIDTH // 4])
        return torch.cat([front, x[..., WIDTH // 4 :]], -1)


class Looping(nn.Module):
    """One line splits the result of each of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 10) for _ in range(3))
        self.out = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for layer in self.layers:
            key, value = layer(x).split([4, 6], -1)
            results.append(value * key.sum(-1, keepdim=True))
        return self.out(torch.stack(results).sum(0))


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Inherited(Base):
    """Names that a class mangles, a closure, keyword defaults, and `super()`."""

    def __init__(self) -> None:
        super().__init__()
        self.__halves = 2
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, *, factor: float = 0.5) -> Tensor:
        y = self.a(x).view(len(x), -1, self.__halves, 8 // self.__halves)
        return super().forward(self.b(y.flatten(2))) * factor


class FixedTable(nn.Module):
    """A bias that a part makes in a method of its own, in a shape that it keeps whole."""

    class Table(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.shape = (5, 5, heads)
            self.table = nn.Parameter(torch.zeros(25, heads))

        def bias(self) -> Tensor:
            return self.table.view(self.shape).permute(2, 0, 1)

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.table = self.Table(heads)
        self.qk, self.v, self.o = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.num_heads, 3)).transpose(1, 2)

        q, k = self.qk(x).chunk(2, -1)
        scores = heads(q) @ heads(k).transpose(-2, -1) + self.table.bias()
        return self.o((scores.softmax(-1) @ heads(self.v(x))).transpose(1, 2).reshape(*x.shape[:2], -1))


class Batched(nn.Module):
    """Joins the heads to the batch: a size that must not be fixed."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        v = self.v(x).view(n, length, self.num_heads, width // self.num_heads).transpose(1, 2)
        mixed = v.reshape(n * v.shape[1], length, -1).cumsum(1)
        return self.o(mixed.view(n, v.shape[1], length, -1).transpose(1, 2).reshape(n, length, width))


class ReadOffAPart(nn.Module):
    """Reads a width off one of its parts, and refuses an input that is too narrow before it splits it."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 8
            self.turn = nn.Linear(12, self.width)

        def forward(self, state: Tensor, x: Tensor) -> Tensor:
            return state + self.turn(torch.cat([state, x], -1)).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.cell = self.Cell()
        self.a, self.b = nn.Linear(WIDTH, 12), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        width = self.cell.width
        rest = y.shape[-1] - width
        if rest <= 0:
            raise ValueError(f"{y.shape[-1]} channels are no more than {width}")
        state, x = y.split([width, rest], -1)
        return self.b(self.cell(state.tanh(), x))


class ScaleOfAWidth(nn.Module):
    """Attention whose scale its own Python makes of the width of a head, in a variable."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scale = 1.0 / math.sqrt(k.size(-1))
        scores = (q @ k.transpose(-2, -1)) * scale
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Correlation(nn.Module):
    """Products of features, which are gone once they are summed over, by the root of their number as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x), self.b(x)
        _, _, n_features = first.shape
        first = first @ second.transpose(1, 2)  # (N, L, L)
        return self.c(first / torch.sqrt(torch.tensor(n_features)))


class DividedInPlace(nn.Module):
    """A mean written as a sum, and a variance that is divided in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x), self.b(x)
        power = z.square().sum(-1, keepdim=True)
        power /= z.shape[2] - 1
        return self.c(torch.cat([y.sum(-1, keepdim=True) / y.shape[-1], power], -1))


CLASSES: tuple[type[Any], ...] = (
    Quotient,
    Unscaled,
    UnequalParts,
    Chunks,
    Partial,
    Looping,
    Inherited,
    FixedTable,
    Batched,
    ReadOffAPart,
    ScaleOfAWidth,
    Correlation,
    DividedInPlace,
)

"""Attention and other layers as libraries write them: decorated, called through objects, checked, and in parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv, tokens
from torch import Tensor, nn


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as libraries put around forward."""

    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return wrapper


class Decorated(nn.Module):
    """Sizes in a tuple that a variable holds, a scale made of one of them, and two decorators around it all."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.depth = 3, 4
        self.q, self.k, self.v, self.o = (nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 5))

    @logged
    @logged
    def forward(self, x: Tensor) -> Any:
        shape = x.size()[:-1] + (self.heads, self.depth)  # noqa: RUF005
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.depth)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@case("q.weight", "v.weight")
def decorated_attention() -> Case:
    return Decorated(), tokens()


class Processor:
    """Computes the attention of a module that it is given, as in diffusers; the head width follows from the number."""

    def __call__(self, attention: Any, x: Tensor) -> Tensor:
        width = attention.k(x).shape[-1] // attention.heads
        q, k, v = (
            part(x).view(len(x), -1, attention.heads, width).transpose(1, 2)
            for part in (attention.q, attention.k, attention.v)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), -1, attention.heads * width)


class Processed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.processor = 4, Processor()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        return x + self.o(self.processor(self, x))


@case("i.weight", "m.q.weight")
def attention_by_a_plain_object() -> Case:
    net = Net(lambda net, x: net.out(net.m(net.i(x))), i=nn.Linear(6, 8), m=Processed(), out=nn.Linear(8, 3))
    return net, tokens()


@case("v.weight")
def heads_that_are_sampled_apart() -> Case:
    """Heads lie on the batch, each with places of its own, as in deformable attention."""

    def forward(net: Any, x: Tensor) -> Tensor:
        heads = net.v(x).unflatten(1, (-1, 4)).flatten(0, 1)
        places = net.places(x.mean((2, 3))).unflatten(1, (-1, 6, 2)).flatten(0, 1)[:, None].tanh()
        sampled = F.grid_sample(heads, places, align_corners=False)
        return net.o(sampled.unflatten(0, (len(x), -1)).flatten(1, 2))  # type: ignore[no-any-return]

    return Net(forward, v=conv(3, 12, 1), places=nn.Linear(3, 36), o=conv(12, 5, 1)), image()


class Checked(nn.Module):
    """Checks the width of its input before anything runs, that all is finite, and how many entries there are."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 8
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, rows: Tensor) -> Any:
        if x.shape[-1] != self.channels:
            raise ValueError(f"expected {self.channels} channels")
        y = self.a(x)
        if not torch.isfinite(y).all():
            y = y.clamp(-1, 1)
        if not bool(rows.sum() * x.shape[-1] == y[:2].numel()):
            raise ValueError("another number of entries")
        first = y[:, 0]  # of which the shape alone is used
        return self.b(y * torch.ones(first.shape, dtype=y.dtype)[:, None])


@case("i.weight", "m.a.weight")
def widths_that_are_checked() -> Case:
    net = Net(lambda net, x, rows: net.m(net.i(x), rows), i=nn.Linear(6, 8), m=Checked())
    return net, (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.ones(2, dtype=torch.long))


@case("i.weight")
def tokens_pooled_beside_their_channels() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.avg_pool2d(net.i(x)[:, None], (2, 1), stride=(2, 1))[:, 0]
        return net.o(torch.cat([y, y[..., 8:]], -1))  # type: ignore[no-any-return]

    return Net(forward, i=nn.Linear(6, 8), o=nn.Linear(8, 3)), tokens()

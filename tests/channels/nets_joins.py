"""Nets that join and split channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv, tokens
from torch import Tensor, nn


@case("a.weight")
def cat_with_itself() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(torch.cat([y, y], 1))

    return Net(forward, a=conv(3, 8), b=conv(16, 5, 1)), image()


@case("a.weight", "b.weight")
def cat_with_the_input() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(torch.cat([net.a(x), net.b(x).relu(), x], 1))

    return Net(forward, a=conv(3, 8, 1), b=conv(3, 6, 1), c=conv(17, 5, 1)), image()


@case("a.weight", "b.weight", "c.weight")
def dense_connections() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        first = net.a(x)
        second = net.b(first.relu())
        third = net.c(torch.cat([first, second], 1).relu())
        return net.d(torch.cat([first, second, third], 1))

    return Net(forward, a=conv(3, 8), b=conv(8, 4, 1), c=conv(12, 4, 1), d=conv(16, 5, 1)), image()


@case("c.weight", "a.weight", "b.weight")
def one_producer_of_two_groups() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.d(net.c(x) * torch.cat([net.a(x), net.b(x)], 1))

    return Net(forward, c=conv(3, 12, 1), a=conv(3, 8, 1), b=conv(3, 4, 1), d=conv(12, 5, 1)), image()


@case("a.weight", "b.weight")
def residual_in_place() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        out = net.n(net.b(y))
        out += y
        out.relu_()
        return net.c(out)

    return Net(forward, a=conv(3, 8, 1), b=conv(8, 8, 1), n=nn.BatchNorm2d(8), c=conv(8, 5, 1)), image()


@case("a.weight")
def chunk_and_gate() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = net.a(x).chunk(2, 1)
        return net.b(a * b.sigmoid())

    return Net(forward, a=conv(3, 16), b=conv(8, 5, 1)), image()


@case("0.weight")
def gated_linear_unit() -> Case:
    return nn.Sequential(conv(3, 16), nn.GLU(1), conv(8, 5, 1)), image()


@case("a.weight")
def halves_for_two_consumers() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = net.a(x).relu().chunk(2, 1)
        return net.b(a) + net.c(b)

    return Net(forward, a=conv(3, 16), b=conv(8, 5, 1), c=conv(8, 5, 1)), image()


@case("a.weight")
def channel_shuffle() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        n, c, h, w = y.shape
        return net.b(net.identity(y.view(n, 2, c // 2, h, w)).transpose(1, 2).reshape(n, c, h, w))

    return Net(forward, a=conv(3, 16), b=conv(16, 5, 1), identity=nn.Identity()), image()


@case("a.weight")
def shuffle_that_the_narrow_model_need_not_copy() -> Case:
    """With one channel in every group, `reshape` is a view: the narrow model runs other operators."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return net.b(torch.relu(y)) + net.c(torch.relu(x))

    return Net(forward, a=conv(3, 4, 1), b=conv(4, 5, 1), c=conv(3, 5, 1)), image()


@case("a.weight")
def channels_into_the_batch_and_back() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        n, c, h, w = y.shape
        return net.b(F.avg_pool2d(y.reshape(n * c, 1, h, w), 2).reshape(n, c, h // 2, w // 2))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def flipped_channels() -> Case:
    return Net(lambda net, x: net.b(net.a(x).flip(1)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight", "f.weight")
def channels_last_tokens() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.g(F.gelu(net.f(net.a(x).flatten(2).transpose(1, 2)))).mean(1)

    return Net(forward, a=conv(3, 8), f=nn.Linear(8, 12), g=nn.Linear(12, 4)), image()


@case("a.weight", "u.weight")
def squeeze_and_excite() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(y * net.v(net.u(F.adaptive_avg_pool2d(y, 1)).relu()).sigmoid())

    return Net(forward, a=conv(3, 8), u=conv(8, 4, 1), v=conv(4, 8, 1), b=conv(8, 5, 1)), image()


@case("a.weight", "b.weight", "both.weight")
def bilinear() -> Case:
    parts = {"a": nn.Linear(6, 8), "b": nn.Linear(6, 5), "both": nn.Bilinear(8, 5, 7), "c": nn.Linear(7, 3)}
    return Net(lambda net, x: net.c(net.both(net.a(x).relu(), net.b(x)).relu()), **parts), tokens()

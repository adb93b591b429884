"""What the model's own code fixes: to be found and locked."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv, weight
from torch import Tensor, nn


@case()
def split_of_a_fixed_size() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        a, b = net.a(x).split(8, 1)
        return net.b(a * b.sigmoid())

    return Net(forward, a=conv(3, 16), b=conv(8, 5, 1)), image()


@case()
def split_of_a_fixed_size_that_raises_nothing() -> Case:
    return Net(lambda net, x: net.b(torch.cat(net.a(x).split(8, 1)[::-1], 1)), a=conv(3, 16), b=conv(16, 5, 1)), image()


@case()
def fixed_size_in_a_view() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x).relu().mean((2, 3)).reshape(-1, 4, 2).flatten(1))

    return Net(forward, a=conv(3, 8), b=nn.Linear(8, 5)), image()


@case("0.weight")
def fixed_size_in_a_module() -> Case:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Unflatten(1, (4, 2)), nn.Flatten())
    return nn.Sequential(conv(3, 8), *pool, nn.Linear(8, 5)), image()


@case()
def fixed_groups_in_a_function() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(F.conv2d(x, net.a).relu(), net.b, groups=8).relu(), net.c)

    return Net(forward, a=weight(8, 3, 3, 3), b=weight(8, 1, 3, 3), c=weight(5, 8, 1, 1)), image()


@case()
def scale_by_the_width() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(y / y.shape[1] ** 0.5)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def sum_over_the_width() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(x) * (y.sum(1, keepdim=True) / y.shape[1])

    return Net(forward, a=conv(3, 8, padding=1), b=conv(3, 5, 1)), image()


@case()
def mean_over_channels() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.b(y - y.mean(1, keepdim=True))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def softmax_over_channels() -> Case:
    return nn.Sequential(conv(3, 8), nn.Softmax(1), conv(8, 5, 1)), image()


@case()
def cumulative_sum_over_channels() -> Case:
    return Net(lambda net, x: net.b(net.a(x).cumsum(1)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def sum_of_sigmoids() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(x) * torch.sigmoid(net.a(x)).sum(1, keepdim=True)

    return Net(forward, a=conv(3, 8, padding=1), b=conv(3, 5, 1)), image()


@case()
def normalized_over_channels() -> Case:
    return Net(lambda net, x: net.b(F.normalize(net.a(x), dim=1)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def normalized_over_positions() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y / y.norm(dim=(2, 3), keepdim=True))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def gram_matrix() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).flatten(2)
        return net.b((y @ y.transpose(1, 2)).flatten(1))

    return Net(forward, a=conv(3, 6), b=nn.Linear(36, 3)), image()


@case()
def shifted_channels() -> Case:
    return Net(lambda net, x: net.b(F.pad(net.a(x), (0, 0, 0, 0, 1, -1))), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def first_half_of_the_channels_overwritten() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y[:, :4] = 1.0
        return net.b(y)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def shape_changed_in_place() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).mean((2, 3))
        y.unsqueeze_(-1).unsqueeze_(-1)
        return net.b(y)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def plain_tensor_attribute() -> Case:
    net = Net(lambda net, x: net.b(net.a(x) * net.scale), a=conv(3, 8), b=conv(8, 5, 1))
    object.__setattr__(net, "scale", torch.rand(1, 8, 1, 1) + 0.5)
    return net, image()


@case()
def operator_without_a_rule() -> Case:
    return Net(lambda net, x: net.b(net.a(x).digamma()), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case()
def width_decides_the_path() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, net.a)
        if y.shape[1] < 8:
            y = y * 2
        return F.conv2d(y, net.b)

    return Net(forward, a=weight(8, 3, 1, 1), b=weight(4, 8, 1, 1)), image()

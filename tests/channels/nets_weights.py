"""Nets that use their weights in unusual ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import CASES, Case, case, conv, weight
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization


@case("0.weight")
def tied_weights() -> Case:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    net[4].weight = net[2].weight
    return net, (torch.randn(4, 6),)


@case("0.weight")
def one_module_twice() -> Case:
    twice = conv(8, 8, 3, padding=1)
    return nn.Sequential(conv(3, 8), nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU(), conv(8, 4, 1)), image()


@case("a", "b")
def parameters_used_directly() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.batch_norm(F.conv2d(x, net.a, net.bias), net.mean, net.running_var, net.scale, net.shift)
        return torch.einsum("nchw,oc->nohw", F.conv2d(y.relu(), net.b), net.c)

    buffers = {"mean": torch.zeros(8), "running_var": torch.ones(8)}
    vectors = {"bias": weight(8), "scale": weight(8), "shift": weight(8)}
    return Net(forward, a=weight(8, 3, 3, 3), b=weight(6, 8, 1, 1), c=weight(5, 6), **buffers, **vectors), image()


@case("encode.weight")
def decoder_uses_the_encoders_weight() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(net.encode(x).relu(), net.encode.weight.t())

    return Net(forward, encode=nn.Linear(6, 8)), (torch.randn(4, 6),)


@case("a.weight", "b.weight")
def standardized_weights() -> Case:
    def standard(w: Tensor) -> Tensor:
        return (w - w.mean((2, 3), keepdim=True)) / (w.std((2, 3), keepdim=True) + 1e-2)

    def forward(net: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, standard(net.a.weight), net.a.bias).relu()
        return net.c(F.conv2d(y, standard(net.b.weight), net.b.bias))

    return Net(forward, a=conv(3, 8), b=conv(8, 6), c=conv(6, 4, 1)), image()


@case("a.weight", "kernel")
def grouped_with_computed_weight() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(F.conv2d(net.a(x).relu(), net.kernel.sigmoid(), groups=2))

    return Net(forward, a=conv(3, 16), kernel=weight(12, 8, 1, 1), c=conv(12, 4, 1)), image()


@case("a.weight")
def layer_scale_of_zero() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).relu()
        return net.c(y + net.gamma * net.b(y))

    return Net(forward, a=conv(3, 8), b=conv(8, 8, 1), c=conv(8, 3, 1), gamma=weight(8, 1, 1)), image()


@case("a.weight")
def float_buffer_per_channel() -> Case:
    return Net(lambda net, x: net.b(net.a(x) * net.t), a=conv(3, 8), b=conv(8, 5, 1), t=torch.ones(8, 1, 1)), image()


@case("2.weight")
def spectral_norm() -> Case:
    first = nn.utils.parametrizations.spectral_norm(conv(3, 8))
    return nn.Sequential(first, nn.ReLU(), conv(8, 4, 1), nn.ReLU(), conv(4, 2, 1)), image()


@case("a.weight", "b.parametrizations.weight.original1")
def weight_norm_of_each_position() -> Case:
    """As in wav2vec 2.0, but in two dimensions, where torch computes the norm step by step."""
    middle = weight_norm(conv(8, 6, padding=1), dim=2)
    return Net(lambda net, x: net.c(net.b(net.a(x).relu()).relu()), a=conv(3, 8), b=middle, c=conv(6, 3, 1)), image()


@case("a.weight", "b.parametrizations.weight.original1")
def weight_norm_of_the_whole() -> Case:
    middle = weight_norm(conv(8, 6, padding=1), dim=None)  # type: ignore[arg-type]
    return Net(lambda net, x: net.c(net.b(net.a(x).relu()).relu()), a=conv(3, 8), b=middle, c=conv(6, 3, 1)), image()


DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "quotient": lambda y, s: y / s,
    "reciprocal": lambda y, s: y * (1 / s),
    "root": lambda y, s: y * (s * s).rsqrt(),
    "power": lambda y, s: y * s**-2,
    "logarithm": lambda y, s: y * s.abs().log(),
    "fused": lambda y, s: torch.addcdiv(torch.zeros_like(y), y, s.expand(len(y), -1)),
}
"""Ways to divide by a vector, which must not be zero where a channel is removed."""


def divided_by_a_parameter(how: str) -> Case:
    """Temperatures by channel, as classifiers learn them, one of which is added as well."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = DIVISIONS[how](net.a(x), net.first).relu()
        return net.c(DIVISIONS[how](net.b(x), net.second) + net.second)

    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 9), "c": nn.Linear(9, 3)}
    return Net(forward, first=weight(8), second=weight(9), **layers), (torch.randn(4, 6),)


for _how in DIVISIONS:
    CASES[f"divided_by_a_parameter_{_how}"] = (partial(divided_by_a_parameter, _how), ("a.weight", "b.weight"))


@case("a.weight", "b.weight")
def entries_of_a_weight_divided() -> Case:
    """A divisor of the whole shape of a weight, and one of what it reads."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.linear(net.a(x).relu() / net.read, net.b.weight / net.sigma)
        return net.c(x.relu())

    layers = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 9), "c": nn.Linear(9, 3)}
    return Net(forward, read=weight(8), sigma=weight(9, 8), **layers), (torch.randn(4, 6),)


class StepSizes(nn.Conv2d):
    """A convolution whose weight is quantized by a learned step for each output (LSQ, Esser et al. 2020)."""

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, 3, padding=1, **options)
        self.step = weight(outputs, 1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 / math.sqrt(self.weight.numel() * 7)
        step = (self.step - self.step * scale).detach() + self.step * scale
        v = (self.weight / step).clamp(-8, 7)
        return F.conv2d(x, ((v.round() - v).detach() + v) * step, self.bias, padding=1)


@case("0.weight", "2.weight")
def learned_step_sizes() -> Case:
    return nn.Sequential(StepSizes(3, 8), nn.ReLU(), StepSizes(8, 6), nn.ReLU(), conv(6, 4, 1)), image()


class Triangle(nn.Module):
    """A matrix made of the triangle above its diagonal: symmetric, or skew-symmetric."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, matrix: Tensor) -> Tensor:
        upper = matrix.triu(0 if self.sign > 0 else 1)
        return upper + self.sign * matrix.triu(1).T


def made_of_a_triangle(sign: int) -> Case:
    layers = (nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 7))
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(7, 3))
    register_parametrization(net[2], "weight", Triangle(sign))
    return net, (torch.randn(4, 6),)


CASES["symmetric_weight"] = (partial(made_of_a_triangle, 1), ("0.weight", "2.parametrizations.weight.original"))
CASES["skew_symmetric_weight"] = (partial(made_of_a_triangle, -1), ("0.weight", "4.weight"))


@case("0.weight")
def triangle_that_counts_positions() -> Case:
    """A band is another one where positions in between go: the axis stays, and the layers around it lose others."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(x, net.band.triu(-2).tril(2))

    band = Net(forward, band=weight(8, 8))
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), band, nn.Linear(8, 3)), (torch.randn(4, 6),)

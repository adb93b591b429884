"""Train mode, inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv
from torch import Tensor, nn


@case("a.weight")
def functional_dropout() -> Case:
    return Net(lambda net, x: net.b(F.dropout(net.a(x), 0.5, net.training)), a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("2.weight")
def circular_padding() -> Case:
    ring = conv(8, 5, padding=1, padding_mode="circular")
    return nn.Sequential(conv(3, 8), nn.ReLU(), ring, nn.ReLU(), conv(5, 4, 1)), image()


@case("a.weight")
def several_inputs() -> Case:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.c(net.a(x).relu() + net.b(y))

    return Net(forward, a=nn.Linear(4, 8), b=nn.Linear(5, 8), c=nn.Linear(8, 2)), (torch.randn(2, 4), torch.randn(2, 5))


@case("a.weight")
def nested_inputs_and_outputs() -> Case:
    def forward(net: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        y = net.a(inputs["x"]) + net.a(inputs["more"][0])
        return {"scores": net.b(y), "more": (net.c(y.relu()), [y.sum(1) * 0 + 1])}

    example = {"x": torch.randn(2, 4), "more": [torch.randn(2, 4)]}
    return Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3), c=nn.Linear(8, 2)), (example,)


@case()
def features_in_the_output() -> Case:
    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net.a(x)
        return net.b(y.relu()), y

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()

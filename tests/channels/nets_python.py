"""What Python allows in a forward: loops, conditions on data, containers, calls of functions on a module's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv, tokens, weight
from torch import Tensor, nn


@dataclass
class Batch:
    image: Tensor
    scale: Tensor


@dataclass
class Scores:
    scores: Tensor
    more: dict[str, Tensor]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@case("a.weight", "layers.0.weight")
def dataclass_in_and_out() -> Case:
    def forward(net: Any, batch: Batch) -> Scores:
        y = net.a(batch.image * batch.scale).relu()
        for layer in net.layers:
            y = layer(y).relu()
        return Scores(net.b(y), {"pooled": net.c(y.mean((2, 3)))})

    parts = {"a": conv(3, 8), "layers": nn.ModuleList([conv(8, 8, 1), conv(8, 8, 1)]), "b": conv(8, 5, 1)}
    example = Batch(*image(), torch.tensor(0.5))
    return Net(forward, **parts, c=nn.Linear(8, 4)), (example,)


@case("a.weight")
def named_tuple_out() -> Case:
    def forward(net: Any, x: Tensor) -> Pair:
        y = net.a(x).relu()
        return Pair(net.b(y), net.c(y))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1), c=conv(8, 4, 1)), image()


@case("a.weight", "layer.weight")
def as_often_as_the_data_says() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        times = 1 + int(x.flatten()[0] > -100)
        while times > 0:
            y = net.layer(y).relu()
            times -= 1
        return net.b(y)

    return Net(forward, a=conv(3, 8), layer=conv(8, 8, 1), b=conv(8, 5, 1)), image()


@case("a.weight")
def a_branch_that_is_not_taken() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y = net.b(y) if x.sum() > 1e6 else net.c(y).relu()
        return net.d(y)

    return Net(forward, a=conv(3, 8), b=conv(8, 8, 1), c=conv(8, 8, 1), d=conv(8, 5, 1)), image()


@case("a.weight")
def picked_from_a_dict_of_modules() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        for name, layer in net.layers.items():
            y = layer(y) if name != "skip" else y
        return net.b(y) + net.shifts[0].sum() * net.scales["one"]

    layers = nn.ModuleDict({"one": conv(8, 8, 1), "act": nn.ReLU(), "skip": nn.Identity()})
    parameters = {"shifts": nn.ParameterList([torch.ones(3)]), "scales": nn.ParameterDict({"one": torch.ones(1)})}
    return Net(forward, a=conv(3, 8), layers=layers, b=conv(8, 5, 1), **parameters), image()


@case("a.weight")
def called_with_other_tensors() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        halved = {name: 0.5 * tensor for name, tensor in net.layer.named_parameters()}
        return net.b(torch.func.functional_call(net.layer, halved, net.a(x)).relu())

    return Net(forward, a=conv(3, 8), layer=conv(8, 8, 1), b=conv(8, 5, 1)), image()


@case("a.weight")
def every_other_position() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y = torch.cat([y[..., ::2, 1:], y[:, :, 1::2, :-1]], 1)
        return net.b(y.relu()[..., None, :, :].squeeze(2))

    return Net(forward, a=conv(3, 8), b=conv(16, 5, 1)), image()


@case()
def rows_picked_by_a_list_and_a_mask() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)[:, :, [4, 0, 2], ...]
        return net.b(y)[x[:, 0, 0, 0] < 100]

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight", "b.weight")
def contracted_by_letters() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y, z = net.a(x), net.b(x)
        return net.c(torch.einsum("blc,bmc,bmd->bld", y, z, y))

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(6, 8), c=nn.Linear(8, 4)), tokens()


@case("a.weight")
def gated_by_its_own_half() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        value, gate = net.a(x).chunk(2, -1)
        return net.b(value * F.gelu(gate))

    return Net(forward, a=nn.Linear(6, 16), b=nn.Linear(8, 4)), tokens()


@case()
def bilinear_form() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(net.form(net.a(x), net.b(x)).relu())

    parts = {"a": nn.Linear(6, 5), "b": nn.Linear(6, 4), "form": nn.Bilinear(5, 4, 6)}
    return Net(forward, **parts, c=nn.Linear(6, 3)), tokens()


@case()
def distances() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(torch.cdist(y, y))

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(5, 4)), tokens()


@case("2.weight")
def weight_norm() -> Case:
    first = nn.utils.parametrizations.weight_norm(conv(3, 8))
    return nn.Sequential(first, nn.ReLU(), conv(8, 6, 1), nn.ReLU(), conv(6, 4, 1)), image()


@case("2.weight")
def orthogonal_weight() -> Case:
    first = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), tokens()


class CheckedTable(nn.Module):
    """Makes its part of a sum in a method of its own, which looks at a size first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = weight(8)

    def made(self) -> Tensor:
        if self.table.numel() != 8:
            raise ValueError("expected a table of 8")
        return self.table


@case("b.weight")
def a_check_in_a_method_that_another_module_calls() -> Case:
    """What the method's own module holds is locked, not all that the caller does."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(net.b(net.a(x) + net.table.made()).relu())

    return Net(forward, a=nn.Linear(6, 8), table=CheckedTable(), b=nn.Linear(8, 9), c=nn.Linear(9, 4)), tokens()

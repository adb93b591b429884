"""Norms and activations."""

from __future__ import annotations

from typing import Any

import torch
from equivalence import Net, image
from net_registry import Case, case, conv, tokens, weight
from torch import Tensor, nn


@case("0.weight")
def norm_without_affine() -> Case:
    return nn.Sequential(conv(3, 8, bias=False), nn.BatchNorm2d(8, affine=False), nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def norm_without_statistics() -> Case:
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    return nn.Sequential(conv(3, 8), norm, nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def instance_norm_with_statistics() -> Case:
    norm = nn.InstanceNorm2d(8, track_running_stats=True)
    return nn.Sequential(conv(3, 8), norm, nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def instance_norm_with_affine() -> Case:
    return nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def instance_norm() -> Case:
    return nn.Sequential(conv(3, 8), nn.InstanceNorm2d(8), nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight", "2.weight")
def layer_norm() -> Case:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), tokens()


@case("0.weight")
def norm_over_positions() -> Case:
    layers = (nn.Conv1d(3, 8, 1), nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.Conv1d(8, 5, 1))
    return nn.Sequential(*layers), (torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)),)


class UnitLength(nn.Module):
    """RMSNorm as the length of a vector, by a function that expands it to the vector's size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.scale = width**0.5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1) * self.scale * self.weight


@case("0.weight")
def norm_by_normalize() -> Case:
    return nn.Sequential(nn.Linear(6, 8), UnitLength(8), nn.Linear(8, 3)), tokens()


class OwnLayerNorm(nn.Module):
    """LayerNorm as the authors of ConvNeXt wrote it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.normalized_shape = (width,)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias)  # type: ignore[arg-type]


@case("0.weight")
def norm_that_keeps_its_shape() -> Case:
    return nn.Sequential(nn.Linear(6, 8), OwnLayerNorm(8), nn.Linear(8, 3)), tokens()


class GatedNorm(nn.Module):
    """A norm of what a second tensor gates, over groups whose size it states, as Mamba 2 and its kin have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.group_size = nn.Parameter(torch.ones(width)), width
        self.unread = nn.Buffer(torch.ones(3), persistent=False)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * nn.functional.silu(gate)
        groups = x.view(*x.shape[:-1], x.shape[-1] // self.group_size, self.group_size)
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * groups.view(*x.shape[:-1], -1)


class GatedBlock(nn.Module):
    """Channels and their gates from one layer, split by a stated width before they are normalized together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both, self.norm, self.width = nn.Linear(6, 2 * width), GatedNorm(width), width
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.both(x).split([self.width, self.width], -1)
        return self.out(self.norm(values.tanh(), gate))  # type: ignore[no-any-return]


@case("both.weight", "norm.weight")
def norm_of_a_gated_tensor() -> Case:
    return GatedBlock(8), tokens()


@case()
def norm_of_a_tensor_and_of_other_channels() -> Case:
    class Shifted(UnitLength):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            return super().forward(x) + (0 if other is None else other.sum(-1, keepdim=True))

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(net.norm(net.a(x), net.b(x)))

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(6, 8), norm=Shifted(8), c=nn.Linear(8, 3)), tokens()


@case()
def expanded_to_a_fixed_size() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(net.a(x) * net.scale.expand(8))  # type: ignore[no-any-return]

    return Net(forward, a=nn.Linear(6, 8), scale=nn.Parameter(torch.ones(1)), b=nn.Linear(8, 3)), tokens()


@case("0.weight", "3.weight")
def group_norm() -> Case:
    layers = (conv(3, 8), nn.GroupNorm(4, 8), nn.ReLU(), conv(8, 6, 1), nn.ReLU(), conv(6, 5, 1))
    return nn.Sequential(*layers), image()


@case()
def layer_norm_as_a_function_locks_its_channels() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(nn.functional.layer_norm(net.a(x), (8,)))

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3)), tokens()


@case("a.weight", "b.weight")
def length_of_channels_as_a_function() -> Case:
    """Zeros add nothing to it: unlike other norms it needs no module of its own."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = nn.functional.normalize(net.a(x).relu()) * net.scale.view(1, -1, 1, 1)
        z = net.b(y).relu()
        return net.c(z / z.norm(p=1, dim=1, keepdim=True).clamp_min(1e-3))

    return Net(forward, a=conv(3, 8), b=conv(8, 6), c=conv(6, 5, 1), scale=weight(8)), image()


@case("0.weight", "2.weight")
def prelu() -> Case:
    return nn.Sequential(conv(3, 8), nn.PReLU(8), conv(8, 6, 1), nn.PReLU(), conv(6, 5, 1)), image()


@case("0.weight")
def sigmoid_before_conv() -> Case:
    return nn.Sequential(conv(3, 8), nn.Sigmoid(), conv(8, 5, 3, padding=1)), image()


@case("0.weight")
def sigmoid_before_norm() -> Case:
    layers = (conv(3, 8), nn.Sigmoid(), nn.BatchNorm2d(8, affine=False), conv(8, 5, 1))
    return nn.Sequential(*layers), image()


@case("a.weight")
def activations_by_hand() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x).clamp(min=0)
        return net.b(y**2 + y * torch.sigmoid(1.702 * y))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def gate_by_comparison() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b(y * (y > y.amax((2, 3), keepdim=True) * 0.5))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def indicator_that_is_one_at_zero() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.b((y.relu() <= 0).to(y.dtype))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def copied_into_new_zeros() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        z = y.new_zeros(y.shape)
        z.copy_(y)
        return net.b(z)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def in_place_on_views() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        y.view(y.shape[0], -1).add_(1.0)
        y[:, :, 1:] *= 3
        y[:] = y - 2
        return net.b(y)

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


class SpatialAttention(nn.Module):
    """Every position weighted by what its channels are on average and at most, as in CBAM (Woo et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        known = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)  # (N, 2, H, W)
        return x * self.weigh(known).sigmoid()


class ChannelPool(nn.Module):
    """The largest and the mean of all channels, which leaves two."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x.max(1)[0].unsqueeze(1), x.mean(1).unsqueeze(1)), 1)


@case("0.weight")
def spatial_attention() -> Case:
    return nn.Sequential(conv(3, 8), SpatialAttention(), conv(8, 5, 1)), image()


@case("a.weight")
def pool_over_channels() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.c(y * net.b(net.pool(y)).sigmoid())

    parts = {"a": conv(3, 8), "pool": ChannelPool(), "b": conv(2, 1, 3, padding=1), "c": conv(8, 5, 1)}
    return Net(forward, **parts), image()


class Bare(nn.Module):
    """A norm without weight that hands the size it remembers to torch, as in torch's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.normalized_shape = (width,)
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight, 1e-6)


@case("0.weight")
def norm_by_hand_that_remembers_its_shape() -> Case:
    return nn.Sequential(nn.Linear(6, 8), Bare(8), nn.Linear(8, 3)), tokens()


@case("table")
def norm_of_positions_that_stay_and_then_of_others() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.norm(net.mix(net.norm(net.table.t())).softmax(0))
        return net.head(y) + x

    parts = {"norm": nn.LayerNorm(8), "mix": nn.Linear(8, 8), "head": nn.Linear(8, 6)}
    return Net(forward, table=weight(8, 5), **parts), (tokens()[0][:1],)

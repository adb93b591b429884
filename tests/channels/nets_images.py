"""Channels that become positions and the other way round, and positions that are sampled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv
from torch import Tensor, nn
from torchvision.ops import roi_align


@case("0.weight")
def pixel_shuffle() -> Case:
    return nn.Sequential(conv(3, 16), nn.ReLU(), nn.PixelShuffle(2), conv(4, 5, 1)), image()


@case("0.weight")
def pixel_unshuffle() -> Case:
    return nn.Sequential(conv(3, 4), nn.ReLU(), nn.PixelUnshuffle(2), conv(16, 5, 1)), image()


@case()
def pixel_shuffle_of_sigmoids_to_one_channel() -> Case:
    return nn.Sequential(conv(3, 4), nn.Sigmoid(), nn.PixelShuffle(2), conv(1, 5, 1)), image()


@case("0.weight")
def shuffled_by_a_module() -> Case:
    return nn.Sequential(conv(3, 12), nn.ChannelShuffle(3), nn.ReLU(), conv(12, 5, 1)), image()


@case("a.weight")
def patches_taken_out_and_put_back() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        patches = F.unfold(net.a(x), 2, stride=2)  # (N, 8 * 4, 9)
        return net.b(F.fold(patches.relu(), (6, 6), 2, stride=2))

    return Net(forward, a=conv(3, 8), b=conv(8, 5, 1)), image()


@case("a.weight")
def patches_then_linear() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.b(F.unfold(net.a(x), 3).transpose(1, 2))

    return Net(forward, a=conv(3, 8), b=nn.Linear(72, 5)), image()


@case("a.weight", "b.weight")
def warped_by_a_flow() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        flow = net.c(net.b(x).relu()).permute(0, 2, 3, 1).tanh()
        return net.d(F.grid_sample(y, flow, align_corners=False))

    return Net(forward, a=conv(3, 8), b=conv(3, 6), c=conv(6, 2, 1), d=conv(8, 5, 1)), image()


@case("a.weight")
def regions_of_interest() -> Case:
    def forward(net: Any, x: Tensor, boxes: list[Tensor]) -> Tensor:
        return net.c(net.b(roi_align(net.a(x).relu(), boxes, 2, 1.0, 2)).flatten(1))

    boxes = [torch.tensor([[0.0, 0.0, 4.0, 5.0], [1.0, 2.0, 5.0, 5.0]]), torch.tensor([[2.0, 1.0, 6.0, 3.0]])]
    return Net(forward, a=conv(3, 8), b=conv(8, 6, 1), c=nn.Linear(24, 5)), (*image(), boxes)


@case("a.weight", "b.weight")
def three_dimensions_there_and_back() -> Case:
    body = {"a": nn.Conv3d(2, 8, 2), "b": nn.ConvTranspose3d(8, 6, 2), "c": nn.Conv3d(6, 2, 1)}
    return Net(lambda net, x: net.c(net.b(net.a(x).relu()).relu()), **body), (torch.randn(1, 2, 4, 4, 4),)


@case("a.weight", "b.weight")
def one_dimension_there_and_back() -> Case:
    body = {"a": nn.Conv1d(2, 8, 3), "b": nn.ConvTranspose1d(8, 6, 3, groups=2), "c": nn.Conv1d(6, 2, 1)}
    return Net(lambda net, x: net.c(net.b(net.a(x).relu()).relu()), **body), (torch.randn(1, 2, 9),)


@case("a.weight", "b.weight")
def unpooled_to_where_the_largest_values_were() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        x, places = F.max_pool2d(net.a(x).relu(), 2, return_indices=True)
        return net.c(F.max_unpool2d(net.b(x).relu(), places, 2))

    return Net(forward, a=conv(3, 8, padding=1), b=conv(8, 8, 1), c=conv(8, 3, 1)), image()

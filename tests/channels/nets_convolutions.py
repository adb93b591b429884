"""Convolutions of every kind."""

from __future__ import annotations

from typing import Any

import torch
from equivalence import Net, image
from net_registry import Case, case, conv, tokens
from torch import Tensor, nn
from torchvision.ops import DeformConv2d


@case("0.weight", "3.weight")
def conv_norm_relu_linear() -> Case:
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 6), nn.ReLU(), *pool), image()


@case("0.weight", "2.weight")
def grouped_by_whole_groups() -> Case:
    return nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 24, groups=8), nn.ReLU(), conv(24, 5, 1)), image()


@case("0.weight", "2.weight")
def grouped_by_columns() -> Case:
    return nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 12, groups=2), nn.ReLU(), conv(12, 5, 1)), image()


@case("0.weight", "2.weight")
def depthwise_with_multiplier() -> Case:
    return nn.Sequential(conv(3, 6), nn.ReLU(), conv(6, 18, groups=6, bias=False), nn.ReLU(), conv(18, 5, 1)), image()


@case("a.weight", "b.weight", "c.weight")
def grouped_after_cat() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.d(net.c(torch.cat([net.a(x), net.b(x)], 1)).relu())

    return Net(forward, a=conv(3, 8, 1), b=conv(3, 8, 1), c=conv(16, 16, groups=2), d=conv(16, 3, 1)), image()


@case("0.weight", "4.weight")
def transposed() -> Case:
    up = nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1)
    return nn.Sequential(conv(3, 8), nn.ReLU(), up, nn.ReLU(), conv(6, 5, 1), nn.ReLU(), conv(5, 3, 1)), image()


@case("0.weight")
def transposed_by_whole_groups() -> Case:
    up = nn.ConvTranspose2d(8, 12, 3, groups=4)
    return nn.Sequential(conv(3, 8), nn.ReLU(), up, nn.ReLU(), conv(12, 5, 1)), image()


@case("0.weight")
def transposed_by_columns() -> Case:
    up = nn.ConvTranspose2d(12, 8, 3, groups=2)
    return nn.Sequential(conv(3, 12), nn.ReLU(), up, nn.ReLU(), conv(8, 5, 1)), image()


@case("0.weight")
def transposed_depthwise() -> Case:
    up = nn.ConvTranspose2d(12, 12, 3, groups=12, bias=False)
    return nn.Sequential(conv(3, 12), nn.ReLU(), up, nn.ReLU(), conv(12, 5, 1)), image()


@case("0.weight", "3.weight")
def one_dimension() -> Case:
    layers = (nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 3), nn.Flatten(), nn.Linear(24, 3))
    return nn.Sequential(*layers), (torch.randn(2, 2, 8),)


@case("0.weight", "4.weight")
def three_dimensions() -> Case:
    body = (nn.Conv3d(2, 8, 2), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 6, 1))
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(48, 3)), (torch.randn(2, 2, 5, 5, 5),)


@case("0.weight", "3.weight")
def flatten_then_linear() -> Case:
    layers = (conv(3, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10), nn.ReLU(), nn.Linear(10, 4))
    return nn.Sequential(*layers), image()


@case("0.weight", "2.weight", "4.weight")
def padding_modes() -> Case:
    reflect, replicate = conv(8, 5, padding=1, padding_mode="reflect"), conv(5, 4, padding=1, padding_mode="replicate")
    return nn.Sequential(conv(3, 8), nn.ReLU(), reflect, nn.ReLU(), replicate, nn.ReLU(), conv(4, 4, 1)), image()


@case("0.weight", "3.weight")
def upsampling() -> Case:
    up = nn.Upsample(scale_factor=2, mode="bilinear")
    return nn.Sequential(conv(3, 8), nn.Upsample(scale_factor=2), nn.ReLU(), conv(8, 6, 1), up, conv(6, 4, 1)), image()


@case("a.weight", "b.weight")
def depthwise_behind_a_shift_of_all_channels() -> Case:
    """What is removed is the shift, not zero; it meets no other channel there."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.c(net.b(net.a(x).relu() * net.scale + net.shift).relu())

    parts = {"a": conv(3, 8), "b": conv(8, 16, groups=8), "c": conv(16, 5, 1)}
    return Net(forward, **parts, scale=nn.Parameter(torch.ones(1)), shift=nn.Parameter(torch.ones(1))), image()


@case("a.weight", "b.weight")
def tokens_of_several_scales_summed_by_a_convolution() -> Case:
    """A kernel of one position that slides over the channels leaves them alone."""

    def forward(net: Any, x: Tensor) -> Tensor:
        both = torch.stack([net.a(x), net.b(x)], 1)
        return net.head(net.sum(both).squeeze(1))

    layers = {"a": nn.Linear(6, 12), "b": nn.Linear(6, 12), "sum": nn.Conv1d(2, 1, 1), "head": nn.Linear(12, 4)}
    return Net(forward, **layers), (tokens()[0].flatten(0, 1),)


def deformed(groups: int, offset_groups: int) -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.a(x).relu()
        return net.c(net.b(x, net.offset(x), net.mask(x).sigmoid()).relu())

    parts = {
        "a": conv(3, 8, padding=1),
        "offset": conv(8, 18 * offset_groups, padding=1),
        "mask": conv(8, 9 * offset_groups, padding=1),
        "b": DeformConv2d(8, 8, 3, padding=1, groups=groups),
        "c": conv(8, 3, 1),
    }
    return Net(forward, **parts), image()


@case("a.weight", "b.weight")
def deformable_convolution() -> Case:
    return deformed(1, 2)


@case("a.weight", "b.weight")
def deformable_convolution_of_each_channel() -> Case:
    return deformed(8, 1)

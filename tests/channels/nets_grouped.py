"""Grouped convolutions whose groups are those of attention's heads, and heads that something is added to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net, image
from net_registry import Case, case, conv
from torch import Tensor, nn

HEADS, DEPTH = 3, 16


class LinearAttention(nn.Module):
    """Attention without softmax over two scales (EfficientViT, 2022): its sum of keys is a column of ones.

    The second scale is made by a convolution with a group for each of the queries, keys and values of a head, which
    are fewer groups than each has channels.
    """

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.depth, width = DEPTH, 3 * HEADS * DEPTH
        self.qkv = conv(4, width, 1, bias=False)
        self.wide = conv(width, width, 3, padding=1, groups=width, bias=bias)
        self.mix = conv(width, width, 1, groups=3 * HEADS, bias=bias)
        self.out = conv(2 * HEADS * DEPTH, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        qkv = self.qkv(x)
        scales = torch.cat([qkv, self.mix(self.wide(qkv))], 1)
        q, k, v = scales.reshape(n, -1, 3 * self.depth, h * w).transpose(-1, -2).chunk(3, -1)
        y = q.relu() @ (k.relu().transpose(-1, -2) @ F.pad(v, (0, 1), value=1.0))
        y = y[..., :-1] / (y[..., -1:] + 0.1)
        return self.out(y.transpose(-1, -2).reshape(n, -1, h, w))


@case("1.qkv.weight", "1.mix.weight", "1.wide.weight")
def linear_attention_over_two_scales() -> Case:
    return nn.Sequential(conv(3, 4), LinearAttention()), image()


@case("1.qkv.weight", "1.mix.weight")
def linear_attention_with_biases() -> Case:
    return nn.Sequential(conv(3, 4), LinearAttention(bias=True)), image()


@case("0.weight")
def grouped_with_a_free_input_and_one_output_in_each_group() -> Case:
    return nn.Sequential(conv(3, 16), nn.ReLU(), conv(16, 2, groups=2), nn.ReLU(), conv(2, 5, 1)), image()


@case("v.weight")
def heads_with_a_column_more() -> Case:
    """No attention: nothing says that heads go whole, so positions of each go and the column that is added stays."""

    def forward(net: Any, x: Tensor) -> Tensor:
        v = F.pad(net.v(x).unflatten(1, (3, -1)), (0, 0, 0, 0, 0, 1), value=2.0)  # (N, 3, 5, H, W)
        return net.o(v.square().flatten(1, 2))  # type: ignore[no-any-return]

    return Net(forward, v=conv(3, 12), o=conv(15, 2, 1)), image()

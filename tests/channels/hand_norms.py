"""Norms as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RootMeanSquare(nn.Module):
    """As in language models; in at least float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        before = hidden.dtype
        hidden = hidden.to(torch.promote_types(before, torch.float32))
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + 1e-6)).to(before)


class CenteredByHand(nn.Module):
    """LayerNorm by mean and standard deviation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3) + self.shift


class MeanSquareByHand(nn.Module):
    """Nothing to learn, and no size anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x * x).mean(dim=-1, keepdim=True).add(1e-3).rsqrt()


class SumOfSquares(nn.Module):
    """The sum alone is the same over zeros; the division by the width is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + 1e-3).sqrt() * self.weight


class GlobalResponse(nn.Module):
    """Global response norm (ConvNeXt V2, 2023), channels first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        relative = size / (size.mean(dim=1, keepdim=True) + 1e-6)
        return x + torch.addcmul(self.bias.view(1, -1, 1, 1), self.weight.view(1, -1, 1, 1), x * relative)


class StandardisedConv(nn.Conv2d):
    """Weight standardization (2019): every filter has mean 0 and variance 1 over its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

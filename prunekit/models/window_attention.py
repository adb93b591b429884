"""Equivalents with explicit sizes of torchvision's window attention: Swin, Swin V2, Swin for video, and MaxViT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

from prunekit.channels.rewrite.substitutes import SizedAttention, substitute


class _Windowed(SizedAttention):
    """Window attention of torchvision, whose heads and widths need not follow from the input's width.

    `qkv` holds the rows of all queries, then keys, then values; input and output are (B, *sizes, C).
    """

    num_heads: int
    qkv: nn.Linear
    proj: nn.Linear
    window_size: list[int]
    shift_size: list[int]
    attention_dropout: float
    dropout: float
    get_relative_position_bias: Callable[..., Tensor]

    def dense_scale(self) -> float:
        """Return 1 / sqrt(head_dim)."""
        return float((self.proj.in_features // self.num_heads) ** -0.5)

    def fits_original(self) -> bool:
        """Return whether input, heads and output are of one width, from which the scale follows."""
        width = self.proj.weight.shape[1]
        same = self.qkv.weight.shape == (3 * width, width) and self.proj.weight.shape[0] == width
        return same and self.scale == (width // self.num_heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        """Shift, cut into windows, attend within each, and join them again, along two axes or three."""
        sizes = x.shape[1:-1]
        axes = list(range(1, 1 + len(sizes)))
        window, shift = self._windows(sizes)
        padding = [p for size, win in zip(sizes[::-1], window[::-1], strict=True) for p in (0, -size % win)]
        x = F.pad(x, (0, 0, *padding))
        padded = x.shape[1:-1]
        if sum(shift):
            x = torch.roll(x, [-s for s in shift], axes)
        mask = _shift_mask(x, padded, window, shift) if sum(shift) else None
        x = self._attend(_cut(x, window), mask, self._position_bias(window))
        x = _join(x, padded, window)
        if sum(shift):
            x = torch.roll(x, shift, axes)
        return x[(slice(None), *(slice(size) for size in sizes))].contiguous()

    def _windows(self, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the window and the shift along each axis; where one window covers all, the shift is 0."""
        pairs = zip(sizes, self.window_size, self.shift_size, strict=True)
        return list(self.window_size), [0 if win >= size else shift for size, win, shift in pairs]

    def _position_bias(self, window: list[int]) -> Tensor:
        return self.get_relative_position_bias()

    def _attend(self, x: Tensor, mask: Tensor | None, bias: Tensor) -> Tensor:
        """Attend within windows, (B * windows, positions, C); mask: (windows, positions, positions)."""
        values = self.proj.weight.shape[1]
        keys = (self.qkv.weight.shape[0] - values) // 2
        parts = F.linear(x, self.qkv.weight, self._input_bias(keys)).split_with_sizes([keys, keys, values], -1)
        q, k, v = (part.view(*part.shape[:-1], self.num_heads, -1).transpose(1, 2) for part in parts)
        scores = self._scores(q, k) + bias  # (B * windows, heads, positions, positions)
        if mask is not None:
            scores = (scores.view(-1, mask.shape[0], *scores.shape[1:]) + mask[:, None]).flatten(0, 1)
        attention = F.dropout(scores.softmax(-1), self.attention_dropout, self.training)
        x = (attention @ v).transpose(1, 2).flatten(2)
        return F.dropout(F.linear(x, self.proj.weight, self.proj.bias), self.dropout, self.training)

    def _input_bias(self, keys: int) -> Tensor | None:
        return self.qkv.bias

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.scale) @ k.transpose(-2, -1)


def _cut(x: Tensor, window: Sequence[int]) -> Tensor:
    """Return (B, *sizes, C) cut into windows: (B * windows, positions, C)."""
    n = len(window)
    split = [part for size, win in zip(x.shape[1:-1], window, strict=True) for part in (size // win, win)]
    order = (0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1)
    return x.view(x.shape[0], *split, x.shape[-1]).permute(order).reshape(-1, math.prod(window), x.shape[-1])


def _join(x: Tensor, sizes: Sequence[int], window: Sequence[int]) -> Tensor:
    """Return the inverse of `_cut`."""
    n = len(window)
    counts = [size // win for size, win in zip(sizes, window, strict=True)]
    order = (0, *(axis for i in range(n) for axis in (1 + i, 1 + n + i)), 2 * n + 1)
    return x.view(-1, *counts, *window, x.shape[-1]).permute(order).reshape(-1, *sizes, x.shape[-1])


def _shift_mask(x: Tensor, padded: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> Tensor:
    """Return -100 between positions that are neighbors only by the cyclic shift, (windows, positions, positions)."""
    regions = torch.zeros(tuple(padded), dtype=torch.long)
    for axis, (size, win, s) in enumerate(zip(padded, window, shift, strict=True)):
        part = torch.tensor([0] * (size - win) + [1] * (win - s) + [2] * s if s else [0] * size)
        regions = regions * 3 + part.view([-1 if a == axis else 1 for a in range(len(padded))])
    cut = _cut(regions[None, ..., None], window)[..., 0]  # (windows, positions)
    apart = cut[:, None] != cut[:, :, None]
    return x.new_zeros(apart.shape).masked_fill(apart.to(x.device), -100.0)


@substitute(ShiftedWindowAttention)
class SizedWindowAttention(_Windowed, ShiftedWindowAttention):  # type: ignore[misc]
    """torchvision's `ShiftedWindowAttention`."""


@substitute(ShiftedWindowAttention3d)
class SizedWindowAttention3d(_Windowed, ShiftedWindowAttention3d):  # type: ignore[misc]
    """torchvision's `ShiftedWindowAttention3d`."""

    def _windows(self, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return windows that are no larger than the input; they read their part of the position table."""
        _, shift = super()._windows(sizes)
        return [min(size, win) for size, win in zip(sizes, self.window_size, strict=True)], shift

    def _position_bias(self, window: list[int]) -> Tensor:
        return self.get_relative_position_bias(window)


@substitute(ShiftedWindowAttentionV2)
class SizedWindowAttentionV2(_Windowed, ShiftedWindowAttentionV2):  # type: ignore[misc]
    """torchvision's `ShiftedWindowAttentionV2`: cosine attention with a learned scale for each head."""

    logit_scale: nn.Parameter

    def dense_scale(self) -> float:
        """Return 1: the scale is learned."""
        return 1.0

    def fits_original(self) -> bool:
        """Return whether input, heads and output are of one width."""
        width = self.proj.weight.shape[1]
        return self.qkv.weight.shape == (3 * width, width) and self.proj.weight.shape[0] == width

    def _input_bias(self, keys: int) -> Tensor | None:
        if self.qkv.bias is None:
            return None
        q, k, v = self.qkv.bias.split_with_sizes([keys, keys, len(self.qkv.bias) - 2 * keys])
        return torch.cat([q, k * 0, v])  # keys have no bias; its entries are ignored

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        scale = torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * scale


@substitute(RelativePositionalMultiHeadAttention)
class SizedRelativeAttention(SizedAttention, RelativePositionalMultiHeadAttention):  # type: ignore[misc]
    """torchvision's `RelativePositionalMultiHeadAttention`, whose heads are as wide as the input.

    Input and output are (B, groups, positions, C).
    """

    heads = "n_heads"
    projection = "merge"
    n_heads: int
    scale_factor: float
    to_qkv: nn.Linear
    merge: nn.Linear
    get_relative_positional_bias: Callable[[], Tensor]

    def dense_scale(self) -> float:
        """Return the scale of the dense module, which follows from the width of its input."""
        return float(self.scale_factor)

    def take_sizes(self) -> None:
        """Set the width of a head from the weights."""
        self.head_dim = self.merge.weight.shape[1] // self.n_heads

    def fits_original(self) -> bool:
        """Return whether input, heads and output are of one width."""
        width = self.merge.weight.shape[1]
        return self.to_qkv.weight.shape == (3 * width, width) and self.merge.weight.shape[0] == width

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each group."""
        values = self.merge.weight.shape[1]
        keys = (self.to_qkv.weight.shape[0] - values) // 2
        parts = self.to_qkv(x).split_with_sizes([keys, keys, values], -1)
        q, k, v = (part.view(*part.shape[:-1], self.n_heads, -1).transpose(2, 3) for part in parts)
        scores = q @ (k * self.scale).transpose(-2, -1) + self.get_relative_positional_bias()
        return self.merge((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))  # type: ignore[no-any-return]

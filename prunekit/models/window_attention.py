"""Equivalents with explicit sizes of torchvision's window attention: Swin, Swin V2, Swin for video, and MaxViT.

Like torchvision's own, what they compute is one function to `torch.fx`, and Python that TorchScript compiles.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
from torchvision.models.video.swin_transformer import ShiftedWindowAttention3d

from prunekit.channels.tracing.substitutes import SizedAttention, in_heads, register_substitute

if TYPE_CHECKING:
    from collections.abc import Callable


class _Windowed(SizedAttention):
    """Window attention of torchvision on (B, *sizes, C), whose heads and widths need not follow from C."""

    if TYPE_CHECKING:
        num_heads: int
        qkv: nn.Linear  # rows of all queries, then keys, then values
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
        return _of_one_width(self.qkv, self.proj) and self.scale == (width // self.num_heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        """Shift, cut into windows, attend within each, and join them again."""
        return self._attend(x, self.get_relative_position_bias(), self.window_size, None)

    def _attend(self, x: Tensor, position_bias: Tensor, window: list[int], logit_scale: Tensor | None) -> Tensor:
        return window_attention(
            x,
            self.qkv.weight,
            self.qkv.bias,
            self.proj.weight,
            self.proj.bias,
            position_bias,
            window,
            self.shift_size,
            self.num_heads,
            self.scale,
            logit_scale,
            self.attention_dropout,
            self.dropout,
            self.training,
        )


def _of_one_width(qkv: nn.Linear, out: nn.Linear) -> bool:
    width = out.weight.shape[1]
    return qkv.weight.shape == (3 * width, width) and out.weight.shape[0] == width


def window_attention(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    position_bias: Tensor,
    window: list[int],
    shift: list[int],
    num_heads: int,
    scale: float,
    logit_scale: Tensor | None,
    attention_dropout: float,
    dropout: float,
    training: bool,
) -> Tensor:
    """Shift x (B, *sizes, C), cut it into windows, attend within each, and join them again, along two axes or three.

    `proj_weight` is (C, width of all heads).
    """
    count = len(window)
    sizes = [x.shape[1 + axis] for axis in range(count)]
    padding = [0, 0]
    for axis in range(count - 1, -1, -1):
        padding += [0, -sizes[axis] % window[axis]]
    x = F.pad(x, padding)
    padded = [x.shape[1 + axis] for axis in range(count)]
    shift = [0 if window[axis] >= sizes[axis] else shift[axis] for axis in range(count)]
    axes = [1 + axis for axis in range(count)]
    if sum(shift) > 0:
        x = torch.roll(x, [-s for s in shift], axes)
    x = _cut(x, window)  # (B * windows, positions, C)

    values = proj_weight.shape[1]
    keys = (qkv_weight.shape[0] - values) // 2
    if logit_scale is not None and qkv_bias is not None:
        q_bias, k_bias, v_bias = qkv_bias.split_with_sizes([keys, keys, values])
        qkv_bias = torch.cat([q_bias, k_bias * 0, v_bias])  # keys have no bias; its entries are ignored
    q, k, v = F.linear(x, qkv_weight, qkv_bias).split_with_sizes([keys, keys, values], -1)
    q, k, v = in_heads(q, num_heads), in_heads(k, num_heads), in_heads(v, num_heads)
    if logit_scale is not None:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(logit_scale, max=math.log(100.0)).exp()
    else:
        scores = (q * scale) @ k.transpose(-2, -1)
    scores = scores + position_bias  # (B * windows, heads, positions, positions)
    if sum(shift) > 0:
        mask = _shift_mask(x, padded, window, shift)
        length = x.shape[1]
        scores = scores.view(-1, mask.shape[0], num_heads, length, length) + mask[:, None]
        scores = scores.view(-1, num_heads, length, length)
    attention = F.dropout(scores.softmax(-1), attention_dropout, training)
    x = (attention @ v).transpose(1, 2).flatten(2)
    x = F.dropout(F.linear(x, proj_weight, proj_bias), dropout, training)

    x = _join(x, padded, window)
    if sum(shift) > 0:
        x = torch.roll(x, shift, axes)
    for axis in range(count):
        if padded[axis] != sizes[axis]:
            x = x.narrow(1 + axis, 0, sizes[axis])
    return x.contiguous()


torch.fx.wrap("window_attention")


def _cut(x: Tensor, window: list[int]) -> Tensor:
    """Return (B, *sizes, C) cut into windows: (B * windows, positions, C)."""
    count, positions = len(window), 1
    split = [x.shape[0]]
    for axis in range(count):
        split += [x.shape[1 + axis] // window[axis], window[axis]]
        positions *= window[axis]
    order = [0]
    order += [2 * axis + 1 for axis in range(count)]
    order += [2 * axis + 2 for axis in range(count)]
    order += [2 * count + 1]
    return x.view(split + [x.shape[-1]]).permute(order).reshape(-1, positions, x.shape[-1])  # noqa: RUF005  # TorchScript


def _join(x: Tensor, sizes: list[int], window: list[int]) -> Tensor:
    """Return the inverse of `_cut`."""
    count, order = len(window), [0]
    for axis in range(count):
        order += [1 + axis, 1 + count + axis]
    counts = [sizes[axis] // window[axis] for axis in range(count)]
    x = x.view([-1] + counts + window + [x.shape[-1]])  # noqa: RUF005  # TorchScript takes no starred list
    return x.permute(order + [2 * count + 1]).reshape([-1] + sizes + [x.shape[-1]])  # noqa: RUF005


def _shift_mask(x: Tensor, padded: list[int], window: list[int], shift: list[int]) -> Tensor:
    """Return -100 between positions that are neighbors only by the cyclic shift, (windows, positions, positions)."""
    count = len(padded)
    regions = torch.zeros(padded, dtype=torch.long)
    for axis in range(count):
        size, win, moved = padded[axis], window[axis], shift[axis]
        part = torch.tensor([0] * (size - win) + [1] * (win - moved) + [2] * moved if moved > 0 else [0] * size)
        regions = regions * 3 + part.view([size if other == axis else 1 for other in range(count)])
    cut = _cut(regions[None, ..., None], window)[..., 0]  # (windows, positions)
    apart = cut[:, None] != cut[:, :, None]
    return torch.zeros(apart.shape, dtype=x.dtype, device=x.device).masked_fill(apart.to(x.device), -100.0)


@register_substitute("torchvision.models.swin_transformer.ShiftedWindowAttention")
class SizedWindowAttention(_Windowed, ShiftedWindowAttention):  # type: ignore[misc]
    """torchvision's `ShiftedWindowAttention`."""


@register_substitute("torchvision.models.video.swin_transformer.ShiftedWindowAttention3d")
class SizedWindowAttention3d(_Windowed, ShiftedWindowAttention3d):  # type: ignore[misc]
    """torchvision's `ShiftedWindowAttention3d`."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend within windows that are no larger than the input; they read their part of the position table."""
        window = window_within(x, self.window_size)
        return self._attend(x, self.get_relative_position_bias(window), window, None)


def window_within(x: Tensor, window: list[int]) -> list[int]:
    """Return a window's sizes, no larger than those of (B, *sizes, C)."""
    return [min(x.shape[1 + axis], window[axis]) for axis in range(len(window))]


torch.fx.wrap("window_within")


@register_substitute("torchvision.models.swin_transformer.ShiftedWindowAttentionV2")
class SizedWindowAttentionV2(_Windowed, ShiftedWindowAttentionV2):  # type: ignore[misc]
    """torchvision's `ShiftedWindowAttentionV2`: cosine attention with a learned scale for each head."""

    if TYPE_CHECKING:
        logit_scale: nn.Parameter

    def dense_scale(self) -> float:
        """Return 1: the scale is learned."""
        return 1.0

    def fits_original(self) -> bool:
        """Return whether input, heads and output are of one width."""
        return _of_one_width(self.qkv, self.proj)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within windows, by the angles between queries and keys."""
        return self._attend(x, self.get_relative_position_bias(), self.window_size, self.logit_scale)


@register_substitute("torchvision.models.maxvit.RelativePositionalMultiHeadAttention")
class SizedRelativeAttention(SizedAttention, RelativePositionalMultiHeadAttention):  # type: ignore[misc]
    """torchvision's `RelativePositionalMultiHeadAttention`, whose heads are as wide as the input.

    Input and output are (B, groups, positions, C).
    """

    heads = "n_heads"
    projection = "merge"
    if TYPE_CHECKING:
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
        return _of_one_width(self.to_qkv, self.merge)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each group."""
        b, groups, positions, _ = x.shape
        values = self.merge.weight.shape[1]
        keys = (self.to_qkv.weight.shape[0] - values) // 2
        q, k, v = self.to_qkv(x).split_with_sizes([keys, keys, values], -1)
        q = q.view(b, groups, positions, self.n_heads, -1).transpose(2, 3)
        k = k.view(b, groups, positions, self.n_heads, -1).transpose(2, 3)
        v = v.view(b, groups, positions, self.n_heads, -1).transpose(2, 3)
        scores = q @ (k * self.scale).transpose(-2, -1) + self.get_relative_positional_bias()
        return self.merge((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))  # type: ignore[no-any-return]

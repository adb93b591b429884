"""Attention written by hand."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Net
from net_registry import Case, case, tokens
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention with views; `sizes` are the numbers that the view fixes."""

    def __init__(self, heads: int, depth: int) -> None:
        super().__init__()
        self.view = (heads, depth)
        width = 12
        self.inner = nn.Linear(6, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)  # (N, L, 12)
        q, k, v = (part(x).view(*x.shape[:2], *self.view).transpose(1, 2) for part in (self.q, self.k, self.v))
        attention = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)  # (N, heads, L, L)
        return self.out(x + self.o((attention @ v).transpose(1, 2).flatten(2)))


@case("inner.weight", "q.weight")
def attention_with_any_number_of_heads() -> Case:
    return Attention(-1, 2), tokens()


@case("inner.weight", "q.weight")
def attention_with_any_depth() -> Case:
    return Attention(3, -1), tokens()


@case("inner.weight", "q.weight")
def attention_with_fixed_sizes() -> Case:
    return Attention(3, 4), tokens()


@case("q.weight")
def fused_attention() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for part in (net.q, net.k, net.v))
        return net.o(F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2))

    return Net(forward, q=nn.Linear(6, 12), k=nn.Linear(6, 12), v=nn.Linear(6, 12), o=nn.Linear(12, 4)), tokens()


@case("i.weight", "m.in_proj_weight", "m.out_proj.weight")
def attention_module() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.i(x)
        return net.o(net.m(y, y, y)[0])

    module = nn.MultiheadAttention(12, 3, batch_first=True)
    return Net(forward, i=nn.Linear(6, 12), m=module, o=nn.Linear(12, 4)), tokens()


@case()
def causal_mask_of_infinities() -> Case:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        scores = y @ y.transpose(1, 2)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return net.b(scores.masked_fill(mask, float("-inf")).softmax(-1) @ y)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 5)), tokens()


@case()
def mask_of_the_lowest_number_before_a_width() -> Case:
    """The largest number of a run says nothing of the size of the others."""

    def forward(net: Any, x: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        y = scores.masked_fill(net.mask, torch.finfo(scores.dtype).min).softmax(-1) @ net.a(x)
        return net.b(y / y.shape[-1] ** 0.5)

    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 5), mask=mask), tokens()


@case()
def factory_before_a_width() -> Case:
    """A tensor made by `torch.ones` must not put the trial out of step with the trace."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x) * torch.ones(1, dtype=x.dtype)
        return net.b(y / y.shape[-1] ** 0.5)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 5)), tokens()


@case("a.weight", "t.encoder.layers.0.linear1.weight", "t.decoder.layers.0.self_attn.in_proj_weight")
def transformer_that_compares_widths() -> Case:
    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.h(net.t(net.a(x), net.b(y)))  # type: ignore[no-any-return]

    whole = nn.Transformer(8, 2, 1, 1, dim_feedforward=6, dropout=0.0, batch_first=True)
    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(6, 8), t=whole, h=nn.Linear(8, 3)), (*tokens(), *tokens())


class Fixed(nn.Sequential):
    """Refuses another width than it was made for, which no attribute holds, before it calls its parts."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 8:
            raise RuntimeError("made for 8")
        return super().forward(x)  # type: ignore[no-any-return]


@case("1.0.weight")
def width_checked_before_any_operator() -> Case:
    inner = Fixed(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
    return nn.Sequential(nn.Linear(6, 8), inner, nn.Linear(8, 3)), tokens()


@case("q.weight", "v.weight")
def rotary_attention_by_halves() -> Case:
    """Halves of every head swapped by `chunk` and `cat`: heads stay free, the table of angles stays whole."""

    def turned(x: Tensor, table: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * table.cos() + torch.cat([-second, first], -1) * table.sin()

    def forward(net: Any, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for part in (net.q, net.k, net.v))
        scores = turned(q, net.table) @ turned(k, net.table).transpose(-2, -1)  # (N, heads, L, L)
        return net.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    parts = {"q": nn.Linear(6, 12), "k": nn.Linear(6, 12), "v": nn.Linear(6, 12), "o": nn.Linear(12, 4)}
    return Net(forward, **parts, table=torch.rand(5, 4)), tokens()


class PoolingAttention(nn.Module):
    """Heads are merged with the batch, so that one convolution pools the positions of each; the first stays apart."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.depth = 3, 4
        self.qkv, self.out = nn.Linear(6, 36), nn.Linear(12, 5)
        self.pool = nn.Conv1d(4, 4, 3, stride=2, padding=1, groups=4)
        self.norm = nn.LayerNorm(4)

    def pooled(self, x: Tensor) -> Tensor:
        first, rest = x.tensor_split((1,), 2)  # (N, heads, L, depth)
        rest = self.pool(rest.transpose(2, 3).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.norm(torch.cat([first, rest.transpose(2, 3)], 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.depth).transpose(1, 3).unbind(2)
        k, v = self.pooled(k), self.pooled(v)
        y = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


@case("qkv.weight")
def pooling_attention() -> Case:
    return PoolingAttention(), tokens()


class HeadsInTheBatch(nn.Module):
    """Values whose heads become part of the batch, as for `grid_sample`, with their width written as a quotient."""

    def __init__(self, heads: int = 3, width: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.inner, self.out = nn.Linear(6, width), nn.Linear(width, 3)
        self.v, self.o, self.gate = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        n, length, width = x.shape
        v = self.v(x).view(n, length, self.heads, width // self.heads).permute(0, 2, 3, 1)
        gate = self.gate(x).transpose(1, 2).reshape(n * self.heads, 1, length)
        v = v.reshape(n * self.heads, width // self.heads, length) * gate
        v = v.view(n, self.heads * (width // self.heads), length).transpose(1, 2)
        return self.out(x + self.o(v))


@case("inner.weight", "v.weight")
def heads_folded_into_the_batch() -> Case:
    return HeadsInTheBatch(), tokens()


def scaled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as a function of no module, whose scale is a number made of a width."""
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1) @ v


class OutsideOfMethods(Attention):
    """The same attention in functions, where no number can be kept as it is: whole heads may go."""

    def __init__(self, static: bool) -> None:
        super().__init__(3, 4)
        self.attend = self.attention if static else scaled_attention
        self.heads = 3

    @staticmethod
    def in_heads(x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = q.shape[-1]
        return (q @ k.transpose(-2, -1) * width**-0.5).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        q, k, v = (self.in_heads(part(x), self.heads) for part in (self.q, self.k, self.v))
        return self.out(x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2)))


@case("inner.weight", "q.weight")
def attention_in_static_methods() -> Case:
    return OutsideOfMethods(static=True), tokens()


@case("inner.weight", "q.weight")
def attention_in_a_function_of_no_module() -> Case:
    return OutsideOfMethods(static=False), tokens()

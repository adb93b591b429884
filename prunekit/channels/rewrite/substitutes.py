"""Attention modules whose Python fixes their sizes, and equivalents with explicit sizes: a closed list.

The model that is masked stays as it is. The trace follows the equivalents, which compute the same from the same
parameters, and a compact model has one wherever the original class cannot express the sizes that are left.

`nn.MultiheadAttention` with explicit sizes: heads, widths and scale need not follow from one another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.cut.model_copy import named_tensors
from prunekit.channels.labels import Labels

Heads = dict[str, tuple[str, int]]
"""Module path -> name of the substituted class, and the number of heads that are left."""


class SizedAttention(nn.Module):
    """What the equivalents have in common; each also is a subclass of the class it stands for.

    Attributes:
        heads: name of the attribute that holds the number of heads.
        projection: name of the linear layer behind the heads, whose input lies head by head.
        scale: what attention scores are multiplied by: that of the dense model, whatever is pruned.
    """

    heads = "num_heads"
    projection = "proj"
    scale: float

    def dense_scale(self) -> float:
        """Return the scale that the original computes from its dense sizes."""
        raise NotImplementedError

    def take_sizes(self) -> None:
        """Read all sizes but the number of heads off the tensors."""

    def fits_original(self) -> bool:
        """Return whether the original class can express the sizes, so that nothing need be substituted."""
        raise NotImplementedError


Class = TypeVar("Class", bound=type[SizedAttention])
SUBSTITUTES: dict[type[nn.Module], type[SizedAttention]] = {}


def substitutes() -> dict[type[nn.Module], type[SizedAttention]]:
    """Return the equivalent of each class that has one; those of torchvision's only where a model can hold them."""
    if "torchvision.models" in sys.modules:
        import_module("prunekit.models.window_attention")
    return SUBSTITUTES


def substitute(original: type[nn.Module]) -> Callable[[Class], Class]:
    """Register the equivalent of a class; of exactly that one, as a subclass may compute something else.

    Raises:
        ValueError: the class has an equivalent already.
    """

    def register(ours: Class) -> Class:
        if original in SUBSTITUTES:
            raise ValueError(f"{original.__name__} already has an equivalent: {SUBSTITUTES[original].__name__}")
        SUBSTITUTES[original] = ours
        return ours

    return register


def substitute_all(model: nn.Module) -> set[str]:
    """Put the equivalents in place of all their originals, in place; return where."""
    found = {path: module for path, module in model.named_modules() if type(module) in substitutes()}
    for module in found.values():
        ours = substitutes()[type(module)]
        module.__class__ = ours
        module.scale = module.dense_scale()
        module.take_sizes()
    return set(found)


def heads_of(model: nn.Module) -> Heads:
    """Return the number of heads of every attention module that has an equivalent or is one."""
    found = {}
    for path, module in model.named_modules():
        ours = _equivalent(module)
        if ours is not None:
            found[path] = (original_of(ours).__name__, int(getattr(module, ours.heads)))
    return found


def heads_left(model: nn.Module, kept: Mapping[str, tuple[Labels | None, ...]]) -> Heads:
    """Return how many heads each attention module of a dense model has left, wherever any of its sizes changes."""
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    result: Heads = {}
    for path, (name, heads) in heads_of(model).items():
        module: Any = model.get_submodule(path)
        if any(names[id(tensor)] in kept for _, tensor in named_tensors(module)):
            weight = module.get_submodule(_require(module).projection).weight
            columns = kept.get(names[id(weight)], (None, None))[1]
            left = heads if columns is None else len(np.unique(columns * heads // weight.shape[1]))
            result[path] = (name, left)
    return result


def _equivalent(module: nn.Module) -> type[SizedAttention] | None:
    return type(module) if isinstance(module, SizedAttention) else substitutes().get(type(module))


def _require(module: nn.Module) -> type[SizedAttention]:
    ours = _equivalent(module)
    assert ours is not None
    return ours


def original_of(ours: type[SizedAttention]) -> type[nn.Module]:
    """Return the class that an equivalent stands for."""
    return next(original for original, equivalent in SUBSTITUTES.items() if equivalent is ours)


def set_heads(model: nn.Module, heads: Heads) -> None:
    """Give attention modules, whose tensors are narrow already, their number of heads; substitutes where needed.

    Raises:
        KeyError: there is no such module at a path.
        ValueError: the tensors are not those of that many heads.
    """
    modules = dict(model.named_modules())
    for path, (name, count) in heads.items():
        module: Any = modules[path]
        ours = _equivalent(module)
        if ours is None or original_of(ours).__name__ != name:
            raise KeyError(path)
        columns = module.get_submodule(ours.projection).weight.shape[1]
        if count < 1 or columns % count:
            raise ValueError(f"{path}: {columns} columns of {ours.projection} are not those of {count} heads")
        _resize(module, ours, count)


def _resize(module: Any, ours: type[SizedAttention], heads: int) -> None:
    original = type(module)
    if original is not ours:
        module.__class__ = ours
        module.scale = module.dense_scale()
    setattr(module, ours.heads, heads)
    module.take_sizes()
    if original is not ours and module.fits_original():
        del module.scale
        module.__class__ = original


@substitute(nn.MultiheadAttention)
class SizedMultiheadAttention(SizedAttention, nn.MultiheadAttention):
    """`nn.MultiheadAttention` in which every size is its own; parameters, arguments and results are the same.

    The input projections hold `num_heads * head_dim` rows for queries and for keys and `num_heads * value_dim` for
    values, one after the other where they are packed; the output projection has `num_heads * value_dim` columns.
    """

    projection = "out_proj"
    value_dim: int

    def dense_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    def take_sizes(self) -> None:
        """Also turns torch's fast path off, which would read the projections as if they were of the original's size."""
        self.embed_dim = self.out_proj.weight.shape[0]
        values = self.out_proj.weight.shape[1]
        self.value_dim = values // self.num_heads
        if self.in_proj_weight is not None:
            self.head_dim = (self.in_proj_weight.shape[0] - values) // (2 * self.num_heads)
            self.kdim = self.vdim = self.in_proj_weight.shape[1]
        else:
            self.head_dim = self.q_proj_weight.shape[0] // self.num_heads
            self.kdim, self.vdim = self.k_proj_weight.shape[1], self.v_proj_weight.shape[1]
        self._qkv_same_embed_dim = False

    def fits_original(self) -> bool:
        """Return whether input, heads and output are of one width and the scale follows from it."""
        packed = self.in_proj_weight is not None
        queries = (self.in_proj_weight if packed else self.q_proj_weight).shape[1]
        width = self.num_heads * self.head_dim
        same = queries == width == self.embed_dim and self.value_dim == self.head_dim
        fits = same and self.scale == self.dense_scale()
        self._qkv_same_embed_dim = fits and packed
        return fits

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`; a 3-dimensional `attn_mask` has (batch * heads that are left) rows."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched, shared = query.dim() == 3, query is key and key is value
        if not batched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))  # (N, L, E)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        q, k, v = self._projected(query, key, value, shared=shared)
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.scale) @ k.transpose(-2, -1)  # (N, heads, L, S)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            heads = weights @ v
            weights = weights if batched else weights.squeeze(0)
            weights = weights.mean(-3) if average_attn_weights else weights
        else:
            causal = is_causal and key_padding_mask is None
            mask = None if causal else mask
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=self.scale)
        output = F.linear(heads.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return output.squeeze(0), weights
        return output if self.batch_first else output.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, *, shared: bool) -> list[Tensor]:
        """Queries, keys and values, (N, heads, length, width) each, with the learned and the zero key appended."""
        sizes = [self.num_heads * width for width in (self.head_dim, self.head_dim, self.value_dim)]
        if shared and self.in_proj_weight is not None:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).split_with_sizes(sizes, -1)
        else:
            packed = self.in_proj_weight
            weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = weights if packed is None else packed.split_with_sizes(sizes)
            biases: Sequence[Tensor | None] = (None,) * 3
            if self.in_proj_bias is not None:
                biases = self.in_proj_bias.split_with_sizes(sizes)
            q, k, v = (F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.repeat(len(x), 1, 1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return [x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2) for x in (q, k, v)]

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return what is added to the scores, broadcasting to (N, heads, L, S)."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            mask = mask.view(-1, self.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype)[:, None, None]
            mask = padding if mask is None else mask + padding
        appended = (self.bias_k is not None) + bool(self.add_zero_attn)
        return mask if mask is None or not appended else F.pad(mask, (0, appended))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where a boolean mask forbids; others are added as they are."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))

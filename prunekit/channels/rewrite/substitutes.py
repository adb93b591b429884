"""Substitutes: attention with explicit sizes in place of modules whose Python fixes how sizes follow from another.

A masked model is not changed. The trace follows the substitutes, which compute the same from the same parameters, and a
compact model has one wherever the original class cannot express its sizes. The one for `nn.MultiheadAttention` is here,
those of torchvision's window attention are in `prunekit.models.window_attention`.
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
"""Module path -> name of the original class, and the number of heads."""


class SizedAttention(nn.Module):
    """The base class of all substitutes; each is also a subclass of the class that it replaces.

    Attributes:
        heads: name of the attribute that holds the number of heads.
        projection: name of the linear layer behind the heads, which reads one head after the other.
        scale: the factor of attention scores, always that of the dense model.
    """

    heads = "num_heads"
    projection = "proj"
    scale: float

    def dense_scale(self) -> float:
        """Return the scale that the original class computes from its dense sizes."""
        raise NotImplementedError

    def take_sizes(self) -> None:
        """Set all sizes but the number of heads from the tensors."""

    def fits_original(self) -> bool:
        """Return whether the original class can express the sizes, so that no substitute is needed."""
        raise NotImplementedError


Class = TypeVar("Class", bound=type[SizedAttention])
SUBSTITUTES: dict[type[nn.Module], type[SizedAttention]] = {}


def substitutes() -> dict[type[nn.Module], type[SizedAttention]]:
    """Return all registered substitutes by the class that they replace.

    Those of torchvision's classes are imported only if torchvision is, as it is wherever a model uses these classes.
    """
    if "torchvision.models" in sys.modules:
        import_module("prunekit.models.window_attention")
    return SUBSTITUTES


def substitute(original: type[nn.Module]) -> Callable[[Class], Class]:
    """Register the substitute of exactly one class; a subclass of it may compute something else.

    Raises:
        ValueError: the class has a substitute already.
    """

    def register(ours: Class) -> Class:
        if original in SUBSTITUTES:
            raise ValueError(f"{original.__name__} already has a substitute: {SUBSTITUTES[original].__name__}")
        SUBSTITUTES[original] = ours
        return ours

    return register


def substitute_all(model: nn.Module) -> set[str]:
    """Put substitutes in place of all modules that have one, in place, and return their paths."""
    known = substitutes()
    found = {path: module for path, module in model.named_modules() if type(module) in known}
    for module in found.values():
        module.__class__ = known[type(module)]
        module.scale = module.dense_scale()
        module.take_sizes()
    return set(found)


def heads_of(model: nn.Module) -> Heads:
    """Return the number of heads of every attention module that has a substitute or is one."""
    found = {}
    for path, module in model.named_modules():
        ours = _substitute_of(module)
        if ours is not None:
            found[path] = (_original_of(ours).__name__, int(getattr(module, ours.heads)))
    return found


def heads_left(model: nn.Module, kept: Mapping[str, tuple[Labels | None, ...]]) -> Heads:
    """Return how many heads each attention module of a dense model keeps, for those with any size that changes."""
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    result: Heads = {}
    for path, (name, heads) in heads_of(model).items():
        module: Any = model.get_submodule(path)
        if any(names[id(tensor)] in kept for _, tensor in named_tensors(module)):
            weight = module.get_submodule(_substitute_of(module).projection).weight  # type: ignore[union-attr]
            columns = kept.get(names[id(weight)], (None, None))[1]
            left = heads if columns is None else len(np.unique(columns * heads // weight.shape[1]))
            result[path] = (name, left)
    return result


def _substitute_of(module: nn.Module) -> type[SizedAttention] | None:
    return type(module) if isinstance(module, SizedAttention) else substitutes().get(type(module))


def _original_of(ours: type[SizedAttention]) -> type[nn.Module]:
    """Return the class that a substitute replaces."""
    return next(original for original, known in SUBSTITUTES.items() if known is ours)


def set_heads(model: nn.Module, heads: Heads) -> None:
    """Set the number of heads of attention modules with narrow tensors, and substitute them if needed; in place.

    Raises:
        KeyError: there is no such module at a path.
        ValueError: the tensors do not fit that many heads.
    """
    modules = dict(model.named_modules())
    for path, (name, count) in heads.items():
        module: Any = modules[path]
        ours = _substitute_of(module)
        if ours is None or _original_of(ours).__name__ != name:
            raise KeyError(path)
        columns = module.get_submodule(ours.projection).weight.shape[1]
        if count < 1 or columns % count:
            raise ValueError(f"{path}: {columns} columns of {ours.projection} are not those of {count} heads")
        _set_head_count(module, ours, count)


def _set_head_count(module: Any, ours: type[SizedAttention], heads: int) -> None:
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
        """Return 1 / sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    def take_sizes(self) -> None:
        """Set all sizes but the number of heads; turn off torch's fast path, which assumes the original ones."""
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
        """Compute what `nn.MultiheadAttention.forward` does; a 3-d `attn_mask` has (batch * kept heads) rows."""
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
        """Return queries, keys and values, (N, heads, length, width) each, with the learned and zero keys appended."""
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
            k, v = (torch.cat([x, b.repeat(x.shape[0], 1, 1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return [x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2) for x in (q, k, v)]

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the mask that is added to the scores, broadcasting to (N, heads, L, S); None without one."""
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
    """Return a boolean mask as 0 and -inf; others as they are."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))

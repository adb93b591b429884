"""Substitutes: attention with explicit sizes in place of modules whose Python fixes how sizes follow from another.

A masked model is not changed. The trace follows the substitutes, which compute the same from the same parameters, and a
compact model has one wherever the original class cannot express its sizes. The one for `nn.MultiheadAttention` is here,
those of torchvision's window attention are in `prunekit.models.window_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from prunekit.channels.labels.label_union import Labels
from prunekit.channels.tracing.unrolled import unroll
from prunekit.errors import UsageError
from prunekit.hooks.model_copy import named_tensors, with_tensors
from prunekit.known_names import SUBSTITUTES

Heads = dict[str, tuple[str, int]]
"""Module path -> name of the original class, and the number of heads."""


class SizedAttention(nn.Module):
    """The base class of all substitutes; each is also a subclass of the class that it replaces."""

    heads = "num_heads"  # the attribute that holds the number of heads
    projection = "proj"  # the linear layer behind the heads, which reads one head after the other
    if TYPE_CHECKING:  # TorchScript does not understand annotations that are text
        scale: float  # of attention scores, always that of the dense model

    def dense_scale(self) -> float:
        """Return the scale that the original class computes from its dense sizes."""
        raise NotImplementedError

    def take_sizes(self) -> None:
        """Set all sizes but the number of heads from the tensors."""

    def fits_original(self) -> bool:
        """Return whether the original class can express the sizes, so that no substitute is needed."""
        raise NotImplementedError


Class = TypeVar("Class", bound=type[SizedAttention])


def register_substitute(original: str) -> Callable[[Class], Class]:
    """Register the substitute of exactly one class, given by its full name; a subclass may compute something else."""

    def register(ours: Class) -> Class:
        SUBSTITUTES.add(original, ours, ours)
        return ours

    return register


def accept(name: str, found: Any) -> type[SizedAttention]:
    """Return the class that an installed package registers as a substitute, or raise a `UsageError`."""
    if not (isinstance(found, type) and issubclass(found, SizedAttention)):
        raise UsageError(f"substitute {name!r}: expected a subclass of SizedAttention, got {found!r}")
    return found


def substitute_of(original: type) -> type[SizedAttention] | None:
    """Return the substitute of exactly this class, or None; that of a library's class is imported only now."""
    name = f"{original.__module__}.{original.__qualname__}"
    return SUBSTITUTES.get(name) if name in SUBSTITUTES.names else None


def substitute_all(model: nn.Module) -> set[str]:
    """Put substitutes in place of all modules that have one, in place, and return their paths."""
    known = {path: (module, substitute_of(type(module))) for path, module in model.named_modules()}
    found = {path: (module, ours) for path, (module, ours) in known.items() if ours is not None}
    for module, ours in found.values():
        module.__class__ = ours
        module.scale = module.dense_scale()
        module.take_sizes()
    return set(found)


def substituted_copy(model: nn.Module, own: Callable[[str], bool]) -> nn.Module:
    """Return a copy whose attention and recurrent layers call `F.linear`, with tensors of the model or its own."""
    tensors = {name: (tensor.detach(), own(name)) for name, tensor in named_tensors(model)}
    copy = with_tensors(model, {name: one.clone() if copied else one for name, (one, copied) in tensors.items()})
    substitute_all(copy)
    unroll(copy)
    return copy


def heads_of(model: nn.Module) -> Heads:
    """Return the number of heads of every attention module that has a substitute or is one."""
    modules = [(path, module, _substitute_of(module)) for path, module in model.named_modules()]
    return {path: (_original_of(cls).__name__, int(getattr(module, cls.heads))) for path, module, cls in modules if cls}


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
    return type(module) if isinstance(module, SizedAttention) else substitute_of(type(module))


def _original_of(ours: type[SizedAttention]) -> type[nn.Module]:
    """Return the class that a substitute replaces."""
    return next(base for base in ours.__mro__ if substitute_of(base) is ours)


def set_heads(model: nn.Module, heads: Heads) -> None:
    """Set the number of heads of attention modules with narrow tensors, and substitute them if needed; in place."""
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


@register_substitute("torch.nn.modules.activation.MultiheadAttention")
class SizedMultiheadAttention(SizedAttention, nn.MultiheadAttention):
    """`nn.MultiheadAttention` in which every size is its own; parameters, arguments and results are the same.

    The input projections hold `num_heads * head_dim` rows for queries and for keys and `num_heads * value_dim` for
    values, one after the other where they are packed; the output projection has `num_heads * value_dim` columns.
    """

    projection = "out_proj"
    if TYPE_CHECKING:
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
        return multi_head_attention(
            query,
            key,
            value,
            [self.num_heads * self.head_dim, self.num_heads * self.head_dim, self.num_heads * self.value_dim],
            self.num_heads,
            self.scale,
            self.in_proj_weight,
            self.q_proj_weight,
            self.k_proj_weight,
            self.v_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.out_proj.weight,
            self.out_proj.bias,
            self.batch_first,
            self.dropout if self.training else 0.0,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: list[int],
    num_heads: int,
    scale: float,
    packed: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    out_weight: Tensor,
    out_bias: Tensor | None,
    batch_first: bool,
    dropout: float,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and the weights of attention; one step to `torch.fx`, and Python that TorchScript compiles."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched, shared = query.dim() == 3, query is key and key is value
    if not batched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)  # (N, L, E)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
    elif not batch_first:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    if shared and packed is not None:
        q, k, v = F.linear(query, packed, in_bias).split_with_sizes(sizes, -1)
    else:
        if packed is not None:
            q_weight, k_weight, v_weight = packed.split_with_sizes(sizes)
        assert q_weight is not None
        assert k_weight is not None
        assert v_weight is not None
        q_bias: Tensor | None = None
        k_bias: Tensor | None = None
        v_bias: Tensor | None = None
        if in_bias is not None:
            q_bias, k_bias, v_bias = in_bias.split_with_sizes(sizes)
        q = F.linear(query, q_weight, q_bias)
        k = F.linear(key, k_weight, k_bias)
        v = F.linear(value, v_weight, v_bias)
    appended = 0
    if bias_k is not None and bias_v is not None:
        appended += 1
        k = torch.cat([k, bias_k.repeat(k.shape[0], 1, 1)], 1)
        v = torch.cat([v, bias_v.repeat(v.shape[0], 1, 1)], 1)
    if add_zero_attn:
        appended += 1
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    q, k, v = in_heads(q, num_heads), in_heads(k, num_heads), in_heads(v, num_heads)

    mask: Tensor | None = None  # is added to the scores, broadcasting to (N, heads, L, S)
    if attn_mask is not None:
        mask = _additive(attn_mask, q.dtype)
        if mask.dim() == 3:
            mask = mask.view(-1, num_heads, mask.shape[1], mask.shape[2])
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q.dtype)[:, None, None]
        mask = padding if mask is None else mask + padding
    if mask is not None and appended > 0:
        mask = F.pad(mask, (0, appended))

    weights: Tensor | None = None
    if need_weights:
        scores = (q * scale) @ k.transpose(-2, -1)  # (N, heads, L, S)
        if mask is not None:
            scores = scores + mask
        found = F.dropout(scores.softmax(-1), dropout)
        heads = found @ v
        if not batched:
            found = found.squeeze(0)
        weights = found.mean(-3) if average_attn_weights else found
    else:
        causal = is_causal and key_padding_mask is None
        if causal:
            mask = None
        heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale)
    output = F.linear(heads.transpose(1, 2).flatten(2), out_weight, out_bias)
    if not batched:
        output = output.squeeze(0)
    elif not batch_first:
        output = output.transpose(0, 1)
    return output, weights


torch.fx.wrap("multi_head_attention")


def in_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return (N, length, width) as (N, heads, length, width of a head)."""
    return x.view(x.shape[0], x.shape[1], num_heads, -1).transpose(1, 2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask as 0 and -inf; others as they are."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))

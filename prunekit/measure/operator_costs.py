"""Costs of a call of an operator, from its arguments and result: multiply-accumulates and bytes moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.utils.tensors import gather

aten = torch.ops.aten


def _grouped_product(left: Tensor, right: Tensor, *args: Any, **named: Any) -> int:
    """Count a product of matrices of which one is cut in parts, each for another matrix of a stack, as one product."""
    stacks = len(left) if left.dim() == right.dim() == 3 else 1
    return 2 * stacks * prod(left.shape[-2:]) * right.shape[-1]


_FLOPS = {
    aten._grouped_mm: _grouped_product,
    **flop_registry,
    aten._sparse_addmm: flop_registry[aten.addmm],
}


class FlopCounter(OperatorMode):
    """Counts FLOPs (two for each multiply-accumulate) by the rules of torch's `FlopCounterMode`.

    `FlopCounterMode` itself tracks modules by hooks on the gradient functions of their inputs. It fails on the view of
    a parameter, such as a class token, which requires a gradient under `no_grad` and has no such function; and it
    doesn't look into higher-order operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operator and add its FLOPs."""
        packet = func.overloadpacket
        out = run_operator(func, args, kwargs)
        if packet in _FLOPS:
            self.flops += int(_FLOPS[packet](*args, **kwargs, out_val=out))
        return out

    @property
    def macs(self) -> int:
        """Multiply-accumulates so far."""
        return self.flops // 2


def macs_of(operator: Any, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> int | None:
    """Return the multiply-accumulates of one call, by the rules of torch's `FlopCounterMode` and those below.

    0 for an operator that is no layer; None for one of attention or recurrence without a rule.
    """
    packet = operator.overloadpacket
    if packet in _FLOPS:
        return int(_FLOPS[packet](*args, **named, out_val=result)) // 2
    if packet in _RULES:
        return _RULES[packet](args)
    return None if any(part in packet.__name__ for part in ("attention", "encoder_layer", "lstm", "gru", "rnn")) else 0


def _scaled_dot_product(args: Sequence[Any]) -> int:
    """Count scores and values, for query (..., L, E), key (..., S, E) and value (..., S, F)."""
    query, key, value = args[:3]
    return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _fused_layer(args: Sequence[Any]) -> int:
    """Count an attention or encoder layer in one operator: its matrices on every token of (B, L, D), and scores."""
    batch, tokens, width = args[0].shape
    matrices = sum(part.numel() for part in args if isinstance(part, Tensor) and part.dim() == 2)
    return int(batch * tokens * (matrices + 2 * tokens * width))


_RULES: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _scaled_dot_product,
    aten._scaled_dot_product_attention_math_for_mps: _scaled_dot_product,
    aten._native_multi_head_attention: _fused_layer,
    aten._transformer_encoder_layer_fwd: _fused_layer,
}


def is_idle(operator: Any) -> bool:
    """Return whether an operator neither computes nor moves anything: a view, or memory that is not filled."""
    aliases = [value.alias_info for value in operator._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return is_view or operator.overloadpacket in _UNFILLED


_UNFILLED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


def bytes_moved(operator: Any, args: Any, named: Any, result: Any) -> int:
    """Return the bytes of all inputs, parameters and results, each counted once."""
    if is_idle(operator):
        return 0
    return sum(_bytes(tensor) for part in (args, named, result) for tensor in gather(part))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, without the repetitions along expanded axes."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return 0
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return int(prod(sizes) * tensor.element_size())


def subnormals(value: Any) -> int:
    """Return how many numbers of float32 or float64 in nested tensors are subnormal, below full precision."""
    found = 0
    for tensor in gather(value):
        if tensor.dtype in (torch.float32, torch.float64) and tensor.layout == torch.strided and not tensor.is_nested:
            found += int(is_subnormal(tensor).sum())
    return found


def is_subnormal(tensor: Tensor) -> Tensor:
    """Return bool, of the shape of a floating-point tensor: with which numbers processors compute slowly.

    None of float16 and smaller types: they are computed in float32, in which their smallest numbers are normal, or by
    units that are as fast with them. bfloat16 has the range of float32.
    """
    tiny = torch.finfo(tensor.dtype).tiny
    if tiny > torch.finfo(torch.float32).tiny:
        return torch.zeros_like(tensor, dtype=torch.bool)
    size = tensor.detach().abs()
    return (size > 0) & (size < tiny)

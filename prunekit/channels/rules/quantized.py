"""Parts of a model that quantization put there, which no rule follows: observers, fake quantization, whole numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

PRUNE_FIRST = "prune the model before it is prepared for quantization or quantized: observers and scales know its sizes"
_QUANTIZING = tuple(
    f"torch.ao.{name}"
    for name in (
        "quantization.observer",
        "quantization.fake_quantize",
        "nn.quantized",
        "nn.intrinsic.quantized",
        "nn.quantizable",
    )
)
"""Modules of Python whose classes quantize; stubs and fused layers of floats are elsewhere."""
_OPERATORS = ("quantize", "_obs_fq_helper", "quantized.")
"""Parts of names of operators that quantize, and of those that run on quantized tensors."""


def quantized_parts(model: nn.Module) -> frozenset[str]:
    """Return the paths of modules that observe or quantize, by the classes of `torch.ao` that they are made from."""
    return frozenset(path for path, module in model.named_modules() if _quantizes(type(module)))


def _quantizes(cls: type) -> bool:
    return any(base.__module__.startswith(_QUANTIZING) for base in cls.__mro__)


def is_quantizing(operator: str, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether an operator quantizes, or runs on quantized tensors."""
    return any(part in operator for part in _OPERATORS) or any(tensor.is_quantized for tensor in tensors)

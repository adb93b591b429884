"""Operators on meta tensors: shapes where torch's Python kernels take longest, and whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_UNARY = (
    "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "elu", "selu", "leaky_relu", "tanh", "sigmoid",
    "hardsigmoid", "softplus", "mish", "neg", "exp",
)  # fmt: skip


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if kwargs else _like(args[0])


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _like(args[0]), args[0].new_empty(0), args[0].new_empty(0)


SHORTCUTS: dict[str, Shortcut] = {
    **{f"aten.{name}": _same for name in (*_UNARY, "clone")},
    **{f"aten.{name}_": lambda args, kwargs: args[0] for name in _UNARY},
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten.native_batch_norm": lambda args, kwargs: NotImplemented if args[5] else _batch_norm(args, kwargs),
}
"""Operator -> a function that returns its output, or NotImplemented if torch must compute it."""


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the integers that a tensor holds or, on a meta device, would hold; None if unknown."""
    known: torch.Tensor = getattr(tensor, "_prunekit_numbers", tensor)
    unknown = known.is_meta or known.is_floating_point() or (known.numel() and not known.untyped_storage().nbytes())
    return None if unknown else known


def remember(tensor: torch.Tensor, known: torch.Tensor | None) -> None:
    """Remember the numbers of a tensor; where some written to it are unknown, those of all of its views are."""
    before = getattr(tensor, "_prunekit_numbers", None)
    if known is None and before is not None:
        before.untyped_storage().resize_(0)
    elif known is not None:
        tensor._prunekit_numbers = known  # type: ignore[attr-defined]

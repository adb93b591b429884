"""Output shapes of the commonest operators on meta tensors, without torch's slower Python kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_UNARY = (
    "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "elu", "selu", "leaky_relu", "tanh", "sigmoid",
    "hardsigmoid", "softplus", "mish", "neg", "exp", "clone",
)  # fmt: skip
_BINARY = ["add", "sub", "mul", "div"]


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.empty_like(args[0]) if not kwargs else NotImplemented


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _binary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[:2]
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return NotImplemented
    alike = left.shape == right.shape and left.dtype == right.dtype and left.stride() == right.stride()
    return torch.empty_like(left) if alike and left.is_floating_point() else NotImplemented


def _binary_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[:2]
    alike = isinstance(right, torch.Tensor) and left.shape == right.shape and left.dtype == right.dtype
    return left if alike else NotImplemented


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.empty_like(args[0]), args[0].new_empty(0), args[0].new_empty(0)


def _batch_norm_eval(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if args[5] else _batch_norm(args, kwargs)


Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]
SHORTCUTS: dict[str, Shortcut] = {
    **{f"aten.{name}": _same for name in _UNARY},
    **{f"aten.{name}_": _written for name in _UNARY if name != "clone"},
    **{f"aten.{name}": _binary for name in _BINARY},
    **{f"aten.{name}_": _binary_written for name in _BINARY},
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten.native_batch_norm": _batch_norm_eval,
}
"""Operator -> its output, or NotImplemented where torch must decide."""


def run_on_meta(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on meta tensors, by a shortcut where there is one and its case is the plain one."""
    shortcut = SHORTCUTS.get(name)
    if shortcut is not None and isinstance(args[0], torch.Tensor) and args[0].is_meta and args[0].is_floating_point():
        out = shortcut(args, kwargs)
        if out is not NotImplemented:
            return out
    return func(*args, **kwargs)

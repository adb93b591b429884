"""Operators on meta tensors: the shapes of the commonest without torch's slower Python kernels, and whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_UNARY = (
    "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "elu", "selu", "leaky_relu", "tanh", "sigmoid",
    "hardsigmoid", "softplus", "mish", "neg", "exp",
)  # fmt: skip
_BINARY = ("add", "sub", "mul", "div")


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if kwargs else _like(args[0])


def _binary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[:2]
    if not isinstance(right, torch.Tensor) or left.dtype != right.dtype or left.dim() != right.dim():
        return NotImplemented
    if left.shape == right.shape and left.stride() == right.stride():
        return _like(left)
    shape = [max(a, b) if 1 in (a, b) else a for a, b in zip(left.shape, right.shape, strict=True)]
    fits = all(b in (1, size) for b, size in zip(right.shape, shape, strict=True))
    return torch.empty(shape, dtype=left.dtype, device="meta") if fits else NotImplemented


def _binary_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = _binary(args, kwargs)
    return args[0] if out is not NotImplemented and out.shape == args[0].shape else NotImplemented


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _like(args[0]), args[0].new_empty(0), args[0].new_empty(0)


def _convolution(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, weight, _, stride, padding, dilation, transposed, _, groups = args
    spatial = source.dim() - 2
    plain = (
        not kwargs and not transposed and weight.dim() == source.dim() and source.shape[1] == weight.shape[1] * groups
    )
    if not plain or not all(len(values) in (1, spatial) for values in (stride, padding, dilation)):
        return NotImplemented
    sizes = []
    for axis in range(spatial):
        step, pad, spread = (v[axis if len(v) > 1 else 0] for v in (stride, padding, dilation))
        size = (source.shape[axis + 2] + 2 * pad - spread * (weight.shape[axis + 2] - 1) - 1) // step + 1
        if size < 1:
            return NotImplemented
        sizes.append(size)
    return torch.empty((source.shape[0], weight.shape[0], *sizes), dtype=source.dtype, device="meta")


def _layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, shape = args[:2]
    leading = source.dim() - len(shape)
    if not source.is_contiguous() or list(source.shape[leading:]) != list(shape):
        return NotImplemented
    moments = (*source.shape[:leading], *[1] * len(shape))
    return _like(source), source.new_empty(moments), source.new_empty(moments)


def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, left, right = args
    fits = not kwargs and left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]
    if not fits or bias.shape != right.shape[1:] or not bias.dtype == left.dtype == right.dtype:
        return NotImplemented
    return left.new_empty((left.shape[0], right.shape[1]))


def _safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if kwargs or len(args) > 2 or not args[0].is_contiguous() else _like(args[0])


SHORTCUTS: dict[str, Shortcut] = {
    **{f"aten.{name}": _same for name in (*_UNARY, "clone")},
    **{f"aten.{name}_": lambda args, kwargs: args[0] for name in _UNARY},
    **{f"aten.{name}": _binary for name in _BINARY},
    **{f"aten.{name}_": _binary_written for name in _BINARY},
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten.native_batch_norm": lambda args, kwargs: NotImplemented if args[5] else _batch_norm(args, kwargs),
    "aten.convolution": _convolution,
    "aten.native_layer_norm": _layer_norm,
    "aten.addmm": _addmm,
    "aten._safe_softmax": _safe_softmax,
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

"""Operators on meta tensors: the shapes of the commonest without torch's slower Python kernels, and whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from prunekit.channels.tracing.operator_mode import OperatorMode, run_operator
from prunekit.utils.tensors import gather, map_tensors

_UNARY = (
    "relu", "relu6", "hardtanh", "hardswish", "silu", "gelu", "elu", "selu", "leaky_relu", "tanh", "sigmoid",
    "hardsigmoid", "softplus", "mish", "neg", "exp", "clone",
)  # fmt: skip


_BINARY = ["add", "sub", "mul", "div"]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _same(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if kwargs else _like(args[0])


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


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


def _batch_norm_eval(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented if args[5] else _batch_norm(args, kwargs)


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


Shortcut = Callable[[tuple[Any, ...], dict[str, Any]], Any]


SHORTCUTS: dict[str, Shortcut] = {
    **{f"aten.{name}": _same for name in _UNARY},
    **{f"aten.{name}_": _written for name in _UNARY if name != "clone"},
    **{f"aten.{name}": _binary for name in _BINARY},
    **{f"aten.{name}_": _binary_written for name in _BINARY},
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten.native_batch_norm": _batch_norm_eval,
    "aten.convolution": _convolution,
    "aten.native_layer_norm": _layer_norm,
    "aten.addmm": _addmm,
    "aten._safe_softmax": _safe_softmax,
}
"""Operator -> a function that returns its output, or NotImplemented if torch must compute it."""


class OnMeta(OperatorMode):
    """Runs all operators as a trace does, on meta tensors and on others."""

    def operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return run_on_meta(func, str(func._schema.name).replace("::", "."), args, kwargs)


def run_on_meta(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on meta tensors, by a shortcut if there is one for this case.

    Integers and booleans that depend on no floating-point number, such as positions and attention masks, are computed
    as well, so that code may look at them; see `numbers_in`.
    """
    shortcut = SHORTCUTS.get(name)
    if shortcut is not None and isinstance(args[0], torch.Tensor) and args[0].is_meta and args[0].is_floating_point():
        out = shortcut(args, kwargs)
        if out is not NotImplemented:
            return out
    if _depends_on_numbers(func) and any(tensor.is_meta for tensor in gather((args, kwargs))):
        found = _with_numbers(func, args, kwargs)
        if found is not None:
            return map_tensors(found, _on_meta)
    out = run_operator(func, args, kwargs)
    whole = [tensor for tensor in gather(out) if tensor.is_meta and not tensor.is_floating_point()]
    if whole:
        found = _with_numbers(func, args, kwargs)
        numbers = iter([one for one in gather(found) if not one.is_floating_point()])
        for tensor in whole:
            _remember(tensor, next(numbers, None))
    elif func._schema.is_mutable and not func._schema.returns:  # written to without being returned
        for tensor in gather((args, kwargs)):
            _remember(tensor, None)
    return out


def numbers_in(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the integers that a tensor holds or, on a meta device, would hold; None if unknown."""
    known: torch.Tensor = getattr(tensor, "_prunekit_numbers", tensor)
    unknown = known.is_meta or known.is_floating_point() or (known.numel() and not known.untyped_storage().nbytes())
    return None if unknown else known


def _remember(tensor: torch.Tensor, known: torch.Tensor | None) -> None:
    """Remember the numbers of a tensor; where some written to it are unknown, those of all of its views are."""
    before = getattr(tensor, "_prunekit_numbers", None)
    if known is None and before is not None:
        before.untyped_storage().resize_(0)
    elif known is not None:
        tensor._prunekit_numbers = known  # type: ignore[attr-defined]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device, which remembers its numbers."""
    found = tensor.to("meta")
    _remember(found, None if tensor.is_floating_point() else tensor)
    return found


def _depends_on_numbers(func: Any) -> bool:
    """Return whether an operator returns a number, or tensors whose size depends on numbers."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator on the numbers that tensors hold; None if some are unknown, or are floats."""
    given = gather((args, kwargs))
    if torch.Tag.nondeterministic_seeded in func.tags or any(numbers_in(tensor) is None for tensor in given):
        return None
    args, kwargs = map_tensors((args, kwargs), lambda tensor: numbers_in(tensor).cpu())  # type: ignore[union-attr]
    kwargs = {key: "cpu" if key == "device" and value is not None else value for key, value in kwargs.items()}
    return run_operator(func, args, kwargs)

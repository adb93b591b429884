"""Convolutions and matrix products that a model ran, to be run again on their own at other widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Widths = tuple[int, int]
"""Input channels and output channels."""
Run = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """An operator with a weight.

    Attributes:
        widths: as it ran.
        tied: whether its input and output channels are the same ones, as in a depthwise convolution.
        build: makes the operator with random tensors, at other widths; calling the result runs it once.
    """

    widths: Widths
    tied: bool
    build: Callable[[Widths], Run]


def layer_of(operator: Any, args: Sequence[Any]) -> Layer | None:
    """The layer that a call of an operator is; None for one that cannot have other widths by itself."""
    rule = _RULES.get(operator.overloadpacket)
    return None if rule is None else rule(args)


def _convolution(args: Sequence[Any]) -> Layer | None:
    inputs, weight, bias, *settings, transposed, padding, groups = args
    depthwise = groups == inputs.shape[1] == weight.shape[0]
    if transposed or (groups > 1 and not depthwise):
        return None
    like, kernel, form = _like(inputs), tuple(weight.shape[2:]), _form(inputs)
    batch, pixels, biased = inputs.shape[0], tuple(inputs.shape[2:]), bias is not None

    def build(widths: Widths) -> Run:
        into, out = widths
        x = torch.randn(batch, into, *pixels, **like).to(memory_format=form)
        w = torch.randn(out, 1 if depthwise else into, *kernel, **like).to(memory_format=form)
        b = torch.randn(out, **like) if biased else None
        return lambda: aten.convolution(x, w, b, *settings, False, padding, into if depthwise else 1)

    return Layer((inputs.shape[1], weight.shape[0]), depthwise, build)


def _with_bias(args: Sequence[Any]) -> Layer | None:
    return _product(args[1], args[2], biased=True)


def _without_bias(args: Sequence[Any]) -> Layer | None:
    return _product(args[0], args[1], biased=False)


def _product(inputs: Tensor, matrix: Tensor, *, biased: bool) -> Layer | None:
    """(N, in) by (in, out), the matrix as a linear layer has it: the transpose of a contiguous weight."""
    rows, like = inputs.shape[0], _like(inputs)

    def build(widths: Widths) -> Run:
        into, out = widths
        x, w = torch.randn(rows, into, **like), torch.randn(out, into, **like).t()
        b = torch.randn(out, **like)
        return (lambda: torch.addmm(b, x, w)) if biased else (lambda: torch.mm(x, w))

    return Layer((matrix.shape[0], matrix.shape[1]), False, build)


_RULES: dict[Any, Callable[[Sequence[Any]], Layer | None]] = {
    aten.convolution: _convolution,
    aten.addmm: _with_bias,
    aten.mm: _without_bias,
}


def _like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def _form(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not tensor.is_contiguous() else torch.contiguous_format

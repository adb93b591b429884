"""How much a model's output makes of an error in one of its layers, measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.calibration.judging import Judge, Spread
from prunekit.calibration.layers import Layer
from prunekit.calibration.patch_stats import LayerMoments, PatchStats
from prunekit.channels.copying import named_tensors, with_tensors
from prunekit.context import training_mode
from prunekit.inputs import arguments, counted_positions
from prunekit.progress import tracked

RIDGE = 1e-3
"""Added to the diagonal of a Gram matrix, as a share of its mean: dead channels have nothing there."""


def with_gains(model: nn.Module, stats: PatchStats, inputs: Any) -> PatchStats:
    """Measures what errors in each layer do to the model's output.

    Every second input channel of a layer goes, the others take over what they can by least squares, and the model runs:
    the gain is the mean squared change of what it returns, see `Judge`, over the error that the Gram matrix tells for
    the layer, each output over its variance; relative to the median of all layers. Errors of some layers are averaged
    away later, by pooling above all, and others grow.

    Args:
        model: the dense model; only read.
        stats: of that model.
        inputs: (B, ...), as `arguments` takes them, for as many forward passes as there are layers, and one.

    Returns:
        The statistics with `output_gain` filled in: 1 where a layer has nothing to measure.
    """
    copy = with_tensors(model, {name: tensor.detach().clone() for name, tensor in named_tensors(model)})
    tensors, modules = dict(named_tensors(copy)), dict(copy.named_modules())
    with training_mode(copy, False), torch.no_grad():
        given = arguments(model, inputs)
        judge, counted = Judge.of(copy, given), counted_positions(copy, given)
        run = partial(judge.values, copy, given, counted)
        dense = run()
        layers = tracked(stats.layers, "gains", unit="layer")
        gains = [_gain(moments, tensors, modules, run, dense) for moments in layers]
    known = [gain for gain in gains if gain is not None]
    usual = median(known) if known else 1.0
    relative = [1.0 if gain is None else gain / usual for gain in gains]
    return PatchStats(tuple(replace(each, output_gain=gain) for each, gain in zip(stats.layers, relative, strict=True)))


def _gain(
    moments: LayerMoments,
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    run: Callable[[], list[tuple[int | str, Tensor]]],
    dense: list[tuple[int | str, Tensor]],
) -> float | None:
    layer = moments.layer
    weight, shift = layer.matrix(tensors[layer.weight]), _shifted(layer, tensors, modules)
    halved, bias, errors = _halved(moments, weight.double(), biased=shift is not None)
    error = float((errors * relative_scale(moments, modules).square()).sum())
    saved = (weight.clone(), None if shift is None else shift[0].clone())
    weight.copy_(halved)
    if shift is not None:
        shift[0].add_(shift[1] * bias)
    got = run()
    weight.copy_(saved[0])
    if shift is not None and saved[1] is not None:
        shift[0].copy_(saved[1])
    if not error > 0 or [value.shape for _, value in got] != [value.shape for _, value in dense]:
        return None
    spread = Spread()
    for (key, want), (_, value) in zip(dense, got, strict=True):
        spread.add(key, want, value)
    shares = list(spread.shares(0.0))
    gain = sum(shares) / len(shares) / error if shares else 0.0
    return gain if 0 < gain < float("inf") else None


def _shifted(
    layer: Layer, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[Tensor, float] | None:
    """What is changed to add a constant to a layer's output, and its sign; None where there is nothing."""
    if layer.bias is not None:
        return tensors[layer.bias], 1.0
    if layer.norm is not None:
        return modules[layer.norm].running_mean, -1.0  # type: ignore[return-value]
    return None


def _halved(moments: LayerMoments, weight: Tensor, *, biased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A weight without its odd input channels, what is to be added to the bias, and the errors of the outputs.

    Args:
        weight: (o, C, ...) in float64.
        biased: whether there is a bias.

    Returns:
        (o, C, ...), (o,) and (o,), mean squared.
    """
    deep = weight.flatten(2) if weight.dim() > 2 else weight[:, :, None]  # (o, C, taps)
    parts = [
        _halved_group(rows, matrix.double(), each_tap=moments.taps == 1, biased=biased)
        for matrix, rows in zip(moments.grams, deep.chunk(len(moments.grams)), strict=True)
    ]
    halved, bias, errors = (torch.cat([part[i] for part in parts]) for i in range(3))
    return halved.reshape(weight.shape), bias, errors


def _halved_group(rows: Tensor, matrix: Tensor, *, each_tap: bool, biased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `_halved`, of (o, C, taps); without the taps' own statistics each of them is a layer of its own."""
    outputs, channels, taps = rows.shape
    flat = rows.transpose(1, 2).flatten(0, 1) if each_tap else rows.flatten(1)
    kept = torch.arange(flat.shape[1], device=rows.device) // (flat.shape[1] // channels) % 2 == 0
    change = _taken_over(flat, matrix, kept, biased=biased)
    errors = ((change @ matrix) * change).sum(1).clamp(min=0)
    halved = flat + change[:, :-1]
    halved = halved.view(outputs, taps, channels).transpose(1, 2) if each_tap else halved.view_as(rows)
    return halved, change[:, -1].view(outputs, -1).sum(1), errors.view(outputs, -1).sum(1)


def _taken_over(flat: Tensor, matrix: Tensor, kept: Tensor, *, biased: bool) -> Tensor:
    """(r, d + 1) change of a weight, and of its bias, that leaves only some columns: by least squares."""
    left = torch.cat([kept, kept.new_full((1,), biased)])
    gone = torch.cat([~kept, kept.new_zeros(1)])
    solved = torch.linalg.solve(with_ridge(matrix)[left][:, left], matrix[left][:, gone])  # (kept, gone)
    change = torch.zeros(len(flat), len(matrix), dtype=flat.dtype, device=flat.device)
    change[:, gone] = -flat[:, ~kept]
    change[:, left] = flat[:, ~kept] @ solved.T
    return change


def with_ridge(matrix: Tensor) -> Tensor:
    """A Gram matrix with its ridge, which is not on the constant column, the last."""
    ridge = torch.full_like(matrix[0], RIDGE * float(matrix.diagonal()[:-1].mean()) or 1.0)
    ridge[-1] = 0
    return matrix + torch.diag(ridge)


def relative_scale(moments: LayerMoments, modules: Mapping[str, nn.Module]) -> Tensor:
    """(o,) what a layer's output is multiplied by up to the end of its chain, over its standard deviation there."""
    scale = moments.variance.clamp(min=1e-12 * float(moments.variance.max()) or 1.0).rsqrt()
    if moments.layer.gain is not None and moments.layer.end == "sum":
        scale = scale * moments.layer.gain
    if moments.layer.norm is None:
        return scale
    norm = modules[moments.layer.norm]
    factor = (norm.running_var.double() + norm.eps).rsqrt()  # type: ignore[operator]
    return scale * (factor if norm.weight is None else factor * norm.weight.detach().double())  # type: ignore[operator]

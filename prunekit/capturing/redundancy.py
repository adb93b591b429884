"""Redundant channels: those of a layer that say the same as another one, on the data or by their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.calibration.layer_stats import FloatArray
from prunekit.capturing.correlations import Products
from prunekit.capturing.layers import attention_weights, weight_of
from prunekit.errors import UsageError

ENOUGH = 32
"""Positions: of fewer, channels that have nothing to do with each other may seem to."""


@dataclass(frozen=True)
class Redundant:
    """A channel that says the same as an earlier one of its layer.

    Attributes:
        layer: path of the module that makes both.
        channel, like: their numbers, from 0.
        correlation: of what they return on the data; None where one of them is constant, or too little was seen.
        cosine: of their weights without the bias; None where they read different channels.
    """

    layer: str
    channel: int
    like: int
    correlation: float | None
    cosine: float | None


def redundant(model: nn.Module, products: Iterable[Products], threshold: float = 0.99) -> list[Redundant]:
    """Channels that an earlier one of the same layer can stand for, as far as a linear reader is concerned.

    Two are alike if the correlation of what they return, or the cosine of their weights, is at least `threshold` in
    size; one that is alike to several is listed once, with that of those left which is closest to it. Where nothing is
    listed, no two channels of the layers that `products` tells of are alike.

    Args:
        model: whose layers were seen.
        products: see `CorrelationCollector`.
        threshold: 0..1.

    Raises:
        UsageError: the threshold is not between 0 and 1.
    """
    if not 0 < threshold <= 1:
        raise UsageError(f"threshold: expected a size of correlations, above 0 and up to 1, got {threshold}")
    modules, weights = dict(model.named_modules()), attention_weights(model)
    found = []
    for seen in products:
        correlation = seen.correlation if seen.sums.count >= ENOUGH else np.full((len(seen.shift),) * 2, np.nan)
        if seen.layer in weights:
            part = weights[seen.layer][seen.first : seen.first + len(correlation)]
            cosine = _cosines(part.detach().cpu().double().flatten(1), 1)
        else:
            cosine = weight_cosines(modules[seen.layer])
        found += _of_layer(seen, correlation, cosine, threshold - 1e-6)
    return found


def _of_layer(seen: Products, correlation: FloatArray, cosine: FloatArray, threshold: float) -> list[Redundant]:
    # fmax: a NaN on one side leaves the other.
    alike = np.fmax(np.abs(correlation), np.abs(cosine))
    alike = np.nan_to_num(alike, nan=0.0)
    left = np.ones(len(alike), bool)
    found = []
    for channel in range(1, len(alike)):
        before = np.where(left[:channel], alike[:channel, channel], 0.0)
        like = int(before.argmax())
        if before[like] >= threshold:
            left[channel] = False
            pair = _number(correlation[like, channel]), _number(cosine[like, channel])
            found.append(Redundant(seen.layer, seen.first + channel, seen.first + like, *pair))
    return found


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def weight_cosines(module: nn.Module) -> FloatArray:
    """(C, C) Cosines of the weights of each two channels that a layer makes; NaN between groups, and of zeros."""
    weight = weight_of(module).cpu().double()
    groups = int(getattr(module, "groups", 1))
    if getattr(module, "transposed", False):  # (in, out / groups, ...)
        weight = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    return _cosines(weight.flatten(1), groups)


def _cosines(rows: Tensor, groups: int) -> FloatArray:
    rows = rows / rows.norm(dim=1, keepdim=True)  # NaN where all are zero
    group = torch.arange(len(rows)) * groups // len(rows)
    found: FloatArray = torch.where(group[:, None] == group, rows @ rows.T, torch.nan).numpy()
    return found

"""Redundant channels, which an earlier channel of their layer can replace, and the correlations that show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.inspection.capture.layer_hooks import LayerHooks, TensorKey, attention_weights, channels_of, weight_of
from prunekit.inspection.capture.recorder import SHARE, mib
from prunekit.statistics.layer_stats import FloatArray
from prunekit.utils.private_torch import without_torch_function

CONSTANT = 1e-5
"""A standard deviation below this share of the mean is taken for rounding."""
ENOUGH = 32
"""Positions that a correlation needs: with fewer, unrelated channels may seem alike."""


@dataclass(frozen=True)
class RedundantChannel:
    """A channel that an earlier channel of its layer can replace."""

    layer: str  # path of the module
    # channel, like: numbers of the channel and of the earlier one, from 0
    channel: int
    like: int
    # correlation of their outputs on the data; None if one is constant, or there is too little data
    correlation: float | None
    cosine: float | None  # cosine of their weights, without biases; None if they read different channels


def redundant_channels(
    model: nn.Module, correlations: Iterable[ChannelCorrelations], threshold: float = 0.99
) -> list[RedundantChannel]:
    """Return the channels that an earlier channel of the same layer can replace for a linear reader.

    Two are alike if the correlation of their outputs, or the cosine of their weights, is at least `threshold` in size.
    A channel that is like several others is listed once, with the closest of those that are not listed themselves.
    """
    if not 0 < threshold <= 1:
        raise UsageError(f"threshold: expected a size of correlations, above 0 and up to 1, got {threshold}")
    modules, weights = dict(model.named_modules()), attention_weights(model)
    found = []
    for layer in correlations:
        correlation = layer.correlation if layer.sums.count >= ENOUGH else np.full((len(layer.shift),) * 2, np.nan)
        if layer.layer in weights:
            part = weights[layer.layer][layer.first : layer.first + len(correlation)]
            cosine = _cosines(part.detach().cpu().double().flatten(1), 1)
        else:
            cosine = weight_cosines(modules[layer.layer])
        found += _of_layer(layer, correlation, cosine, threshold - 1e-6)
    return found


def _of_layer(
    layer: ChannelCorrelations, correlation: FloatArray, cosine: FloatArray, threshold: float
) -> list[RedundantChannel]:
    # fmax: a NaN on one side leaves the other.
    alike = np.nan_to_num(np.fmax(np.abs(correlation), np.abs(cosine)), nan=0.0)
    left = np.ones(len(alike), bool)
    found = []
    for channel in range(1, len(alike)):
        before = np.where(left[:channel], alike[:channel, channel], 0.0)
        like = int(before.argmax())
        if before[like] >= threshold:
            left[channel] = False
            both = correlation[like, channel], cosine[like, channel]
            known = (float(one) if np.isfinite(one) else None for one in both)
            found.append(RedundantChannel(layer.layer, layer.first + channel, layer.first + like, *known))
    return found


def weight_cosines(module: nn.Module) -> FloatArray:
    """Return cosines of the weights of every two output channels, (C, C); NaN between groups, and for zeros."""
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


class CorrelationCollector(LayerHooks):
    """Collects correlations between the output channels of every convolution and linear layer while a model runs.

    So for projections of attention, even if their modules are not called; three that are packed into one weight are
    `*.in_proj_weight`, with the channels of queries, keys and values in this order. A layer of C channels takes twice
    C x C numbers of 8 bytes. Each call counts with at most so many `positions`, evenly spread.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str] | None = None, *, positions: int = 4096) -> None:
        self._rows = {path: len(weight) for path, weight in attention_weights(model).items()}
        widths = channels_of(model)
        chosen = {path: widths[path] for path in (widths if paths is None else paths)}
        needed = 16 * sum(width**2 for width in chosen.values())
        free = int(psutil.virtual_memory().available)
        if needed > SHARE * free:
            widest = max(chosen, key=chosen.__getitem__)
            raise UsageError(
                f"correlations of {len(chosen)} layers take {mib(needed)}, and {mib(free)} of memory are free, half of "
                f"which may be taken; choose fewer layers, or narrower ones: the widest is {widest}"
            )
        super().__init__(model, list(chosen), "output")
        self._positions = positions
        self._found: dict[tuple[str, int], ChannelCorrelations] = {}
        self._pass: dict[tuple[str, int], ChannelCorrelations] = {}
        self._used: Counter[str] = Counter()

    def start_pass(self) -> None:
        """Start a pass, and forget one that raised."""
        super().start_pass()
        self._pass.clear()
        self._used.clear()

    def finish_pass(self) -> None:
        """Add the sums of the finished pass."""
        self._found |= self._pass

    def on_tensor(self, key: TensorKey, values: Tensor, axis: int) -> None:
        """Add the output of a layer."""
        if key.batch is None or values.dim() < 2:
            return
        with without_torch_function(), torch.no_grad():
            rows = values.detach().movedim(axis, -1)
            rows = rows.reshape(-1, rows.shape[-1])  # (positions, C)
            if len(rows) > self._positions:
                rows = rows[:: (len(rows) // self._positions) | 1]  # odd, so that it does not hit only some columns
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            self._add(key.path, self._first(key.path, rows.shape[1]), rows)

    def _first(self, path: str, channels: int) -> int:
        """Return the first row of the part of a weight that the current call uses."""
        whole = self._rows.get(path, channels)
        first = self._used[path] % whole
        self._used[path] += channels
        return first

    def _add(self, path: str, first: int, rows: Tensor) -> None:
        key = path, first
        known = self._pass.get(key) or self._found.get(key)
        shift = rows.mean(0) if known is None else torch.from_numpy(known.shift).to(rows)
        rows = rows - shift
        origin, total, products = (part.cpu().double().numpy() for part in (shift, rows.sum(0), rows.T @ rows))
        seen = ChannelProducts(len(rows), total, products)
        self._pass[key] = (
            ChannelCorrelations(path, first, origin, seen)
            if known is None
            else replace(known, sums=known.sums.merge(seen))
        )

    def correlations(self) -> list[ChannelCorrelations]:
        """Return the correlations of each layer that ran, in order of execution."""
        self.require_passes()
        return list(self._found.values())


@dataclass(frozen=True, eq=False)
class ChannelProducts:
    """Sums of channels over `count` positions, and of their products with each other."""

    count: int
    total: FloatArray  # (channels,)
    products: FloatArray  # (channels, channels)

    @property
    def mean(self) -> FloatArray:
        """Mean of each channel, (channels,)."""
        return self.total / max(self.count, 1)

    @property
    def covariance(self) -> FloatArray:
        """Population covariance (divided by `count`), (channels, channels)."""
        return self.products / max(self.count, 1) - self.mean[:, None] * self.mean[None, :]

    def merge(self, other: ChannelProducts) -> ChannelProducts:
        """Return the sums of both together, of the same channels."""
        count, total = self.count + other.count, self.total + other.total
        return ChannelProducts(count, total, self.products + other.products)


@dataclass(frozen=True, eq=False)
class ChannelCorrelations:
    """Correlations between the output channels of a layer, over all samples, positions and calls."""

    layer: str  # path of the layer
    first: int  # number of its first channel, which is not 0 for later parts of a weight
    shift: FloatArray  # (C,) about the mean, subtracted before summing to keep digits
    sums: ChannelProducts  # moments of the output less the shift

    @property
    def _moments(self) -> tuple[FloatArray, FloatArray]:
        """Covariances (C, C), and variances (C,), NaN for a channel that is constant or was not finite."""
        with np.errstate(invalid="ignore"):
            covariance = self.sums.covariance
            variance = covariance.diagonal()
            floor = (CONSTANT * (self.shift + self.sums.mean)) ** 2
            return covariance, np.where(variance > floor, variance, np.nan)

    @property
    def correlation(self) -> FloatArray:
        """Pearson correlations (C, C), NaN for a channel that is constant or was not finite."""
        covariance, variance = self._moments
        with np.errstate(invalid="ignore"):
            scale = np.sqrt(variance)
            found: FloatArray = np.clip(covariance / np.outer(scale, scale), -1, 1)
        return found

    @property
    def constant(self) -> list[int]:
        """Channels that never changed."""
        finite = np.isfinite(self.sums.products.diagonal())
        return [self.first + int(one) for one in np.flatnonzero(np.isnan(self._moments[1]) & finite)]

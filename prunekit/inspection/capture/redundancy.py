"""Redundant channels: those of a layer that say the same as another one, on the data or by their weights.

How the channels of a layer go together on the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from prunekit.errors import UsageError
from prunekit.inspection.capture.layer_hooks import LayerHooks, Where
from prunekit.inspection.capture.layer_selection import attention_weights, channels_of, weight_of
from prunekit.inspection.capture.storage import SHARE, mib
from prunekit.statistics.layer_stats import FloatArray
from prunekit.statistics.moments import InputMoments

CONSTANT = 1e-5
"""A standard deviation below this share of the mean is rounding."""


@dataclass(frozen=True, eq=False)
class Products:
    """Second moments of what a layer returns, over all samples, places and calls.

    Attributes:
        layer: its path.
        first: number of its first channel: not 0 for the later parts of a weight that is used in parts.
        shift: (C,) about the mean; subtracted before the sums, which would lose digits without.
        sums: of what was returned, less the shift.
    """

    layer: str
    first: int
    shift: FloatArray
    sums: InputMoments

    @property
    def _moments(self) -> tuple[FloatArray, FloatArray]:
        """(C, C) covariances, and (C,) variances, NaN where a channel is constant or was not finite."""
        with np.errstate(invalid="ignore"):
            covariance = self.sums.covariance
            variance = covariance.diagonal()
            floor = (CONSTANT * (self.shift + self.sums.mean)) ** 2
            return covariance, np.where(variance > floor, variance, np.nan)

    @property
    def correlation(self) -> FloatArray:
        """(C, C) Pearson correlations, NaN where a channel is constant or was not finite."""
        covariance, variance = self._moments
        with np.errstate(invalid="ignore"):
            scale = np.sqrt(variance)
            found: FloatArray = np.clip(covariance / np.outer(scale, scale), -1, 1)
        return found

    @property
    def constant(self) -> list[int]:
        """Channels that never changed."""
        finite = np.isfinite(self.sums.blocks[0].diagonal())
        return [self.first + int(one) for one in np.flatnonzero(np.isnan(self._moments[1]) & finite)]


class CorrelationCollector(LayerHooks):
    """Sums up, while a model runs, how the channels that each convolution and linear layer returns go together.

    Projections of attention are among them, also where their modules are not called; three that are packed into one
    weight are `*.in_proj_weight`, with the channels of queries, keys and values in this order.
    Memory: C x C numbers of 8 bytes for a layer of C channels, twice.

    Args:
        model: not compiled, and not changed.
        paths: of the layers that are looked at; None: all of those.
        positions: looked at in each call, evenly spread where there are more.

    Raises:
        UsageError: the sums would take more than half of the memory that is free.
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
        self._found: dict[tuple[str, int], Products] = {}
        self._pass: dict[tuple[str, int], Products] = {}
        self._used: Counter[str] = Counter()

    def start_pass(self) -> None:
        """Forget what a pass that raised has left."""
        super().start_pass()
        self._pass.clear()
        self._used.clear()

    def finish_pass(self) -> None:
        """Add what the finished pass showed."""
        self._found |= self._pass

    def seen(self, where: Where, values: Tensor, axis: int) -> None:
        """Add what a layer returned."""
        if where.batch is None or values.dim() < 2:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            rows = values.detach().movedim(axis, -1)
            rows = rows.reshape(-1, rows.shape[-1])  # (positions, C)
            if len(rows) > self._positions:
                rows = rows[:: (len(rows) // self._positions) | 1]  # odd, so as not to keep to some columns of an image
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            self._add(where.path, self._first(where.path, rows.shape[1]), rows)

    def _first(self, path: str, channels: int) -> int:
        """Of a weight that is used in parts, one call after the other, the first row of this part."""
        whole = self._rows.get(path, channels)
        first = self._used[path] % whole
        self._used[path] += channels
        return first

    def _add(self, path: str, first: int, rows: Tensor) -> None:
        key = path, first
        known = self._pass.get(key) or self._found.get(key)
        shift = rows.mean(0) if known is None else torch.from_numpy(known.shift).to(rows)
        rows = rows - shift
        origin, total, blocks = (part.cpu().double().numpy() for part in (shift, rows.sum(0), (rows.T @ rows)[None]))
        seen = InputMoments(len(rows), total, blocks)
        self._pass[key] = (
            Products(path, first, origin, seen) if known is None else replace(known, sums=known.sums.merge(seen))
        )

    def products(self) -> list[Products]:
        """Of each layer that ran, in order of execution.

        Raises:
            UsageError: the model has not run inside the `with`.
        """
        self.require_passes()
        return list(self._found.values())


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
    """Return channels that an earlier one of the same layer can stand for, as far as a linear reader is concerned.

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

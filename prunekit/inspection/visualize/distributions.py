"""Histograms of the weights and activations of each layer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.inspection.capture.layer_hooks import LayerHooks, Layers, TensorKey, weights_with_channels
from prunekit.statistics.observers import watch
from prunekit.utils.private_torch import without_torch_function

BINS = 48
NO_RANGE = (torch.inf, -torch.inf)


@dataclass(frozen=True)
class Distribution:
    """A histogram of equal bins."""

    # low, high: the least and the greatest value
    low: float
    high: float
    counts: tuple[int, ...]  # number of values in each bin; NaN and Inf are in none


def weight_distributions(model: nn.Module, bins: int = BINS) -> dict[str, Distribution]:
    """Return histograms of the weights of every convolution, linear layer and projection of attention, by path."""
    found = {}
    for path, weight in weights_with_channels(model).items():
        low, high = _range(weight)
        if low <= high:
            found[path] = Distribution(low, high, tuple(_counted(weight, low, high, bins).tolist()))
    return found


def activation_distributions(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Layers | None = None,
    *,
    device: torch.device | str | None = None,
    bins: int = BINS,
) -> dict[str, Distribution]:
    """Return histograms of the outputs of layers in eval mode, over all calls, by path in order of execution.

    The model runs twice over the batches: once for the ranges, once to count.
    """
    chosen = list(weights_with_channels(model)) if layers is None else layers
    ranges: dict[str, tuple[float, float]] = {}
    counts: dict[str, Tensor] = {}

    def widen(key: TensorKey, values: Tensor, axis: int) -> None:
        low, high = ranges.get(key.path, NO_RANGE)
        with without_torch_function():
            least, greatest = _range(values.detach())
        ranges[key.path] = min(low, least), max(high, greatest)

    def count(key: TensorKey, values: Tensor, axis: int) -> None:
        low, high = ranges.get(key.path, NO_RANGE)
        if low <= high:
            with without_torch_function():
                counts[key.path] = _counted(values.detach(), low, high, bins) + counts.get(key.path, 0)

    for look in (widen, count):
        watch(model, batches, LayerHooks(model, chosen, "output", look=look), device=device)
    return {path: Distribution(*ranges[path], tuple(found.tolist())) for path, found in counts.items()}


def _range(values: Tensor) -> tuple[float, float]:
    """Return the least and the greatest finite value; inf and -inf if there is none."""
    finite = values[values.isfinite()].float()
    return (float(finite.min()), float(finite.max())) if len(finite) else NO_RANGE


def _counted(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Return the number of finite values in each bin, (bins,)."""
    width = (high - low) / bins or 1.0
    finite = values[values.isfinite()].float()
    return torch.bincount(((finite - low) / width).long().clamp_(0, bins - 1), minlength=bins)


def rows_of(found: Mapping[str, Distribution], **more: Any) -> list[dict[str, Any]]:
    """Return a row for each bin: `more`, layer, low, high, count."""
    rows = []
    for layer, one in found.items():
        width = (one.high - one.low) / len(one.counts)
        for index, count in enumerate(one.counts):
            low = one.low + index * width
            rows.append({**more, "layer": layer, "low": low, "high": low + width, "count": count})
    return rows

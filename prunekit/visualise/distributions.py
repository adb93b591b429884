"""How weights and activations of each layer are distributed, as histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.calibration.passes import run_passes
from prunekit.calibration.redundancy import layers_with_channels, weight_of
from prunekit.capturing import Layers, capture, choose

BINS = 48


@dataclass(frozen=True)
class Distribution:
    """A histogram of equal bins.

    Attributes:
        low, high: the least and the greatest value.
        counts: values in each bin.
        zeros: those that are exactly 0.
        not_finite: NaN and Inf, which are in no bin.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    zeros: int
    not_finite: int

    @property
    def total(self) -> int:
        """Finite values."""
        return sum(self.counts)


def weight_distributions(model: nn.Module, bins: int = BINS) -> dict[str, Distribution]:
    """Of the weights of each convolution and linear layer, by its path."""
    found = {}
    for path, module in layers_with_channels(model).items():
        weight = weight_of(module)
        low, high = _range(weight).tolist()
        if low <= high:
            found[path] = _distribution(low, high, _counted(low, high, bins)(weight))
    return found


def activation_distributions(
    model: nn.Module,
    batches: Iterable[Any],
    device: torch.device,
    layers: Layers | None = None,
    bins: int = BINS,
) -> dict[str, Distribution]:
    """Of what layers return, over all calls, by their paths in the order of the model; in eval mode.

    The model runs twice over the batches: once for the ranges, once to count.

    Args:
        model: already on `device`; not changed.
        batches: can be gone through twice; see `run_passes`.
        layers: see `prunekit.capture`; None: convolutions and linear layers.
        bins: of each histogram.

    Raises:
        UsageError: a glob matches nothing.
    """
    paths = choose(model, list(layers_with_channels(model)) if layers is None else layers, "layers").paths
    with ExitStack() as entered:
        records = {path: entered.enter_context(capture(model, path, reduce=_range)) for path in paths}
        run_passes(model, batches, device)
    ranges = {path: _widest(record.values()) for path, record in records.items()}
    ranges = {path: bounds for path, bounds in ranges.items() if bounds[0] <= bounds[1]}
    with ExitStack() as entered:
        records = {
            path: entered.enter_context(capture(model, path, reduce=_counted(*bounds, bins)))
            for path, bounds in ranges.items()
        }
        run_passes(model, batches, device)
    return {path: _distribution(*ranges[path], sum(record.values())) for path, record in records.items()}


def _range(values: Tensor) -> Tensor:
    """(2,) The least and the greatest finite value; inf and -inf where there is none."""
    finite = values[values.isfinite()].float()
    return torch.stack((finite.min(), finite.max())) if len(finite) else torch.tensor([torch.inf, -torch.inf])


def _widest(ranges: list[Tensor]) -> tuple[float, float]:
    low, high = torch.inf, -torch.inf
    for bounds in ranges:
        low, high = min(low, float(bounds[0])), max(high, float(bounds[1]))
    return low, high


def _counted(low: float, high: float, bins: int) -> Callable[[Tensor], Tensor]:
    """Counts values: (bins + 2,), the last two of zeros and of what is not finite."""
    width = (high - low) / bins or 1.0

    def count(values: Tensor) -> Tensor:
        finite = values[values.isfinite()].float()
        place = ((finite - low) / width).long().clamp_(0, bins - 1)
        counts = torch.bincount(place, minlength=bins)
        more = torch.stack(((finite == 0).sum(), torch.tensor(values.numel() - len(finite), device=counts.device)))
        return torch.cat((counts, more))

    return count


def _distribution(low: float, high: float, counted: Tensor) -> Distribution:
    *counts, zeros, bad = (int(number) for number in counted.tolist())
    return Distribution(low, high, tuple(counts), zeros, bad)


def rows_of(found: Mapping[str, Distribution], **more: Any) -> list[dict[str, Any]]:
    """A row for each bin: `more`, layer, low, high, count."""
    rows = []
    for layer, one in found.items():
        width = (one.high - one.low) / len(one.counts)
        for index, count in enumerate(one.counts):
            low = one.low + index * width
            rows.append({**more, "layer": layer, "low": low, "high": low + width, "count": count})
    return rows

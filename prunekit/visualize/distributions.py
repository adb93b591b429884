"""How weights and activations of each layer are distributed, as histograms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.calibration.passes import run_passes
from prunekit.capturing import LayerHooks, Layers, Where, choose
from prunekit.capturing.layers import weights_with_channels

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
    """Of the weights of each convolution, linear layer and projection of attention, by its path."""
    found = {}
    for path, weight in weights_with_channels(model).items():
        low, high = _range(weight)
        if low <= high:
            found[path] = _distribution(low, high, _counted(weight, low, high, bins))
    return found


def activation_distributions(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Layers | None = None,
    *,
    device: torch.device | str | None = None,
    bins: int = BINS,
) -> dict[str, Distribution]:
    """Of what layers return, over all calls, by their paths in order of execution; in eval mode.

    The model runs twice over the batches: once for the ranges, once to count.

    Args:
        model: not changed.
        batches: can be gone through twice; see `run_passes`.
        layers: see `prunekit.capture`; None: convolutions, linear layers and projections of attention.
        device: where the batches go; None: where the model's parameters are.
        bins: of each histogram.

    Raises:
        UsageError: a glob matches nothing.
    """
    chosen = list(weights_with_channels(model)) if layers is None else layers
    choose(model, chosen, "layers")  # for its message
    ranges = _Ranges(model, chosen)
    run_passes(model, batches, device, ranges)
    counts = _Counts(model, chosen, ranges.finite(), bins)
    run_passes(model, batches, device, counts)
    return {path: _distribution(*counts.ranges[path], found) for path, found in counts.found.items()}


class _Ranges(LayerHooks):
    """The least and the greatest finite value of what each layer returns."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        super().__init__(model, layers, "output")
        self._found: dict[str, tuple[float, float]] = {}

    def seen(self, where: Where, values: Tensor, axis: int) -> None:
        """Widens the range of a layer."""
        low, high = self._found.get(where.path, (torch.inf, -torch.inf))
        with torch._C.DisableTorchFunction():
            least, greatest = _range(values.detach())
        self._found[where.path] = min(low, least), max(high, greatest)

    def finite(self) -> dict[str, tuple[float, float]]:
        """Of the layers that returned some finite value."""
        return {path: bounds for path, bounds in self._found.items() if bounds[0] <= bounds[1]}


class _Counts(LayerHooks):
    """Counts the values that layers return in bins between known ends."""

    def __init__(self, model: nn.Module, layers: Layers, ranges: Mapping[str, tuple[float, float]], bins: int) -> None:
        super().__init__(model, layers, "output")
        self.ranges, self._bins = ranges, bins
        self.found: dict[str, Tensor] = {}

    def seen(self, where: Where, values: Tensor, axis: int) -> None:
        """Adds the values of a call."""
        if where.path in self.ranges:
            with torch._C.DisableTorchFunction():
                counted = _counted(values.detach(), *self.ranges[where.path], self._bins)
            self.found[where.path] = counted + self.found.get(where.path, 0)


def _range(values: Tensor) -> tuple[float, float]:
    """The least and the greatest finite value; inf and -inf where there is none."""
    finite = values[values.isfinite()].float()
    return (float(finite.min()), float(finite.max())) if len(finite) else (torch.inf, -torch.inf)


def _counted(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    """(bins + 2,) How many values are in each bin; the last two are of zeros and of what is not finite."""
    width = (high - low) / bins or 1.0
    finite = values[values.isfinite()].float()
    place = ((finite - low) / width).long().clamp_(0, bins - 1)
    counts = torch.bincount(place, minlength=bins)
    more = torch.stack(((finite == 0).sum(), torch.tensor(values.numel() - len(finite), device=counts.device)))
    return torch.cat((counts, more))


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

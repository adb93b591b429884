"""The joint search for thresholds: passes over the data until all layers reach their shares under all masks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from prunekit.channels.tracing.execution import channel_axis
from prunekit.errors import DataError, ModelError, NonFiniteError, UsageError
from prunekit.hooks.owner import HookOwner
from prunekit.masks.activation_masks import ActivationMasks, Side, change_activations
from prunekit.statistics.layer_stats import IntArray
from prunekit.statistics.observers import watch
from prunekit.utils.progress import stage
from prunekit.utils.tensors import as_it_lies

SHIFT = 16
"""Bits of a float32 below its bucket: the exponent and the upper 7 bits of the mantissa stay."""
FINITE = 0x7F80
"""Buckets of finite values; those of Inf and NaN follow."""
BUCKETS = 0x8000
CPU_BLOCK = 2**18
"""Values counted at a time on the CPU: their bit patterns stay in the cache."""
DEVICE_BLOCK = 2**24
SMALLEST = 2.0**-149
"""The smallest float32 above 0."""

EDGES = (np.arange(FINITE + 1, dtype=np.uint32) << SHIFT).view(np.float32).astype(np.float64)
EDGES[1], EDGES[FINITE] = 0.0, 2.0**128
EDGES = EDGES[1:]
"""(FINITE,) Lower edges of the buckets from 1 on, and the end of the last. Bucket 0 holds the zeros alone."""


class MagnitudeSketch:
    """Quantiles of |x| over any number of tensors, in 256 KiB, with every value counted.

    A bucket is the upper half of |x| as float32: its edges are at most 1/128 apart, relative to the lower one (below
    1.2e-38: 9.2e-41 apart), so a threshold found here is that near to the exact one. Like DDSketch (Masson et al.
    2019), whose buckets grow by the logarithm, but found without computing one. Zeros have a bucket of their own, Inf
    and NaN are counted apart, and float64 beyond the range of float32 counts at its ends.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(BUCKETS, dtype=torch.int64)

    def add(self, values: Tensor) -> Self:
        """Count every value of a floating-point tensor of any shape, on its device; the tensor is only read."""
        if not values.is_floating_point():
            raise UsageError(f"a magnitude sketch counts floating-point values, got {values.dtype}")
        if self._counts.device != values.device:
            self._counts = self._counts.to(values.device)
        flat = as_it_lies(values)
        for block in torch.split(flat, CPU_BLOCK if flat.device.type == "cpu" else DEVICE_BLOCK):
            self._counts += _count(block)
        return self

    @property
    def count(self) -> int:
        """Finite values, zeros included."""
        return int(self._counts[:FINITE].sum())

    @property
    def zero_share(self) -> float:
        """Share of zeros among the finite values, 0..1; 0 if there are none."""
        return int(self._counts[0]) / max(1, self.count)

    @property
    def non_finite(self) -> int:
        """Values that are Inf or NaN."""
        return int(self._counts[FINITE:].sum())

    def quantile(self, share: float) -> float:
        """Return the threshold t for which the share of finite values with |x| < t is nearest to `share`."""
        if not 0 <= share <= 1:
            raise UsageError(f"quantile: expected a share from 0 to 1, got {share}")
        below = self._below()
        target = share * below[-1]
        index = int(np.searchsorted(below, target))
        if index == 0:
            return 0.0
        part = (target - below[index - 1]) / (below[index] - below[index - 1])
        return float(EDGES[index - 1] + part * (EDGES[index] - EDGES[index - 1]))

    def _below(self) -> IntArray:
        """Return how many values lie below each edge, (FINITE,); zeros count as below the first."""
        below: IntArray = self._counts[:FINITE].cpu().numpy().cumsum()
        if below[-1] == 0:
            raise UsageError("the sketch has counted no finite value: run the model on calibration data first")
        return below


def _count(block: Tensor) -> Tensor:
    """Return how many of the values fall in each bucket, (BUCKETS,)."""
    bits = _truncated(block).view(torch.int32) & 0x7FFFFFFF  # without the sign
    nonzero = bits.clamp(max=1).sum()
    counts = torch.bincount(bits >> SHIFT, minlength=BUCKETS)
    tiny = nonzero - counts[1:].sum()  # subnormals that share their upper bits with zero
    counts[0] -= tiny
    counts[1] += tiny
    return counts


def _truncated(values: Tensor) -> Tensor:
    """Return the values as float32, float64 rounded towards zero: never up into the next bucket, nor down to 0."""
    if values.dtype != torch.float64:
        return values.float()
    magnitude = values.abs()
    rounded = magnitude.float()
    lower = torch.where(rounded > magnitude, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)
    return torch.maximum(lower, (magnitude > 0) * SMALLEST)


ROUNDS = 20
"""The most passes over the calibration data."""
NEAR = 0.001
"""Distance from its share of zeros, as a share of the values, at which the search for a layer ends."""

Sketches = Mapping[str, MagnitudeSketch]
"""By module path, of the activations in front of each mask."""


@dataclass(frozen=True, eq=False)
class MaskedActivations:
    """A model, the activations that are masked in it, and the data to run it on."""

    model: nn.Module  # in any mode; run in eval mode
    paths: tuple[str, ...]  # of the modules
    side: Side  # whether their inputs or outputs are masked
    batches: Iterable[tuple[Any, Any]]  # pairs whose first entry is what the model is called with; read several times
    device: torch.device  # where it runs


@dataclass(frozen=True, eq=False)
class FoundThresholds:
    """Thresholds, and what they reach."""

    thresholds: dict[str, float]  # by module path
    reached: dict[str, float]  # share of zeros behind each mask, with all masks active
    shares: Mapping[str, float]  # that were to be reached, in the last pass
    rounds: int  # passes over the data


def search_thresholds(masked: MaskedActivations, shares: Callable[[Sketches], Mapping[str, float]]) -> FoundThresholds:
    """Search for thresholds under which each layer has its share of zeros, with all masks active."""
    thresholds, rounds = dict.fromkeys(masked.paths, 0.0), 0
    while True:
        rounds += 1
        stage(f"threshold search: pass {rounds}, {ROUNDS} at most")
        sketches, reached = sketch_activations(masked, thresholds)
        wanted = shares(sketches)
        # A layer that is near keeps its threshold, so that later layers can settle.
        far = {path: sketches[path].quantile(goal) for path, goal in wanted.items() if abs(reached[path] - goal) > NEAR}
        if far.items() <= thresholds.items() or rounds == ROUNDS:
            return FoundThresholds(thresholds, reached, wanted, rounds)
        thresholds = thresholds | far


def sketch_activations(
    masked: MaskedActivations, thresholds: Mapping[str, float]
) -> tuple[dict[str, MagnitudeSketch], dict[str, float]]:
    """Return sketches of the activations in front of each mask, and the share of zeros behind it."""
    sketches: dict[str, MagnitudeSketch] = {}
    batch = 0

    def begin(*_: Any) -> None:
        nonlocal batch
        batch += 1

    def add(path: str, tensor: Tensor) -> Tensor:
        if sketches.setdefault(path, MagnitudeSketch()).add(tensor).non_finite:
            raise NonFiniteError(_blame(masked, path, tensor, batch))
        return tensor

    def register(hooks: HookOwner) -> None:
        hooks.own_forward_pre(masked.model, begin)
        for path in thresholds:
            change_activations(hooks, masked.model, path, masked.side, partial(add, path))

    masks = ActivationMasks(masked.model, thresholds, side=masked.side)
    observers = HookOwner(register), masks  # the first to register sees values that are not masked yet
    if not watch(masked.model, masked.batches, *observers, device=masked.device, title="threshold search"):
        raise DataError("threshold search: expected at least one batch to calibrate on, got none")
    silent = [path for path in thresholds if path not in sketches]
    if silent:
        raise ModelError(f"threshold search: {silent[0]} was not called in a forward pass; choose other modules")
    return sketches, masks.sparsity().layers


def _blame(masked: MaskedActivations, path: str, tensor: Tensor, batch: int) -> str:
    axis = channel_axis(masked.model.get_submodule(path), tensor.ndim)
    first = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    channel = f", channel {first[axis]}" if first else ""
    return (
        f"threshold search: NaN or Inf in the {masked.side} of {path}, batch {batch}{channel}; expected finite "
        "activations: check the images, and the weights up to there"
    )

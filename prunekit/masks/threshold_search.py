"""The joint search for thresholds: passes over the data until all layers reach their shares under all masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunekit.channels.tracing.tracer import channel_axis
from prunekit.errors import DataError, ModelError, NonFiniteError
from prunekit.hooks.owner import HookOwner
from prunekit.masks.activation_masks import ActivationMasks, Side, change_activations
from prunekit.statistics.magnitude_sketch import MagnitudeSketch
from prunekit.utils.context import training_mode
from prunekit.utils.inputs import call, running, to_device
from prunekit.utils.progress import stage, tracked

ROUNDS = 20
"""The most passes over the calibration data."""
NEAR = 0.001
"""Distance from its share of zeros, as a share of the values, at which the search for a layer ends."""

Sketches = Mapping[str, MagnitudeSketch]
"""By module path, of the activations in front of each mask."""


@dataclass(frozen=True, eq=False)
class MaskedModel:
    """A model, the activations that are masked in it, and the data to run it on.

    Attributes:
        model: in any mode; run in eval mode.
        paths: of the modules.
        side: whether their inputs or outputs are masked.
        batches: pairs whose first entry is what the model is called with; read several times.
        device: where it runs.
    """

    model: nn.Module
    paths: tuple[str, ...]
    side: Side
    batches: Iterable[tuple[Any, Any]]
    device: torch.device


@dataclass(frozen=True, eq=False)
class FoundThresholds:
    """Thresholds, and what they reach.

    Attributes:
        thresholds: by module path.
        reached: share of zeros behind each mask, with all masks active.
        shares: that were to be reached, in the last pass.
        rounds: passes over the data.
    """

    thresholds: dict[str, float]
    reached: dict[str, float]
    shares: Mapping[str, float]
    rounds: int


def search_thresholds(masked: MaskedModel, shares: Callable[[Sketches], Mapping[str, float]]) -> FoundThresholds:
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
    masked: MaskedModel, thresholds: Mapping[str, float]
) -> tuple[dict[str, MagnitudeSketch], dict[str, float]]:
    """Return sketches of the activations in front of each mask, and the share of zeros behind it."""
    sketches = _Sketches(masked.model, thresholds, masked.side)
    masks = ActivationMasks(masked.model, thresholds, side=masked.side)
    with training_mode(masked.model, False), torch.no_grad(), sketches, masks:
        for inputs, _ in tracked(masked.batches, "threshold search"):
            sketches.batch += 1
            with running(masked.model, inputs):
                call(masked.model, to_device(inputs, masked.device))
    if not sketches.batch:
        raise DataError("threshold search: expected at least one batch to calibrate on, got none")
    silent = [path for path in thresholds if path not in sketches.found]
    if silent:
        raise ModelError(f"threshold search: {silent[0]} was not called in a forward pass; choose other modules")
    return sketches.found, masks.sparsity().layers


class _Sketches(HookOwner):
    """Hooks that sketch activations; entered before the masks, they see values that are not masked yet."""

    def __init__(self, model: nn.Module, paths: Iterable[str], side: Side) -> None:
        super().__init__()
        self._model, self._paths, self._side = model, paths, side
        self.found: dict[str, MagnitudeSketch] = {}
        self.batch = 0

    def register(self) -> None:
        for path in self._paths:
            change_activations(self, self._model, path, self._side, self._add(path))

    def _add(self, path: str) -> Callable[[Tensor], Tensor]:
        def add(tensor: Tensor) -> Tensor:
            if self.found.setdefault(path, MagnitudeSketch()).add(tensor).non_finite:
                raise NonFiniteError(self._blame(path, tensor))
            return tensor

        return add

    def _blame(self, path: str, tensor: Tensor) -> str:
        axis = channel_axis(self._model.get_submodule(path), tensor.ndim)
        first = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        channel = f", channel {first[axis]}" if first else ""
        return (
            f"threshold search: NaN or Inf in the {self._side} of {path}, batch {self.batch}{channel}; expected finite "
            "activations: check the images, and the weights up to there"
        )

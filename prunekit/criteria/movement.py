"""Importance from how training moves weights: away from zero, or towards it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.calibration.gradients import Axis
from prunekit.channels import ChannelMap
from prunekit.channels.belonging import require_model
from prunekit.criteria.registry import Scores
from prunekit.hooks.steps import StepHook, by_axis, unscaled


class Movement(StepHook):
    """Adds up, step by step while it is active, how far each channel's weights are moved away from zero.

    The sum over steps of -w * dL/dw (Sanh et al. 2020, "Movement pruning", equation 5), and over all entries of a
    label's slices on all its axes, biases and the scales of norms among them: a filter in front of a BatchNorm has
    none of its own, because that makes the loss the same at any scale of it. Sums are comparable between groups, and
    may be negative. What is masked has no gradient, because a channel goes with all that makes and reads it: its sum
    stays what it was. A step that float16's loss scale skips adds nothing.

    Args:
        model: in training.
        channel_map: of it.
        optimizer: torch's own, whose steps count.

    Raises:
        PlanError: the map is that of another model.
    """

    def __init__(self, model: nn.Module, channel_map: ChannelMap, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        require_model(channel_map, model, "the channel map")
        self._model, self._map = model, channel_map
        self._sums: dict[Axis, Tensor] = {}

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Adds the step's sums."""
        for name, weight in self._model.named_parameters():
            axes = self._map.labels.get(name, ())
            if weight.grad is None or not any(labels is not None for labels in axes):
                continue
            moved = -(weight * weight.grad).float()
            for axis, labels in enumerate(axes):
                if labels is not None:
                    rest = [other for other in range(weight.ndim) if other != axis]
                    key = name, axis
                    along = unscaled(optimizer, moved.sum(rest) if rest else moved)  # (size,)
                    self._sums[key] = self._sums[key] + along if key in self._sums else along

    def scores(self) -> Scores:
        """The sums of all labels so far, (n_labels,) float64; label 0, the locked channels, has +inf."""
        found = np.zeros(self._map.n_labels)
        for (name, axis), sums in self._sums.items():
            labels = self._map.labels[name][axis]
            assert labels is not None
            for deciding in self._map.deciding(labels):
                np.add.at(found, deciding, sums.double().cpu().numpy())
        found[0] = np.inf
        return found

    def state_dict(self) -> dict[str, Any]:
        """The sums by parameter and axis, {"name:axis": (size,)}."""
        return {f"{name}:{axis}": sums.clone() for (name, axis), sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from other sums.

        Raises:
            ArtifactError: they are of another model.
        """
        self._sums = by_axis(state, self._model, "movement scores")

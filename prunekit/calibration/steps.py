"""Taylor terms from the gradients that training makes anyway."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.calibration.gradients import Axis, TaylorTerms, axis_sums
from prunekit.channels import ChannelMap
from prunekit.errors import NonFiniteError, UsageError
from prunekit.hooks.steps import StepHook, by_axis, unscaled

STEPS = 64
"""The most steps whose terms are kept; of more, as many that are evenly spread."""


class StepGradients(StepHook):
    """Keeps weight times gradient of the steps that an optimizer makes, as a context manager.

    Each step counts as one batch of `collect_gradients`: the gradient is that of all its micro-batches and processes,
    clipped where the loop clips it before the step, and without the loss scale. Of more than `STEPS` steps every
    second one is left out, and so on, so that memory stays bounded and the terms are of all the time since the
    last look. Frozen parameters have no gradient and count as 0.

    Args:
        model: in training.
        channel_map: of it; axes without free labels are left out.
        optimizer: torch's own, whose steps count.
    """

    def __init__(self, model: nn.Module, channel_map: ChannelMap, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._model, self._map = model, channel_map
        self._axes = {
            name: [axis for axis, labels in enumerate(axes) if labels is not None and labels.any()]
            for name, axes in channel_map.labels.items()
        }
        self._rows: list[dict[Axis, Tensor]] = []
        self._steps, self._stride, self._used = 0, 1, False

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Adds the step's terms."""
        if self._used:  # a plan was made from these
            self._rows, self._steps, self._stride, self._used = [], 0, 1, False
        self._steps += 1
        if (self._steps - 1) % self._stride:
            return
        if len(self._rows) == STEPS:
            self._rows, self._stride = self._rows[::2], 2 * self._stride
            if (self._steps - 1) % self._stride:
                return
        row: dict[Axis, Tensor] = {}
        for name, weight in self._model.named_parameters():
            if weight.grad is not None and (axes := self._axes.get(name)):
                gradient = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                sums = axis_sums(weight, gradient, torch.float32)  # in each step: half the time that float64 takes
                found = enumerate(islice(sums, axes[-1] + 1))
                row |= {(name, axis): unscaled(optimizer, each) for axis, each in found if axis in axes}
        self._rows.append(row)

    def terms(self) -> TaylorTerms:
        """The terms since the last look; the same again where no step was made since.

        Raises:
            UsageError: no step was made yet, or a group of channels lies on parameters without a gradient alone.
            NonFiniteError: a gradient or a weight is NaN or Inf; names the parameter.
        """
        if not self._rows:
            raise UsageError(
                "expected at least one optimizer step before channels are scored by its gradients, got none; let the "
                "schedule begin later: begin=1 or more"
            )
        self._used = True
        stacked = {axis: values.cpu().double().numpy() for axis, values in self._stacked().items()}
        self._require_gradients({name for name, _ in stacked})
        for (name, _), values in stacked.items():
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"the gradient of parameter {name!r} times its weight was NaN or Inf in a step; check the loss, "
                    "the data and the learning rate"
                )
        rows = len(self._rows)
        shapes = self._map.shapes
        wanted = {(name, axis): shapes[name][axis] for name, axes in self._axes.items() for axis in axes}
        return TaylorTerms({key: stacked.get(key, np.zeros((rows, size))) for key, size in wanted.items()})

    def _stacked(self) -> dict[Axis, Tensor]:
        """(steps, size) of each axis that had a gradient in any step."""
        like = {axis: values for row in self._rows for axis, values in row.items()}
        return {
            axis: torch.stack([row.get(axis, torch.zeros_like(values)) for row in self._rows])
            for axis, values in like.items()
        }

    def _require_gradients(self, names: set[str]) -> None:
        for group in self._map.groups:
            if not any(name in names for name, _ in group.slots):
                raise UsageError(
                    f"no parameter on which the channels of group {group.name!r} lie had a gradient since the last "
                    "stage; train them, leave them whole with ignore=, or score by a criterion of weights, such as "
                    "'l2'"
                )

    def state_dict(self) -> dict[str, Any]:
        """The terms by parameter and axis, {"name:axis": (steps, size)}, and which steps they are of."""
        return {
            "rows": {f"{name}:{axis}": values for (name, axis), values in self._stacked().items()},
            "kept": len(self._rows),
            "steps": self._steps,
            "stride": self._stride,
            "used": self._used,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            ArtifactError: it is of another model.
        """
        stacked = by_axis(state["rows"], self._model, "gradients of steps")
        self._rows = [{axis: values[at] for axis, values in stacked.items()} for at in range(int(state["kept"]))]
        self._steps, self._stride = int(state["steps"]), int(state["stride"])
        self._used = bool(state["used"])

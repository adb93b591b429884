"""Importance from gradients: how much the loss would change without a channel, and how training moves its weights."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prunekit.channels.cut.model_match import require_model
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.criterion import Evidence, Scores, register_criterion
from prunekit.criteria.scoring import LabelMean, mean_over_slices
from prunekit.errors import UsageError
from prunekit.hooks.step_hooks import StepHook, by_axis, unscaled
from prunekit.statistics.layer_stats import FloatArray, IntArray
from prunekit.statistics.taylor_terms import Axis
from prunekit.utils.tensors import as_real


@register_criterion(
    "taylor",
    needs=("weights", "gradients", "labels"),
    measures="(w dL/dw)^2",
    paper="Molchanov et al. 2019, order 1",
    comparable=True,
)
def taylor(evidence: Evidence) -> Scores:
    """Return first-order Taylor scores: the mean over batches of (sum over a label's slice of w * dL/dw) squared.

    (Molchanov et al. 2019, "Importance estimation for neural network pruning", the group contribution of a filter.) It
    estimates a change of the loss, in the same unit in every layer.
    """
    assert evidence.gradients is not None  # `score` checked what this criterion needs
    return _of_slices(evidence, evidence.gradients.terms, _mean_square)


@register_criterion(
    "taylor2",
    needs=("weights", "gradients", "curvature", "labels"),
    measures="(w dL/dw - w H w / 2)^2",
    paper="Molchanov et al. 2019, order 2",
    comparable=True,
)
def taylor2(evidence: Evidence) -> Scores:
    """Return second-order Taylor scores: the mean over batches of (sum of w * dL/dw - w * (H w) / 2) squared.

    The sum is over a label's slice (Molchanov et al. 2019, "Importance estimation for neural network pruning",
    equation 6: w_m H_m w, with H_m a row of the Hessian and w all weights).
    """
    gradients = evidence.gradients
    assert gradients is not None
    assert gradients.curvature is not None
    second = gradients.curvature
    terms = {axis: first - second[axis] / 2 for axis, first in gradients.terms.items()}
    return _of_slices(evidence, terms, _mean_square)


@register_criterion(
    "obd",
    needs=("weights", "gradients", "curvature", "labels"),
    measures="H_ii w^2 / 2",
    paper="LeCun et al. 1990, Optimal brain damage",
    comparable=True,
)
def obd(evidence: Evidence) -> Scores:
    """Return half the sum over a label's slice of H_kk * w_k^2, the mean over batches, at least 0.

    (LeCun et al. 1990, "Optimal brain damage", with Hutchinson's estimate of the Hessian's diagonal, see
    `collect_gradients`. As in the paper, the loss is taken to be at a minimum: a negative sum counts as 0.)
    """
    gradients = evidence.gradients
    assert gradients is not None
    assert gradients.diagonal is not None
    return _of_slices(evidence, gradients.diagonal, lambda joint: (joint.mean(1) / 2).clip(min=0))


def _mean_square(joint: FloatArray) -> FloatArray:
    return np.asarray((joint**2).mean(1))


def _of_slices(
    evidence: Evidence, of_axes: Mapping[Axis, FloatArray], value: Callable[[FloatArray], FloatArray]
) -> Scores:
    """Return the mean over a label's slices of `value` of the sums over each label, (labels, batches)."""

    def measure(found: LabelMean, name: str, weight: Tensor, labeled: dict[int, IntArray]) -> None:
        for axis, labels in labeled.items():
            terms = of_axes.get((name, axis))
            if terms is None or terms.shape[1] != len(labels):
                raise UsageError(
                    f"gradients: expected terms of parameter {name!r} for {len(labels)} indices along axis {axis}, got "
                    f"{'none' if terms is None else terms.shape[1]}; collect them from the model that is scored"
                )
            for deciding in evidence.channel_map.deciding(labels):
                members, position = np.unique(deciding, return_inverse=True)
                joint = np.zeros((len(members), len(terms)))
                np.add.at(joint, position, terms.T)
                found.add(members, value(joint))

    return mean_over_slices(evidence, measure)


class Movement(StepHook):
    """Movement of each channel's weights away from zero, summed over the optimizer's steps while the hook is active.

    The sum over steps of -w * dL/dw (Sanh et al. 2020, "Movement pruning", equation 5), and over all entries of a
    label's slices on all its axes, including biases and the scales of norms: a filter in front of a BatchNorm has
    no movement of its own, because the loss is the same at any scale of it. Sums are comparable between groups, and may
    be negative. A masked channel has no gradient, so its sum does not change. A step that float16's loss scale skips
    adds nothing.

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
        """Add the step's sums."""
        for name, weight in self._model.named_parameters():
            axes = self._map.labels.get(name, ())
            if weight.grad is None or not any(labels is not None for labels in axes):
                continue
            moved = -(as_real(weight) * as_real(weight.grad)).float()
            for axis, labels in enumerate(axes):
                if labels is not None:
                    rest = [other for other in range(moved.ndim) if other != axis]
                    key = name, axis
                    along = unscaled(optimizer, moved.sum(rest) if rest else moved)  # (size,)
                    self._sums[key] = self._sums[key] + along if key in self._sums else along

    def scores(self) -> Scores:
        """Return the sums of all labels so far, (n_labels,) float64; label 0, the locked channels, has +inf."""
        found = np.zeros(self._map.n_labels)
        for (name, axis), sums in self._sums.items():
            labels = self._map.labels[name][axis]
            assert labels is not None
            for deciding in self._map.deciding(labels):
                np.add.at(found, deciding, sums.double().cpu().numpy())
        found[0] = np.inf
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the sums by parameter and axis, {"name:axis": (size,)}."""
        return {f"{name}:{axis}": sums.clone() for (name, axis), sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore sums that `state_dict` returned."""
        self._sums = by_axis(state, self._model, "movement scores")

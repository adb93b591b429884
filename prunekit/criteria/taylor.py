"""Importance from what the loss would lose: weights times their gradients and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from prunekit.calibration.gradients import Axis
from prunekit.criteria.registry import Evidence, Scores, register_criterion
from prunekit.criteria.slices import FloatArray, IntArray, LabelMean, mean_over_slices
from prunekit.errors import UsageError


@register_criterion(
    "taylor",
    needs=("weights", "gradients", "labels"),
    measures="(w dL/dw)^2",
    paper="Molchanov et al. 2019, order 1",
    comparable=True,
)
def taylor(evidence: Evidence) -> Scores:
    """First-order Taylor: the mean over batches of (sum over a label's slice of w * dL/dw) squared.

    (Molchanov et al. 2019, "Importance estimation for neural network pruning", the group contribution of a filter.) It
    estimates a change of the loss, in the same unit in every layer.

    Raises:
        UsageError: the gradients are those of another model.
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
    """Second-order Taylor: the mean over batches of (sum over a label's slice of w * dL/dw - w * (H w) / 2) squared.

    (Molchanov et al. 2019, "Importance estimation for neural network pruning", equation 6: w_m H_m w, with H_m a row
    of the Hessian and w all weights.)

    Raises:
        UsageError: the gradients are those of another model.
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
    """Optimal brain damage: half the sum over a label's slice of H_kk * w_k^2, the mean over batches, at least 0.

    (LeCun et al. 1990, "Optimal brain damage", with the Hessian's diagonal as Hutchinson's estimate, see
    `calibration.collect_gradients`. As there, the loss is taken to be at a minimum: a negative sum counts as 0.)

    Raises:
        UsageError: the gradients are those of another model.
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
    """Mean over a label's slices of `value`, which gets the sums over each label, (labels, batches)."""

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

"""Importance from what the loss would lose: weights times their gradients."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from prunekit.criteria.registry import Evidence, Scores, criterion
from prunekit.criteria.slices import IntArray, LabelMean, mean_over_slices
from prunekit.errors import UsageError


@criterion("taylor", needs="gradients", comparable=True)
def taylor(evidence: Evidence) -> Scores:
    """First-order Taylor: the mean over batches of (sum over a label's slice of w * dL/dw) squared.

    (Molchanov et al. 2019, "Importance estimation for neural network pruning", the group contribution of a filter.) It
    estimates a change of the loss, in the same unit in every layer.

    Raises:
        UsageError: the gradients are those of another model.
    """
    gradients = evidence.gradients
    assert gradients is not None  # `score` checked what this criterion needs

    def measure(found: LabelMean, name: str, weight: Tensor, labelled: dict[int, IntArray]) -> None:
        for axis, labels in labelled.items():
            terms = gradients.terms.get((name, axis))
            if terms is None or terms.shape[1] != len(labels):
                raise UsageError(
                    f"gradients: expected terms of parameter {name!r} for {len(labels)} indices along axis {axis}, got "
                    f"{'none' if terms is None else terms.shape[1]}; collect them from the model that is scored"
                )
            for deciding in evidence.channel_map.deciding(labels):
                members, position = np.unique(deciding, return_inverse=True)
                joint = np.zeros((len(members), len(terms)))
                np.add.at(joint, position, terms.T)
                found.add(members, (joint**2).mean(1))

    return mean_over_slices(evidence, measure)

"""Importance scores: one for each label from a criterion's name, and the tools that criteria are written with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from prunekit.channels.cut.model_match import require_model
from prunekit.channels.tracing.channel_map import ChannelMap
from prunekit.criteria.criterion import CRITERIA, Criterion, Evidence, Need, Scores
from prunekit.errors import NonFiniteError, UsageError
from prunekit.statistics.layer_stats import FloatArray, IntArray
from prunekit.utils.inputs import described
from prunekit.utils.tensors import as_real

if TYPE_CHECKING:
    from prunekit.statistics.channel_stats import ChannelStats
    from prunekit.statistics.gram_matrices import PatchStats
    from prunekit.statistics.taylor_terms import TaylorTerms


def score(
    criterion: str,
    model: nn.Module,
    channel_map: ChannelMap,
    *,
    stats: ChannelStats | None = None,
    gradients: TaylorTerms | None = None,
    patches: PatchStats | None = None,
    seed: int = 0,
) -> Scores:
    """Return the importance of every label: those with the lowest scores are removed first.

    Args:
        stats: channel statistics of that model, from `calibrate`.
    """
    chosen = CRITERIA.get(criterion)
    _require_evidence(chosen, stats, gradients, patches)
    parameters = {name: as_real(parameter.detach()) for name, parameter in model.named_parameters()}
    require_model(channel_map, model, "the channel map")
    with torch.no_grad():
        modules = dict(model.named_modules())
        scores = chosen.function(Evidence(channel_map, modules, parameters, stats, gradients, seed, patches))
    return _checked(scores, channel_map, criterion)


def _require_evidence(
    criterion: Criterion, stats: ChannelStats | None, gradients: TaylorTerms | None, patches: PatchStats | None
) -> None:
    """Raise if something that a criterion needs is missing; the message says how to collect it."""
    gradient = "gradients of the loss on labeled calibration images"
    curvature = None if gradients is None else gradients.curvature
    known: dict[Need, tuple[bool, str, str]] = {
        "stats": (stats is not None, "channel statistics", "stats=calibrate(model, batches)"),
        "patches": (
            patches is not None,
            "Gram matrices of the patches that layers read",
            "patches=collect_patches(model, batches)",
        ),
        "gradients": (gradients is not None, gradient, "gradients=collect_gradients(model, batches, loss)"),
        "curvature": (
            curvature is not None,
            f"second derivatives beside {gradient}",
            "gradients=collect_gradients(model, batches, loss, second_order=True)",
        ),
    }
    for is_known, what, how in (known[need] for need in reversed(criterion.needs) if need in known):
        if not is_known:
            samples = "" if how.startswith("gradients") else "; prunekit.plan and prune take it from calibration=loader"
            raise UsageError(f"criterion {criterion.name!r} needs {what}: pass {how}{samples}")


def _checked(scores: Any, channel_map: ChannelMap, criterion: str) -> Scores:
    """Return a copy of what a criterion returned, float64, with the highest score for the locked label 0."""
    count = channel_map.n_labels
    expected = f"criterion {criterion!r}: expected a NumPy array with one number for each label, ({count},)"
    if not isinstance(scores, np.ndarray):
        hint = "; return it as .double().cpu().numpy()" if isinstance(scores, torch.Tensor) else ""
        raise UsageError(f"{expected}, got {described(scores)}{hint}")
    if scores.shape != (count,) or scores.dtype.kind not in "fiub":
        raise UsageError(f"{expected}, got {scores.dtype} of shape {scores.shape}")
    result = scores.astype(np.float64)
    result[0] = np.inf
    for group in channel_map.groups:
        bad = int(np.isnan(result[group.labels]).sum())
        if bad:
            raise NonFiniteError(
                f"criterion {criterion!r}: {bad} of {len(group.labels)} scores of group {group.name!r} are NaN; its "
                "weights or statistics hold NaN or Inf"
            )
    return result


def normalize(scores: Scores, channel_map: ChannelMap) -> Scores:
    """Return scores that can be ranked across layers: each divided by the mean score of its channel group.

    Layers differ in scale, so raw scores would empty whole layers (Molchanov et al. 2017 divide by the layer's l2
    norm). The mean is used because it does not depend on how many channels a group has.
    """
    result = np.array(scores, dtype=np.float64)
    for group in channel_map.groups:
        members = result[group.labels]
        finite = members[np.isfinite(members)]
        if finite.size and finite.mean() > 0:
            result[group.labels] = members / finite.mean()
    return result


class LabelMean:
    """The mean of values of a label over the axes that carry it.

    Where several labels decide on an entry together, its value counts for each; the joint label scores 0.
    """

    def __init__(self, channel_map: ChannelMap) -> None:
        self._map = channel_map
        self._total, self._axes = np.zeros(channel_map.n_labels), np.zeros(channel_map.n_labels, np.int64)
        self._axes[channel_map.joint[:, 0]] = 1

    def add(self, labels: IntArray, values: FloatArray, *, exponent: float = 1.0) -> None:
        """Add one axis: the mean of `values` over the indices that share a label, to the power of `exponent`."""
        for deciding in self._map.deciding(labels):
            found, position, count = np.unique(deciding, return_inverse=True, return_counts=True)
            self._total[found] += (np.bincount(position, values) / count) ** exponent
            self._axes[found] += 1

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Labels that some axis carried, (n_labels,)."""
        found: npt.NDArray[np.bool_] = self._axes > 0
        return found

    def result(self, *, otherwise: Scores | float = np.inf) -> Scores:
        """Return the mean for each label, (n_labels,); `otherwise` for those that no axis carried."""
        return np.where(self.seen, self._total / np.maximum(self._axes, 1), otherwise)


Measure = Callable[[LabelMean, str, Tensor, dict[int, IntArray]], None]
"""Adds values of a named weight to the mean; gets the labels on its axes: axis -> (size,)."""


def mean_over_slices(evidence: Evidence, measure: Measure) -> Scores:
    """Return the mean of `measure` over the slices of each label.

    A slice is everything that carries the label along one axis of a weight: a filter, the columns that read it, and
    behind a flatten all the columns of one channel together. Weights of two or more axes count; biases and affine
    scales count only for labels that lie on nothing else. A label on no parameter scores +inf: nothing to remove.
    """
    of_weights, of_vectors = LabelMean(evidence.channel_map), LabelMean(evidence.channel_map)
    for found, vectors in ((of_weights, False), (of_vectors, True)):
        for name, weight in evidence.parameters.items():
            if (weight.ndim < 2) == vectors:
                axes = enumerate(evidence.channel_map.labels[name])
                labeled = {axis: labels for axis, labels in axes if labels is not None and labels.any()}
                measure(found, name, weight, labeled)
        if found.seen[1:].all():
            break
    return of_weights.result(otherwise=of_vectors.result())


def require_finite(name: str, values: FloatArray) -> None:
    """Raise `NonFiniteError` if NaN or Inf is among values that were computed from the parameter `name`."""
    if not np.isfinite(values).all():
        raise NonFiniteError(f"parameter {name!r} holds NaN or Inf; importance needs finite weights")


def require_scores(
    scores: Scores, evidence: Evidence, problem: str, advice: str, known: npt.NDArray[np.bool_] | None = None
) -> Scores:
    """Return the scores if every label of a group has one."""
    missing = np.isnan(scores) if known is None else np.isnan(scores) & ~known
    for group in evidence.channel_map.groups:
        count = int(missing[group.labels].sum())
        if count:
            raise UsageError(f"{problem} for {count} of {len(group.labels)} channels of group {group.name!r}; {advice}")
    return scores
